"""Streams: sources that can only be read from the beginning, or from a state that they have given. Runs in: worker."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from distrain.data.blocks import row_count
from distrain.data.positions import decode_state, encode_state
from distrain.data.sources import ROWS_AT_ONCE, schema_of
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from distrain.data.blocks import Block
    from distrain.data.sources import Schema

_SNAPSHOT_S = 1.0
"""Seconds between two questions for the state of a stream."""
_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
"""Names of the methods that give and take the state: those of most libraries, and Grain's."""


class Mark(NamedTuple):
    """A place in a stream.

    rows: the rows before it. read: the rows that were read for them, which are more after filter().
    state: the stream's own state there, if it has states.
    """

    rows: int
    read: int
    state: Any

    def as_json(self) -> list[Any]:
        """Return the fields, for a position."""
        return [self.rows, self.read, encode_state(self.state)]

    @classmethod
    def from_json(cls, fields: list[Any]) -> Mark:
        """Return the mark of a position."""
        return cls(fields[0], fields[1], decode_state(fields[2]))


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows that come one after the other. Every rank reads all of them.

    make: returns the iterable of an epoch; a row is a dict, or any object.
    functions: are applied to each block in turn; they may drop rows.
    most: the number of rows to read, before any filter().
    trusts_states: if the iterable can tell its state, that is all that it needs to continue.
    readers: the passes in this process.
    """

    make: Callable[[], Iterable[Any]]
    functions: tuple[Callable[[Block], Block], ...] = ()
    most: float = math.inf
    trusts_states: bool = True
    readers: _Readers = field(default_factory=lambda: _Readers())

    def first(self, rows: int) -> Block:
        """Return some of the first rows, at least one if there are any."""
        return next(OpenStream(self, 0).blocks(lambda: rows), [])

    def schema(self) -> Schema:
        """Return the columns of the first row."""
        return schema_of(self.first(1))


class _Readers:
    """The passes over a stream whose iterable has a state of its own: only the newest one may read it.

    begin: the state before the first pass.
    """

    def __init__(self) -> None:
        self.newest: OpenStream | None = None
        self.begin: Any = None

    def add(self, reader: OpenStream) -> None:
        """Let a pass read from the beginning, even if the pass before has not come to the end."""
        before, self.newest = self.newest, reader
        if before is None:
            self.begin = reader.state()
        elif not before.ended:
            reader.load(self.begin)


class OpenStream:
    """A pass over a stream.

    ended: it has come to the end.
    """

    def __init__(self, stream: Stream, epoch: int) -> None:
        self.ended = False
        self._stream = stream
        self._source = stream.make()
        self._is_stateful = stream.trusts_states and _state_methods(self._source) is not None
        if self._is_stateful:
            stream.readers.add(self)
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        self._iterator: Iterator[Any] | None = None
        self._rows = 0
        self._read = 0
        self._asked_at = -math.inf
        self._loaded: Mark | None = None
        """The mark whose state was given back, until the next row is read: many sources then still tell another one."""

    @property
    def divides_itself(self) -> bool:
        """Whether it is a stream of Hugging Face or WebDataset that gives each rank rows of its own."""
        names = [getattr(part, "__name__", None) for part in getattr(self._source, "pipeline", ())]
        distributed = getattr(self._source, "_distributed", None)
        return "split_by_node" in names or getattr(distributed, "world_size", 1) > 1

    def skip_to(self, rows: int, mark: Mark | None) -> None:
        """Go to a place behind the first ``rows`` rows. ``mark``: a place before it whose state is known."""
        if mark is not None and self.load(mark.state):
            self._rows, self._read, self._loaded = mark.rows, mark.read, mark
        while self._rows < rows and (block := next(self.blocks(lambda: rows - self._rows), None)) is not None:
            del block
        if self._rows < rows:
            raise DataError(f"the stream has ended after {self._rows} rows; the checkpoint was taken after {rows}")

    def mark(self) -> Mark | None:
        """Return this place, with the stream's state. None if it has no states, or was asked a moment ago.

        None at the end, too: many libraries have begun the next epoch by then.
        """
        if self._loaded is not None:
            return self._loaded
        now = time.monotonic()
        if self.ended or now - self._asked_at < _SNAPSHOT_S or (state := self.state()) is None:
            return None
        self._asked_at = now
        return Mark(self._rows, self._read, state)

    def state(self) -> Any:
        """Return the state of the source, or of its iterator, as in Grain; None if it has none."""
        if not self._stream.trusts_states:
            return None
        holder = self._source if self._is_stateful else self._open()
        methods = _state_methods(holder)
        return methods and copy.deepcopy(getattr(holder, methods[0])())

    def load(self, state: Any) -> bool:
        """Give a state back. Return False if the source takes none."""
        holder = self._source if self._is_stateful else self._open()
        methods = _state_methods(holder) if self._stream.trusts_states else None
        if methods:
            getattr(holder, methods[1])(state)
        return methods is not None

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._source)
        return self._iterator

    def blocks(self, most: Callable[[], int]) -> Iterator[Block]:
        """Yield the rows after the functions. ``most()``: the number of rows to yield next, at most."""
        while wanted := int(min(ROWS_AT_ONCE, most(), self._stream.most - self._read)):
            if self._is_stateful and self._stream.readers.newest is not self:
                raise DataError("another loop over the stream has begun; end one before the next, as it has one state")
            rows = list(islice(self._open(), wanted))
            self._loaded = None
            self.ended = len(rows) < wanted
            if not rows:
                return
            self._read += len(rows)
            block: Block = rows
            for function in self._stream.functions:
                if row_count(block):
                    block = function(block)
            self._rows += row_count(block)
            if row_count(block):
                yield block


def _state_methods(holder: Any) -> tuple[str, str] | None:
    return next((pair for pair in _METHODS if all(callable(getattr(holder, name, None)) for name in pair)), None)
