"""The position of a prepared DataLoader: how far train_func has come in it. Runs in: worker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from distrain.data.blocks import is_instance
from distrain.data.positions import DataLoop, decode_state, encode_state
from distrain.errors import DataError
from distrain.system.log import say
from distrain.torch.sampler import ResumableSampler, is_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import DataLoader

    from distrain.worker.session import Session


def progress_of(loader: DataLoader[Any], session: Session, *, resume: bool) -> Progress:
    """Return the progress of a loader, which begins at the position of the checkpoint if it has one.

    Raises DataError if the loader is not the one of the checkpoint.
    """
    name = f"loader {len(session.loaders) + 1}"
    start = session.positions_at_start(name) if resume else {}
    order: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    is_batched = is_plain(order, "BatchSampler")
    sampler = order.sampler if is_batched else order
    progress: Progress
    if isinstance(sampler, ResumableSampler) and getattr(loader, "in_order", True):
        progress = SamplerProgress(name, sampler, order.batch_size if is_batched else 1, session)
        _note_repetition(progress, session)
    elif hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        progress = StateProgress(name, loader, session)
    else:
        if resume and session.started_from is not None and session.context.world_rank == 0:
            say(f"prepare_data_loader: {name} begins an epoch, because a loader of its kind has no position")
        progress = Progress(name, session)
        progress.repeats_rows = isinstance(sampler, ResumableSampler)
    session.loaders.append(progress)
    if isinstance(progress, (SamplerProgress, StateProgress)) and resume:
        if start:
            progress.resume(start)
        session.positions[name] = progress.position
    return progress


def counted(batches: Iterator[Any], progress: Progress, loop: DataLoop, session: Session) -> Iterator[Any]:
    """Yield the batches of a loop. Count them, and the time for which train_func waits for them."""
    ended = object()
    try:
        while True:
            began = time.monotonic()
            batch = next(batches, ended)
            session.loader_wait_s += time.monotonic() - began
            if batch is ended:
                break
            loop.take()
            yield batch
    except GeneratorExit:
        loop.leave()
        progress.end(loop)
        raise
    loop.end()
    progress.end(loop)


def _note_repetition(progress: SamplerProgress, session: Session) -> None:
    """Say once on rank 0 that a loader is prepared again and again, and so is not found again by its number."""
    used = [other for other in session.loaders if other.loop and other.order == progress.order]
    if len(used) == 1 and session.context.world_rank == 0:
        say(
            "prepare_data_loader: a loader was prepared again after its first epoch. Prepare it once, before the loop "
            "over the epochs: only then does a run resume in the middle of an epoch"
        )


class Progress:
    """The progress of a loader; in this class, of one that has no position.

    loop: the newest one over it. order: the identity of its order, empty if only the loader knows it.
    repeats_rows: ranks may get rows that others have, and it is not known which.
    """

    order: Mapping[str, Any] = {}
    has_position = False
    repeats_rows = False

    def __init__(self, name: str, session: Session) -> None:
        self._name = name
        self._session = session
        self.loop: DataLoop | None = None

    def begin(self) -> DataLoop:
        """Begin a loop, just before the loader does."""
        session = self._session
        self.loop = DataLoop(is_first=self.loop is None, is_stopping=lambda: session.stopped)
        return self.loop

    def end(self, loop: DataLoop) -> None:
        """Note that a loop has ended, or that train_func has left it."""

    def places(self, rows: int) -> list[int] | None:
        """Return the places in the order of so many rows: those of the newest batch. Rows that come again have -1.

        Rows whose places are not known have 0. Return None if the newest batch has another number of rows, or if it is
        not known which rows come again.
        """
        return None if self.repeats_rows else [0] * rows


class SamplerProgress(Progress):
    """The progress of a loader whose order is a pure function of the seed and the epoch.

    batch_size: items of the sampler in a batch: rows, or batches if the sampler gives whole batches.
    """

    has_position = True

    def __init__(self, name: str, sampler: ResumableSampler, batch_size: int, session: Session) -> None:
        super().__init__(name, session)
        self._sampler = sampler
        self._batch_size = batch_size
        self._epoch = sampler.epoch
        self._first = 0

    def resume(self, start: Mapping[int, dict[str, Any]]) -> None:
        """Begin at the position of a checkpoint, which is given by rank, with its seed.

        If ranks have come further than others, some rows come again. Raises DataError if it is of other data.
        """
        position = min(start.values(), key=lambda position: (position["epoch"], position["rows"]))
        self._sampler.seed = position["order"]["seed"]
        if position["order"] != self.order:
            raise DataError(
                f"prepare_data_loader: {self._name} is not the one of the checkpoint: it was {position['order']}, and "
                f"is {self.order}; resume=False starts from its first row"
            )
        epoch, row = position["epoch"], position["rows"]
        self._sampler.resume(epoch, row, position.get("since", epoch))
        self._epoch, self._first = self._sampler.epoch, self._sampler.first_row
        if row and self._session.context.world_rank == 0:
            say(
                f"prepare_data_loader: {self._name} continues in epoch {epoch} after {row:,} of "
                f"{self._sampler.rows:,} rows; resume=False turns this off"
            )

    @property
    def order(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The identity of the order."""
        sampler = self._sampler
        return {"length": len(sampler.dataset), "kind": sampler.kind, "seed": sampler.seed}  # type: ignore[arg-type]

    def begin(self) -> DataLoop:
        """Begin a loop at the row where the sampler begins. A loop that is still open is left by that."""
        if self.loop and self.loop.is_open:
            self.loop.leave()
            self.end(self.loop)
        self._epoch, self._first = self._sampler.epoch, self._sampler.first_row
        return super().begin()

    def end(self, loop: DataLoop) -> None:
        """Go to the next epoch."""
        if loop is self.loop and not loop.is_look:
            self._sampler.complete(self._epoch)

    def position(self) -> dict[str, Any]:
        """Return the position after the batches that train_func has got: the epoch, and the rows of all ranks."""
        epoch, rows = self._epoch, self._first
        if self.loop:
            self.loop.report()
            if self.loop.is_over:
                epoch, rows = epoch + 1, self._sampler.first_row_of(epoch + 1)
            elif not self.loop.is_look:
                rows += self.loop.batches * self._batch_size * self._sampler.num_replicas
        if later := self._sampler.resumes_after(epoch):
            return {"epoch": later[0], "rows": later[1], "since": epoch, "order": self.order}
        return {"epoch": epoch, "rows": min(rows, self._sampler.rows), "order": self.order}

    def places(self, rows: int) -> list[int] | None:
        assert self.loop
        sampler, taken = self._sampler, (self.loop.batches - 1) * self._batch_size
        items = range(taken, min(taken + self._batch_size, sampler.share_of(sampler.rows - self._first)))
        places = [self._first + item * sampler.num_replicas + sampler.rank for item in items]
        places = [place if place < sampler.rows else -1 for place in places]
        if self._batch_size == 1:  # the item may be a whole batch
            return places * rows
        return places if len(places) == rows else None


