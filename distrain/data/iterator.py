"""What get_dataset_shard() returns: one worker's part of a dataset, and its position in it. Runs in: worker."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from distrain.data.blocks import formatter, joined, to_columns, to_rows
from distrain.data.dataset import Dataset, check_count
from distrain.data.passes import UNEVEN, PassOptions, Worker, make_pass
from distrain.data.prefetch import Prefetched
from distrain.data.sources import ROWS_AT_ONCE, MemorySource
from distrain.data.streams import Stream
from distrain.errors import DataError
from distrain.system.extras import require
from distrain.system.log import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distrain.data.blocks import Block
    from distrain.data.dataset import OpenDataset
    from distrain.data.order import RowOrder
    from distrain.data.passes import StreamPass, TablePass
    from distrain.data.sources import Schema

_NOTICE_AFTER_S = 20.0
"""Seconds of a pass after which a worker may say that it mostly waits for data."""
_ROWS_PER_READ = 256
_FRAMEWORKS = {"torch": "distrain.torch.batches", "tensorflow": "distrain.tensorflow.data"}
"""The modules that make batches for a framework. They are above this package, so they are imported when needed."""


@dataclass(slots=True)
class _Times:
    """Seconds that passes took. ``waited``: train_func waited for a batch. ``read``, ``made``: see :meth:`text`."""

    rows: int = 0
    batches: int = 0
    passed: float = 0.0
    waited: float = 0.0
    read: float = 0.0
    made: float = 0.0

    def text(self, name: str) -> str:
        share = self.waited / self.passed if self.passed else 0.0
        return (
            f"dataset {name!r}: {self.rows:,} rows in {self.batches:,} batches in {self.passed:.1f} s\n"
            f"  {self.waited:.1f} s ({share:.0%}) train_func waited for a batch\n"
            f"  {self.read:.1f} s reading, {self.made:.1f} s in functions and conversions (while train_func computed, "
            "with prefetch_batches)"
        )


@dataclass(slots=True, kw_only=True)
class _Loop:
    """A loop of train_func's, which is one pass over the dataset. ``batches``: those that train_func has got."""

    own: TablePass | StreamPass
    order: RowOrder
    items: Prefetched[Any]
    batches: int = 0
    is_done: bool = False


