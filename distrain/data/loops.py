"""The loops of train_func over a dataset, one after the other, and the position in the data. Runs in: worker."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distrain.data.order import Division, RowOrder
from distrain.data.passes import PassOptions, StreamPass, TablePass, Worker, make_pass
from distrain.data.positions import DataLoop
from distrain.data.prefetch import Prefetched
from distrain.data.sources import Stream
from distrain.errors import DataError
from distrain.system.log import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from distrain.data.blocks import Block
    from distrain.data.dataset import Dataset, OpenDataset

_NOTICE_AFTER_S = 20.0
"""Seconds of all passes after which a worker may say that it mostly waits for data."""


@dataclass(slots=True)
class Times:
    """Seconds that passes took. ``waited``: train_func waited for a batch."""

    rows: int = 0
    batches: int = 0
    passed: float = 0.0
    waited: float = 0.0

    def count(self, rows: int, waited: float) -> None:
        """Count a batch."""
        self.rows += rows
        self.batches += 1
        self.waited += waited
        self.passed += waited

    def text(self, name: str) -> str:
        """Return the figures in words."""
        share = self.waited / self.passed if self.passed else 0.0
        return (
            f"dataset {name!r}: {self.rows:,} rows in {self.batches:,} batches in {self.passed:.1f} s, of which "
            f"train_func waited {self.waited:.1f} s ({share:.0%}) for a batch"
        )


@dataclass(slots=True, kw_only=True)
class _Loop(DataLoop):
    """A loop, and the pass over the dataset that it is."""

    own: TablePass | StreamPass
    items: Prefetched[Any]


@dataclass(kw_only=True)
class Loops:
    """The loops over one dataset. Each is an epoch, or what is left of one.

    name: of the dataset. rank: of this worker; rank 0 tells people what happens. start: a checkpoint's positions, by
        rank. on_change: see ``DataConfig``. is_stopping: tells if train_func knows that the run is being stopped.
    others: returns the newest loop over each dataset.
    is_read_ahead: train_func gets batches before it trains on them. counts_epochs: it takes its epoch from here.
    """

    dataset: Dataset
    name: str
    worker: Worker
    rank: int = 0
    start: InitVar[Mapping[int, dict[str, Any]] | None] = None
    on_change: str = "error"
    is_stopping: Callable[[], bool] = lambda: False
    others: Callable[[], Iterable[DataLoop]] = tuple
    times: Times = field(default_factory=Times)
    is_read_ahead: bool = False
    counts_epochs: bool = False
    loop: _Loop | None = None
    _refusal: DataError | None = None
    """The reason why the first loop may not be an epoch. A look at its first batch is allowed."""
    _said: set[str] = field(default_factory=set)

    def __post_init__(self, start: Mapping[int, dict[str, Any]] | None) -> None:
        self._start = _of_rank(start or {}, self.rank)

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0, that is being read, or that the next loop begins or continues."""
        if self.loop is None:
            return self._start.get("since", self._start["epoch"]) if self._start else 0
        return self.loop.own.epoch + self.loop.is_over

    def position(self) -> dict[str, Any]:
        """Return the position after the batches that train_func has got, as JSON. A checkpoint stores it."""
        loop = self.loop
        if loop is not None:
            loop.report()
        if loop is None or loop.is_look:
            return self._start or {"epoch": 0}
        if self.is_read_ahead and not loop.is_over:
            self._say_once(
                "read ahead",
                "TensorFlow takes batches from to_tf() before it trains on them, so a run that resumes from this "
                "checkpoint may leave some out. Checkpoints at the end of an epoch are exact, and so is a loop over "
                "iter_tf_batches()",
            )
        place: dict[str, Any] = {"epoch": self.epoch}
        if not loop.is_over:
            place |= loop.own.position()
        elif self.counts_epochs and any(other.is_open and other.began > loop.ended for other in self.others()):
            place = {"epoch": loop.own.epoch, "is_over": True}  # train_func is still in it, as in a validation
        if self._is_left_out(loop.own.epoch):
            return {**(self._start or {}), "since": place["epoch"]}
        return {
            **place,
            "order": loop.own.options.order.as_json(),
            "data": self._facts,
            "first rows": loop.own.facts,
            "ranks": self.worker.ranks,
        }

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """The data's identity: few facts for people, and a hash of all."""
        source = self.dataset.opened.source
        if isinstance(source, Stream):
            return {}
        facts = source.facts()
        shown: dict[str, Any] = {name: facts[name] for name in ("rows", "files") if name in facts}
        return {**shown, "hash": hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()}

    def _is_left_out(self, epoch: int) -> bool:
        """Return whether a rollback has left out what the checkpoint has left of an epoch."""
        return self._start is not None and self._start.get("since", math.inf) <= epoch < self._start["epoch"]

    def _next_start(self, order: RowOrder) -> tuple[int, dict[str, Any] | None]:
        """Return the epoch of the next pass, and the position at which it begins; None for the first row."""
        if self.loop is None or self.loop.is_look:
            return self.epoch, self._checked_start(order, self.epoch)
        epoch, comes_after_rollback = self.loop.own.epoch + 1, self._is_left_out(self.loop.own.epoch)
        return epoch, self._checked_start(order, epoch) if comes_after_rollback else None

    def _checked_start(self, order: RowOrder, epoch: int) -> dict[str, Any] | None:
        """Return the position of the checkpoint, if it is inside this epoch. Refuse data that has changed."""
        start, self._refusal = self._start, None
        if self._is_left_out(epoch):
            return {"is_over": True}
        if start is None or start["epoch"] != epoch or "data" not in start:
            return None
        inside = start if start.get("divisions") or start.get("rows") or start.get("is_over") else None
        now = {"data": self._facts, "order": order.as_json() if inside else start["order"]}
        changes = [kind for kind in now if now[kind] != start[kind]]
        if not changes or self.on_change == "ignore":
            return inside
        differences = "; ".join(f"the {kind} was {start[kind]}, and is {now[kind]}" for kind in changes)
        text = f"it is not the one of the checkpoint: {differences}"
        if self.on_change == "restart":
            self._say_once("changed", f"{text}; epoch {start['epoch']} starts from its first row")
            return None
        text = (
            f"{text}. DataConfig(on_change='restart') starts epoch {start['epoch']} from its first row, "
            "on_change='ignore' continues at the same position, and resume=False starts from epoch 0"
        )
        if "data" in changes:
            raise DataError(text)
        self._refusal = DataError(f"dataset {self.name!r}: {text}")
        return None

    def _say_once(self, key: str, text: str) -> None:
        if self.rank == 0 and key not in self._said:
            self._said.add(key)
            say(f"dataset {self.name!r}: {text}")

    # -- one pass -------------------------------------------------------------------------------------------------

    def run(
        self, options: PassOptions, convert: Callable[[Block], Any], prefetch: int, after: Callable[..., Any] = iter
    ) -> Iterator[Any]:
        """Yield the batches of the next pass. ``after``: gets and returns the iterator in train_func's own thread."""
        if self.loop:
            self.loop.items.stop()  # a dataset of the user's is read by one thread at a time
        with self.naming_errors():
            opened = self.dataset.opened
            epoch, start = self._next_start(options.order)
            own = make_pass(opened.source, self.worker, options, epoch, start)
        is_over = start is not None and start.get("is_over", False)
        items = Prefetched(iter(()) if is_over else self._made(own, opened, convert), prefetch)
        loop = self.loop = _Loop(is_stopping=self.is_stopping, is_first=self.loop is None, own=own, items=items)
        if is_over:
            self._say_once("continues", f"epoch {epoch} is complete, so its loop has no batches")
        elif start and own.begun:
            self._say_once("continues", f"epoch {epoch} continues {own.place}")
        last = time.monotonic()
        try:
            for batch, rows in after(iter(items)):
                now = time.monotonic()
                self.times.count(rows, now - last)
                self._check_newest(loop)
                loop.take()
                if self._refusal and loop.batches > 1:
                    raise self._refusal
                own.took(rows)
                yield batch
                last = time.monotonic()
                self.times.passed += last - now
                if self.times.passed > _NOTICE_AFTER_S and self.times.waited > self.times.passed / 2:
                    self._say_once("waits", f"train_func mostly waits for data: {self.times.text(self.name)}")
        except GeneratorExit:
            loop.leave()
            raise
        self._check_newest(loop)
        loop.end()
        if self._refusal:
            raise self._refusal
        if own.left_out:
            self._say_once(
                "left out",
                f"{own.left_out} rows of an epoch are left out, as they do not divide evenly among "
                f"{self.worker.ranks} workers",
            )

    def _check_newest(self, loop: _Loop) -> None:
        if self.loop is not loop:
            raise DataError(
                f"dataset {self.name!r}: a second loop over it has begun inside of this one, so it has no position. "
                "Name it twice in datasets=, or loop over shard.materialize()"
            )

    def _made(
        self, own: TablePass | StreamPass, opened: OpenDataset, convert: Callable[[Block], Any]
    ) -> Iterator[tuple[Any, int]]:
        """Yield the converted batches. It runs in the thread that reads ahead."""
        with self.naming_errors():
            for block, rows in own.blocks():
                yield convert(opened.finished(block)), rows

    @contextlib.contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Add the dataset's name to errors."""
        try:
            yield
        except DataError as error:
            error.args = (f"dataset {self.name!r}: {error}",)
            raise


