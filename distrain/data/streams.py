"""Streams: sources that can only be read from the beginning. Runs in: worker."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from distrain.data.blocks import row_count, rows_between
from distrain.data.sources import schema_of
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from distrain.data.blocks import Block
    from distrain.data.sources import Schema

UNDIVIDED = "leave its name out of DataConfig(datasets_to_split=[...])"


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows that come one after the other. Every rank reads all of them, in each epoch from the beginning.

    make: returns the iterable of an epoch; a row is a dict, or any object.
    functions: are applied to each block in turn; they may drop rows.
    """

    make: Callable[[], Iterable[Any]]
    functions: tuple[Callable[[Block], Block], ...] = ()

    def read(self, size: int, *, epoch: int = 0, is_divided: bool = False) -> Iterator[Block]:
        """Yield all rows, at most ``size`` at once. Raises DataError for a part of what is to be divided as a whole."""
        source = self.make()
        names = [getattr(part, "__name__", None) for part in getattr(source, "pipeline", ())]  # of WebDataset
        ranks = getattr(getattr(source, "_distributed", None), "world_size", 1)  # of Hugging Face
        if is_divided and ("split_by_node" in names or ranks > 1):
            raise DataError(
                f"the stream divides itself by rank, so it must not be divided once more: {UNDIVIDED}, or have all "
                "ranks read the same rows"
            )
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        rows = iter(source)
        while block := list(islice(rows, size)):
            made: Block = block
            for function in self.functions:
                made = function(made) if row_count(made) else made
            if row_count(made):
                yield made

    def first(self, rows: int) -> Block:
        """Return some of the first rows, at most so many, and at least one if there are any."""
        return rows_between(next(self.read(rows), []), 0, rows)

    def schema(self) -> Schema:
        """Return the columns of the first row."""
        return schema_of(self.first(1))