class DataIterator:
    """One worker's part of a dataset; :func:`distrain.get_dataset_shard` returns it.

    Each loop over ``iter_batches()`` and the like is one epoch. Every checkpoint that is reported stores how far the
    loop has come, and a run that resumes goes on with the next row, with any number of workers. A loop that is left
    with ``break`` counts as an epoch, too. One that is left after its first batch does not, so that a script may look
    at a batch first.

    All arguments are keyword-only. ``uneven`` says what happens to rows that do not divide evenly among the workers:
    ``"drop"`` leaves fewer rows than there are workers out, ``"pad"`` repeats some, ``"error"`` raises DataError. All
    workers get equally many batches.

    ::

        for epoch in range(shard.epoch, 10):
            for batch in shard.iter_torch_batches(batch_size=32):
                ...
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        name: str,
        worker: Worker,
        rank: int = 0,
        start: Mapping[int, dict[str, Any]] | None = None,
        on_change: str = "error",
        skip_streams: bool = True,
    ) -> None:
        """``worker``: who gets which rows. ``rank``: of this worker. ``start``: a checkpoint's positions, by rank."""
        self._dataset = dataset
        self._name = name
        self._worker = worker
        self._speaks = rank == 0
        self._start = _of_rank(start or {}, rank)
        self._on_change = on_change
        self._skip_streams = skip_streams
        self._loop: _Loop | None = None
        self._refusal: DataError | None = None
        """Why the first pass may not be an epoch. A look at its first batch is allowed."""
        self._is_read_ahead = False
        self._times = _Times()
        self._said: set[str] = set()

    # -- batches --------------------------------------------------------------------------------------------------

    def iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        uneven: str = "drop",
    ) -> Iterable[Any]:
        """Return the batches of an epoch. Each loop over the result is the next epoch.

        prefetch_batches: batches that a thread makes while train_func computes; 0: none. If making them takes less than
            2 ms, it is so many times what the thread makes in 2 ms.
        batch_size: rows of a batch of this worker; None: one batch for all of them.
        batch_format: ``"numpy"`` (the default: a dict of arrays), ``"pandas"`` or ``"pyarrow"``.
        drop_last: leave out the last batch if it has fewer rows.
        local_shuffle_buffer_size: shuffle so many consecutive rows in memory; ``local_shuffle_seed`` is 0 by default.
        uneven: see the class.

        Raises DataError for data that cannot be read, or that has changed since the checkpoint.

        ::

            for batch in shard.iter_batches(batch_size=32):
                print(batch["x"].shape)
        """
        options = self._options(batch_size, drop_last, local_shuffle_buffer_size, local_shuffle_seed, uneven)
        return _Epochs(partial(self._run, options, formatter(batch_format), _count(prefetch_batches)))

    def iter_torch_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
        uneven: str = "drop",
    ) -> Iterable[Any]:
        """Return the batches of an epoch as dicts of tensors. See :meth:`iter_batches`.

        dtypes: the type of all tensors, or a dict of types by column.
        device: ``"auto"``: the worker's device. On a GPU, a batch is copied while the one before is processed.
        collate_fn: gets a dict of numpy arrays, or a list of rows that are no dicts, and returns the batch. Its tensors
            are moved to the device. Default: rows that are no dicts are joined as a DataLoader joins them.
        pin_memory: copy the batches into pinned memory first, which speeds up the copy to a GPU.

        ::

            for batch in shard.iter_torch_batches(batch_size=32, dtypes=torch.float32):
                loss = batch["x"].mean()
        """
        torch = _framework("torch")
        options = self._options(batch_size, drop_last, local_shuffle_buffer_size, local_shuffle_seed, uneven)
        convert = torch.converter(dtypes, collate_fn, pin_memory=pin_memory)
        after = torch.mover(device)
        return _Epochs(partial(self._run, options, convert, _count(prefetch_batches), after))

    def iter_tf_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        dtypes: Any = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        uneven: str = "drop",
    ) -> Iterable[Any]:
        """Return the batches of an epoch as dicts of TensorFlow's tensors. See :meth:`iter_batches`.

        dtypes: the type of all tensors, or a dict of types by column.

        ::

            for batch in shard.iter_tf_batches(batch_size=32, dtypes=tf.float32):
                model.train_on_batch(batch["x"], batch["y"])
        """
        options = self._options(batch_size, drop_last, local_shuffle_buffer_size, local_shuffle_seed, uneven)
        convert = _framework("tensorflow").converter(dtypes)
        return _Epochs(partial(self._run, options, convert, _count(prefetch_batches)))

    def to_tf(
        self,
        feature_columns: str | Sequence[str],
        label_columns: str | Sequence[str],
        *,
        additional_columns: str | Sequence[str] | None = None,
        prefetch_batches: int = 1,
        batch_size: int = 1,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        feature_type_spec: Any = None,
        label_type_spec: Any = None,
        additional_type_spec: Any = None,
        uneven: str = "drop",
    ) -> Any:
        """Return a ``tf.data.Dataset`` of (features, labels), without automatic sharding. Each pass is an epoch.

        feature_columns, label_columns: a column becomes a tensor, a list of columns becomes a dict of tensors.
        additional_columns: become a third element, such as weights.
        feature_type_spec, label_type_spec, additional_type_spec: a ``tf.TypeSpec`` or a dict of these; by default they
            follow from the first row.

        ::

            model.fit(shard.to_tf("x", "y", batch_size=32))
        """
        self._is_read_ahead = True
        tensorflow = _framework("tensorflow")
        batches = self.iter_batches(
            prefetch_batches=prefetch_batches,
            batch_size=batch_size,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
            uneven=uneven,
        )
        wanted = [(feature_columns, feature_type_spec), (label_columns, label_type_spec)]
        if additional_columns is not None:
            wanted.append((additional_columns, additional_type_spec))
        return tensorflow.dataset_of(batches, wanted, self._first_row())

    def iter_rows(self, *, uneven: str = "drop") -> Iterable[Any]:
        """Return the rows of an epoch, one by one; dicts, unless the dataset has other objects.

        ::

            for row in shard.iter_rows():
                print(row["x"])
        """
        with self._naming_errors():
            is_stream = isinstance(self._dataset.open().source, Stream)
        options = self._options(1 if is_stream else _ROWS_PER_READ, False, None, None, uneven)
        return _Epochs(partial(self._run, options, to_rows, 1, _one_by_one))

    def materialize(self) -> DataIterator:
        """Read this worker's rows into memory, in the order of epoch 0. Checkpoints do not store the result's position.

        ::

            in_memory = shard.materialize()
        """
        options = self._options(ROWS_AT_ONCE, False, None, None, "drop")
        with self._naming_errors():
            opened = self._dataset.open()
            own = make_pass(opened, self._worker, options, 0, None)
            blocks = [opened.finished(block) for block, _, _ in own.blocks()]
        dataset = Dataset(partial(MemorySource, joined(blocks) if blocks else []))
        return DataIterator(dataset, name=self._name, worker=Worker(0, 1))

    # -- facts ----------------------------------------------------------------------------------------------------

    def schema(self) -> Schema:
        """Return the names and types of the columns.

        ::

            columns = shard.schema().names
        """
        with self._naming_errors():
            return self._dataset.schema()

    def count(self) -> int:
        """Return the number of rows that this worker gets in an epoch, with ``uneven="drop"``.

        Raises DataError for a stream.

        ::

            steps = shard.count() // 32
        """
        with self._naming_errors():
            return self._dataset.count() // self._worker.ranks

    def stats(self) -> str:
        """Return how many rows this worker has read, and how long train_func has waited for them.

        ::

            print(shard.stats())
        """
        return self._times.text(self._name)

    def _first_row(self) -> Block:
        with self._naming_errors():
            return to_columns(self._dataset.sample())

    def _options(
        self, batch_size: int | None, drop_last: bool, window: int | None, seed: int | None, uneven: str
    ) -> PassOptions:
        if batch_size is not None:
            check_count("batch_size", batch_size)
        if uneven not in UNEVEN:
            raise ValueError(f"uneven must be one of {', '.join(map(repr, UNEVEN))}, got {uneven!r}")
        with self._naming_errors():
            order = self._dataset.open().order
        if window is not None:
            check_count("local_shuffle_buffer_size", window)
            order = replace(order, window=window, seed=order.seed if seed is None else seed)
        return PassOptions(
            batch_size=batch_size, drop_last=drop_last, order=order, uneven=uneven, skip_streams=self._skip_streams
        )

    # -- the epoch and the position -------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0, that is being read, or that the next loop begins or continues."""
        if self._loop is None:
            return self._start["epoch"] if self._start else 0
        return self._loop.own.epoch + self._loop.is_done

    def position(self) -> dict[str, Any]:
        """Return the position after the batches that train_func has got, as JSON. A checkpoint stores it."""
        loop = self._loop
        if loop is None:
            return self._start or {"epoch": 0}
        if self._is_read_ahead and not loop.is_done:
            self._say_once(
                "read ahead",
                "TensorFlow takes batches from to_tf() before it trains on them, so a run that resumes from this "
                "checkpoint may leave some out. Checkpoints at the end of an epoch are exact, and so is a loop over "
                "iter_tf_batches()",
            )
        return {
            "epoch": self.epoch,
            **({} if loop.is_done else loop.own.position()),
            "order": loop.order.as_json(),
            "data": self._facts,
            "ranks": self._worker.ranks,
        }

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What identifies the data: few facts for people, and a hash of all."""
        source = self._dataset.open().source
        if isinstance(source, Stream):
            return {}
        facts = source.facts()
        shown: dict[str, Any] = {name: facts[name] for name in ("rows", "files") if name in facts}
        return {**shown, "hash": hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()}

    def _next_start(self, order: RowOrder) -> tuple[int, dict[str, Any] | None]:
        """Return the epoch of the next pass, and the position at which it begins; None for the first row."""
        if self._loop is None or (not self._loop.is_done and self._loop.batches <= 1):
            return self.epoch, self._checked_start(order)
        return self._loop.own.epoch + 1, None

    def _checked_start(self, order: RowOrder) -> dict[str, Any] | None:
        """Return the position of the checkpoint, if it is inside the next epoch. Refuse data that has changed."""
        start, self._refusal = self._start, None
        if start is None or start["epoch"] != self.epoch or "data" not in start:
            return None
        inside = start if start.get("divisions") or start.get("rows") else None
        kinds = {"data": self._facts, "order": order.as_json() if inside else start["order"]}
        changes = {kind: f"the {kind} was {start[kind]}, and is {now}" for kind, now in kinds.items()}
        changes = {kind: text for kind, text in changes.items() if start[kind] != kinds[kind]}
        if not changes or self._on_change == "ignore":
            return inside
        text = f"it is not the one of the checkpoint: {'; '.join(changes.values())}"
        if self._on_change == "restart":
            self._say_once("changed", f"{text}; epoch {start['epoch']} begins with its first row")
            return None
        text = (
            f"{text}. DataConfig(on_change='restart') begins epoch {start['epoch']} with its first row, "
            "on_change='ignore' goes on at the same place, and resume=False begins with epoch 0"
        )
        if "data" in changes:
            raise DataError(text)
        self._refusal = DataError(f"dataset {self._name!r}: {text}")
        return None

    def _say_once(self, key: str, text: str) -> None:
        if self._speaks and key not in self._said:
            self._said.add(key)
            say(f"dataset {self._name!r}: {text}")

    # -- one pass -------------------------------------------------------------------------------------------------

    def _run(
        self, options: PassOptions, convert: Callable[[Block], Any], prefetch: int, after: Callable[..., Any] = iter
    ) -> Iterator[Any]:
        """Yield the batches of the next pass. ``after``: gets and returns the iterator in train_func's own thread."""
        if self._loop:
            self._loop.items.stop()  # a dataset of the user's is read by one thread at a time
        with self._naming_errors():
            opened = self._dataset.open()
            epoch, start = self._next_start(options.order)
            own = make_pass(opened, self._worker, options, epoch, start)
        items = Prefetched(self._made(own, opened, convert), prefetch)
        before, loop = self._loop, _Loop(own=own, order=options.order, items=items)
        self._loop = loop
        if start and own.begun:
            self._say_once("continues", f"epoch {epoch} goes on {own.place}")
        began = last = time.monotonic()
        waited = 0.0
        try:
            for batch, rows, note in after(iter(items)):
                now = time.monotonic()
                waited += now - last
                self._note_times(rows, now - last)
                self._take(loop, rows, note)
                yield batch
                last = time.monotonic()
                self._times.passed += last - now
                if last - began > _NOTICE_AFTER_S and waited > (last - began) / 2:
                    self._say_once(
                        "waits", f"train_func waits for data {waited / (last - began):.0%} of the time\n{self.stats()}"
                    )
        except GeneratorExit:  # train_func has left the loop
            if loop.batches > 1:
                loop.is_done = True
            elif self._loop is loop:  # it was only a look
                self._loop = before
            raise
        self._check_newest(loop)
        loop.is_done = True
        if self._refusal:
            raise self._refusal
        if own.left_out:
            self._say_once(
                "left out",
                f"{own.left_out} rows of an epoch are left out, as they do not divide evenly among "
                f"{self._worker.ranks} workers; uneven='pad' repeats rows instead",
            )

    def _take(self, loop: _Loop, rows: int, note: Any) -> None:
        """Count a batch that train_func gets. Raises DataError if it may not."""
        self._check_newest(loop)
        loop.batches += 1
        if self._refusal and loop.batches > 1:
            raise self._refusal
        loop.own.took(rows, note)

    def _check_newest(self, loop: _Loop) -> None:
        if self._loop is not loop:
            raise DataError(
                f"dataset {self._name!r}: a second loop over it has begun inside of this one, so it has no position. "
                "Name it twice in datasets=, or loop over shard.materialize()"
            )

    def _note_times(self, rows: int, waited: float) -> None:
        self._times.rows += rows
        self._times.batches += 1
        self._times.waited += waited
        self._times.passed += waited

    def _made(
        self, own: TablePass | StreamPass, opened: OpenDataset, convert: Callable[[Block], Any]
    ) -> Iterator[tuple[Any, int, Any]]:
        """Yield the converted batches. It runs in the thread that reads ahead."""
        with self._naming_errors():
            last = time.monotonic()
            for block, rows, note in own.blocks():
                now = time.monotonic()
                self._times.read += now - last
                batch = convert(opened.finished(block))
                last = time.monotonic()
                self._times.made += last - now
                yield batch, rows, note
                last = time.monotonic()

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Add the dataset's name to errors."""
        try:
            yield
        except DataError as error:
            error.args = (f"dataset {self._name!r}: {error}",)
            raise