def _of_rank(start: Mapping[int, dict[str, Any]], rank: int) -> dict[str, Any] | None:
    """Return the position to continue from. ``start``: by rank; a rank that it lacks has that of the next lower one.

    All ranks continue in the epoch of the one that has come least far. What the ranks have taken of it may differ.
    """
    if not start:
        return None
    lowest = start[min(start)]
    own = start[max((other for other in start if other <= rank), default=min(start))]
    if len(start) == 1 or own.get("ranks", 1) == 1:  # all ranks are at the same place, or the data is not divided
        return own
    least = min(start.values(), key=lambda position: (*_loops_done(position), position.get("rows", 0)))
    if not least.get("divisions"):
        return least
    *before, (count, share, _) = least["divisions"]
    taken: list[int] = []
    position = lowest
    for number in range(count):
        position = start.get(number, position)
        is_ahead = _loops_done(position) > _loops_done(least)
        taken.append(share if is_ahead else _taken_by(number, position, [*before, [count, share]]))
    return {**least, "divisions": [*before, [count, share, taken if len(set(taken)) > 1 else taken[0]]]}


def _loops_done(position: dict[str, Any]) -> tuple[int, bool]:
    """Return how many epochs are complete, and whether the loop of the next one is, too."""
    return position["epoch"], position.get("is_over", False)


def _taken_by(rank: int, position: dict[str, Any], divisions: list[Any]) -> int:
    """Return the rows that a rank has taken of the last of these divisions; 0 if it does not know that division."""
    *before, (count, share, taken) = position.get("divisions") or [[0, 0, 0]]
    return Division(count, share, taken).taken_by(rank) if [*before, [count, share]] == divisions else 0
