"""The result of get_dataset_shard(): one worker's part of a dataset, and its position in it. Runs in: worker."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from distrain.data.blocks import Block, formatter, joined, to_arrays, to_frame, to_rows
from distrain.data.dataset import Dataset, OpenDataset
from distrain.data.loops import Loops
from distrain.data.passes import PassOptions, Worker
from distrain.data.sources import ROWS_AT_ONCE, MemorySource, Schema, Stream
from distrain.system.arguments import check_int
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Unpack

    from distrain.data.positions import DataLoop

_ROWS_PER_READ = 256
_TORCH, _TENSORFLOW = "distrain.torch.batches", "distrain.tensorflow.data"
"""The modules that make batches for a framework. They are above this package: imported when needed."""


class Reading(TypedDict, total=False):
    """The arguments that all methods for batches have."""

    prefetch_batches: int
    batch_size: int | None
    drop_last: bool
    local_shuffle_buffer_size: int | None
    local_shuffle_seed: int | None


class DataIterator:
    """One worker's part of a dataset; :func:`distrain.get_dataset_shard` returns it.

    Each loop over ``iter_batches()`` and the like is one epoch. Every checkpoint that is reported stores how far the
    loop has come, and a resumed run continues with the next row, with any number of workers. A loop that is left
    with ``break`` counts as an epoch, too. If the first loop is left after its first batch, without a report, it does
    not count, so that a script may look at a batch first.

    All workers get equally many batches. Rows that do not divide evenly are left out, fewer than there are workers.

    ::

        for epoch in range(shard.epoch, 10):
            for batch in shard.iter_torch_batches(batch_size=32):
                ...
    """

    def __init__(self, dataset: Dataset, **of_loops: Any) -> None:
        """``of_loops``: see :class:`~distrain.data.loops.Loops`."""
        self._dataset = dataset
        self._loops = Loops(dataset=dataset, **of_loops)

    # -- batches --------------------------------------------------------------------------------------------------

    def iter_batches(self, *, batch_format: str | None = "default", **reading: Unpack[Reading]) -> Epochs:
        """Return the batches of an epoch. Each loop over the result is the next epoch.

        batch_format: ``"numpy"`` (the default: a dict of arrays), ``"pandas"`` or ``"pyarrow"``.
        batch_size: rows of a batch of this worker, 256 by default; None: one batch for all of them.
        drop_last: leave out the last batch if it has fewer rows.
        prefetch_batches: batches that a thread makes while train_func computes, 1 by default; 0: none.
        local_shuffle_buffer_size: shuffle so many consecutive rows in memory; ``local_shuffle_seed`` is 0 by default.

        Raises DataError for data that cannot be read, or that has changed since the checkpoint.

        ::

            for batch in shard.iter_batches(batch_size=32):
                print(batch["x"].shape)
        """
        return self._epochs(formatter(batch_format), **reading)

    def iter_torch_batches(
        self,
        *,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        **reading: Unpack[Reading],
    ) -> Epochs:
        """Return the batches of an epoch as dicts of tensors. For the other arguments, see :meth:`iter_batches`.

        dtypes: the type of all tensors, or a dict of types by column.
        device: ``"auto"``: the worker's device. On a GPU, a batch is copied while the one before is processed.
        collate_fn: gets a dict of numpy arrays, or a list of rows that aren't dicts, and returns the batch. Its tensors
            are moved to the device. Default: rows that aren't dicts are joined as a DataLoader joins them.
        pin_memory: copy the batches into pinned memory first, which speeds up the copy to a GPU.

        ::

            for batch in shard.iter_torch_batches(batch_size=32, dtypes=torch.float32):
                loss = batch["x"].mean()
        """
        torch = require(_TORCH)
        return self._epochs(torch.converter(dtypes, collate_fn, pin_memory=pin_memory), torch.mover(device), **reading)

    def iter_tf_batches(self, *, dtypes: Any = None, **reading: Unpack[Reading]) -> Epochs:
        """Return the batches of an epoch as dicts of TensorFlow's tensors. See :meth:`iter_batches`.

        dtypes: the type of all tensors, or a dict of types by column.

        ::

            for batch in shard.iter_tf_batches(batch_size=32, dtypes=tf.float32):
                model.train_on_batch(batch["x"], batch["y"])
        """
        return self._epochs(require(_TENSORFLOW).converter(dtypes), **reading)

    def to_tf(
        self,
        feature_columns: str | Sequence[str],
        label_columns: str | Sequence[str],
        *,
        additional_columns: str | Sequence[str] | None = None,
        feature_type_spec: Any = None,
        label_type_spec: Any = None,
        additional_type_spec: Any = None,
        **reading: Unpack[Reading],
    ) -> Any:
        """Return a ``tf.data.Dataset`` of (features, labels), without automatic sharding. Each pass is an epoch.

        feature_columns, label_columns: a column becomes a tensor, a list of columns becomes a dict of tensors.
        additional_columns: become a third element, such as weights.
        feature_type_spec, label_type_spec, additional_type_spec: a ``tf.TypeSpec`` or a dict of these; by default they
            follow from the first row.
        batch_size: 1 by default. For the other arguments, see :meth:`iter_batches`.

        ::

            model.fit(shard.to_tf("x", "y", batch_size=32))
        """
        self._loops.is_read_ahead = True
        tensorflow = require(_TENSORFLOW)
        reading.setdefault("batch_size", 1)
        batches = self._epochs(to_arrays, **reading)
        wanted = [(feature_columns, feature_type_spec), (label_columns, label_type_spec)]
        if additional_columns is not None:
            wanted.append((additional_columns, additional_type_spec))
        return tensorflow.dataset_of(batches, wanted, to_arrays(self._open().first(1)))

    def iter_rows(self) -> Epochs:
        """Return the rows of an epoch, one by one; dicts, unless the dataset has other objects.

        ::

            for row in shard.iter_rows():
                print(row["x"])
        """
        is_stream = isinstance(self._open().source, Stream)
        return self._epochs(to_rows, _one_by_one, batch_size=1 if is_stream else _ROWS_PER_READ)

    def materialize(self) -> DataIterator:
        """Read this worker's rows into memory, in the order of epoch 0. Checkpoints do not store the result's position.

        ::

            in_memory = shard.materialize()
        """
        name, rank = self._loops.name, self._loops.rank
        anew = DataIterator(self._dataset, name=name, worker=self._loops.worker, rank=rank)
        blocks = [*anew._epochs(lambda block: block, prefetch_batches=0, batch_size=ROWS_AT_ONCE)]
        return DataIterator(Dataset(partial(MemorySource, joined(blocks))), name=name, worker=Worker(0, 1))

    def to_pandas(self) -> Any:
        """Return this worker's rows as a pandas DataFrame. See :meth:`materialize`.

        ::

            frame = shard.to_pandas()
        """
        return to_frame(self.materialize()._dataset.read())

    def __getattr__(self, name: str) -> Any:
        advice = "" if name.startswith("_") else "; use iter_batches(), iter_torch_batches(), to_tf() or to_pandas()"
        raise AttributeError(f"'DataIterator' object has no attribute {name!r}{advice}")

    # -- facts ----------------------------------------------------------------------------------------------------

    def schema(self) -> Schema:
        """Return the names and types of the columns.

        ::

            columns = shard.schema().names
        """
        with self._loops.naming_errors():
            return self._dataset.schema()

    def count(self) -> int:
        """Return the number of rows that this worker gets in an epoch.

        Raises DataError for a stream.

        ::

            steps = shard.count() // 32
        """
        with self._loops.naming_errors():
            return self._dataset.count() // self._loops.worker.ranks

    def stats(self) -> str:
        """Return how many rows this worker has read, and how long train_func has waited for them.

        ::

            print(shard.stats())
        """
        return self._loops.times.text(self._loops.name)

    @property
    def waited_s(self) -> float:
        """The seconds for which train_func has waited for rows so far."""
        return self._loops.times.waited

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0, that is being read, or that the next loop begins or continues.

        A train_func that takes its epoch from here is in that epoch until the next loop over this dataset begins. So a
        checkpoint that it reports in a loop over validation data belongs to the same epoch: in the resumed run, the
        loop over this dataset has no batches, and the validation continues.
        """
        self._loops.counts_epochs = True
        return self._loops.epoch

    @property
    def loop(self) -> DataLoop | None:
        """The newest loop over it."""
        return self._loops.loop

    def position(self) -> dict[str, Any]:
        """Return the position after the batches that train_func has got, as JSON. A checkpoint stores it."""
        return self._loops.position()

    def _open(self) -> OpenDataset:
        with self._loops.naming_errors():
            return self._dataset.opened

    def _epochs(
        self,
        convert: Callable[[Block], Any],
        after: Callable[..., Any] = iter,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
    ) -> Epochs:
        """Return what loops over the batches. See :meth:`~distrain.data.loops.Loops.run`."""
        check_int("prefetch_batches", prefetch_batches, minimum=0)
        check_int("batch_size", batch_size, minimum=1, optional=True)
        check_int("local_shuffle_buffer_size", local_shuffle_buffer_size, minimum=1, optional=True)
        order = self._open().order
        if local_shuffle_buffer_size is not None:
            seed = order.seed if local_shuffle_seed is None else local_shuffle_seed
            order = replace(order, window=local_shuffle_buffer_size, seed=seed)
        options = PassOptions(batch_size=batch_size, drop_last=drop_last, order=order)
        return Epochs(partial(self._loops.run, options, convert, prefetch_batches, after))


class Epochs:
    """An epoch's batches. Each loop over it is another epoch."""

    def __init__(self, run: Callable[[], Iterator[Any]]) -> None:
        self._run = run

    def __iter__(self) -> Iterator[Any]:
        return self._run()


def _one_by_one(batches: Iterator[tuple[list[Any], int]]) -> Iterator[tuple[Any, int]]:
    return ((row, 1) for rows, _ in batches for row in rows)