class _Epochs:
    """An epoch's batches. Each loop over it is another epoch."""

    def __init__(self, run: Callable[[], Iterator[Any]]) -> None:
        self._run = run

    def __iter__(self) -> Iterator[Any]:
        return self._run()


def _framework(name: str) -> Any:
    """Return the module that makes batches for a framework. Raises ImportError if the framework is not installed."""
    require(name)
    return import_module(_FRAMEWORKS[name])


def _count(prefetch_batches: int) -> int:
    if isinstance(prefetch_batches, bool) or not isinstance(prefetch_batches, int) or prefetch_batches < 0:
        raise ValueError(f"prefetch_batches must be an integer from 0 on, got {prefetch_batches!r}")
    return prefetch_batches


def _one_by_one(batches: Iterator[tuple[list[Any], int, Any]]) -> Iterator[tuple[Any, int, Any]]:
    for rows, _, note in batches:
        for row in rows:
            yield row, 1, note


def _of_rank(start: Mapping[int, dict[str, Any]], rank: int) -> dict[str, Any] | None:
    """Return the position to go on from. ``start``: by rank; a rank that is not in it has that of the next lower one.

    All ranks go on in the epoch of the one that has come least far. What the ranks have taken of it may differ.
    """
    if not start:
        return None
    own = start[max((other for other in start if other <= rank), default=min(start))]
    if own.get("ranks", 1) == 1:  # it is not divided
        return own
    least = min(start.values(), key=lambda position: (position["epoch"], position.get("rows", 0)))
    if not least.get("divisions"):
        return least
    *before, (count, share, _) = least["divisions"]
    taken: list[int] = []
    for number in range(count):
        position = start.get(number)
        if position is None:
            taken.append(taken[-1] if taken else 0)
        elif position["epoch"] > least["epoch"]:
            taken.append(share)
        else:
            taken.append(_taken_of(position, [*before, [count, share]]))
    return {**least, "divisions": [*before, [count, share, taken if len(set(taken)) > 1 else taken[0]]]}


def _taken_of(position: dict[str, Any], divisions: list[Any]) -> int:
    """Return the rows that a rank has taken of the last of these divisions; 0 if it does not know that division."""
    *before, (count, share, taken) = position.get("divisions") or [[0, 0, 0]]
    return taken if [*before, [count, share]] == divisions else 0