class StateProgress(Progress):
    """The progress of a loader that tells its own state, such as torchdata's StatefulDataLoader."""

    has_position = True

    def __init__(self, name: str, loader: Any, session: Session) -> None:
        super().__init__(name, session)
        self._loader = loader
        self._start: Any = None
        """The state with which the first loop begins, if it is not the first row."""

    def resume(self, start: Mapping[int, dict[str, Any]]) -> None:
        """Begin with the state of this rank, among as many as there were."""
        context = self._session.context
        before = next(iter(start.values()))["ranks"]
        is_whole = start.keys() >= {*range(before)}
        if is_whole and before != context.world_size:
            raise DataError(
                f"prepare_data_loader: {self._name} has a state for each of {before} workers, and cannot continue with "
                f"{context.world_size}; resume=False starts from its first row"
            )
        self._start = start[context.world_rank]["state"] if is_whole else None
        if context.world_rank == 0:
            how = "continues where the checkpoint was; resume=False turns this off"
            again = "starts its epoch again: report the checkpoint on every rank, so that it has the states of all"
            say(f"prepare_data_loader: {self._name} {how if is_whole else again}")

    def begin(self) -> DataLoop:
        """Begin a loop, the first one with the state of the checkpoint."""
        if self._start is not None:
            if self.loop is None or self.loop.is_look:
                self._loader.load_state_dict(decode_state(self._start))
            else:
                self._forget_start()
        return super().begin()

    def _forget_start(self) -> None:
        """Let a Hugging Face stream begin at its first row again.

        In the process that has loaded a state, it begins every pass there (huggingface/datasets#7447).
        """
        self._start = None
        if is_instance(self._loader.dataset, "datasets", "IterableDataset"):
            self._loader.load_state_dict({})  # drops the iterator, and so its persistent workers
            self._loader.dataset.load_state_dict({})

    def position(self) -> dict[str, Any]:
        """Return the state. At the end of a pass there is none, because many loaders have one that ends again at once.

        With the rank in it, it differs from those of other ranks: of equal ones a checkpoint keeps the first.
        """
        state = self._start
        if self.loop:
            self.loop.report()
            if self.loop.is_over:
                state = None
            elif not self.loop.is_look:
                state = encode_state(self._loader.state_dict())
        context = self._session.context
        return {"rank": context.world_rank, "ranks": context.world_size, "state": state}
