"""The position of a prepared DataLoader: how far train_func has come in it. Runs in: worker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from distrain.data.blocks import is_instance
from distrain.data.positions import DataLoop, decode_state, encode_state
from distrain.errors import DataError
from distrain.system.log import say
from distrain.torch.sampler import ResumableSampler, is_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import DataLoader

    from distrain.worker.session import Session

__all__ = ["Progress", "SamplerProgress", "counted", "progress_of", "timed"]


class Progress(Protocol):
    """The progress of a loader. ``loop``: the newest one over it. ``order``: the identity of its order."""

    loop: DataLoop | None

    @property
    def order(self) -> dict[str, Any]: ...

    def begin(self) -> DataLoop:
        """Begin a loop, just before the loader does."""

    def end(self, loop: DataLoop) -> None:
        """Note that a loop has ended, or that train_func has left it."""

    def position(self) -> dict[str, Any]:
        """Return the position after the batches that train_func has got, as JSON."""


def progress_of(loader: DataLoader[Any], session: Session, *, resume: bool) -> Progress | None:
    """Return the progress of a loader, which begins at the position of the checkpoint; None if it has no position.

    Raises DataError if the loader is not the one of the checkpoint.
    """
    name = f"loader {len(session.loaders) + 1}"
    start = session.positions_at_start(name) if resume else {}
    order: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    is_batched = is_plain(order, "BatchSampler")
    sampler = order.sampler if is_batched else order
    progress: SamplerProgress | StateProgress
    if isinstance(sampler, ResumableSampler) and getattr(loader, "in_order", True):
        size = order.batch_size if is_batched else 1
        progress = SamplerProgress(name, sampler, size, session)
        _note_repetition(progress, session)
    elif callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        progress = StateProgress(name, loader, session)
    else:
        if resume and session.started_from is not None and session.context.world_rank == 0:
            say(f"prepare_data_loader: {name} begins an epoch, because a loader of its kind has no position")
        session.loaders.append(None)
        return None
    if start:
        progress.resume(start)
    if resume:
        session.positions[name] = progress.position
    session.loaders.append(progress)
    return progress


def counted(batches: Iterator[Any], progress: Progress, loop: DataLoop) -> Iterator[Any]:
    """Yield the batches of a loop, and count them."""
    try:
        for batch in batches:
            loop.batches += 1
            yield batch
    except GeneratorExit:
        loop.leave()
        progress.end(loop)
        raise
    loop.end()
    progress.end(loop)


def timed(batches: Iterator[Any], session: Session) -> Iterator[Any]:
    """Yield the batches, and add the time for which train_func waits for them to the session's."""
    while True:
        began = time.monotonic()
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            session.loader_wait_s += time.monotonic() - began
        yield batch


def _note_repetition(progress: SamplerProgress, session: Session) -> None:
    """Say once on rank 0 that a loader is prepared again and again, and so is not found again by its number."""
    used = [other for other in session.loaders if other and other.loop and other.order == progress.order]
    if len(used) == 1 and session.context.world_rank == 0:
        say(
            "prepare_data_loader: a loader was prepared again after its first epoch. Prepare it once, before the loop "
            "over the epochs: only then does a run resume in the middle of an epoch"
        )


def _loop_after(before: DataLoop | None, session: Session) -> DataLoop:
    return DataLoop(is_first=before is None, is_stopping=lambda: session.stopped)


class SamplerProgress:
    """The progress of a loader whose order is a pure function of the seed and the epoch.

    batch_size: items of the sampler in a batch: rows, or batches if the sampler gives whole batches.
    """

    def __init__(self, name: str, sampler: ResumableSampler, batch_size: int, session: Session) -> None:
        self._name = name
        self._session = session
        self._sampler = sampler
        self._batch_size = batch_size
        self._epoch = sampler.epoch
        self._first = 0
        self.loop: DataLoop | None = None

    def resume(self, start: Mapping[int, dict[str, Any]]) -> None:
        """Begin at the position of a checkpoint. If ranks have come further than others, some rows come again."""
        position = min(start.values(), key=lambda position: (position["epoch"], position["rows"]))
        if position["order"] != self.order:
            raise DataError(
                f"prepare_data_loader: {self._name} is not the one of the checkpoint: it was {position['order']}, and "
                f"is {self.order}; resume=False begins with its first row"
            )
        self._epoch, self._first = position["epoch"], position["rows"]
        self._sampler.resume(self._epoch, self._first)
        if self._first and self._session.context.world_rank == 0:
            say(
                f"prepare_data_loader: {self._name} goes on in epoch {self._epoch} after {self._first:,} of "
                f"{self._sampler.rows:,} rows; resume=False turns this off"
            )

    @property
    def order(self) -> dict[str, Any]:
        """The identity of the order."""
        sampler = self._sampler
        return {"length": len(sampler.dataset), "kind": sampler.kind, "seed": sampler.seed}  # type: ignore[arg-type]

    def begin(self) -> DataLoop:
        """Begin a loop at the row where the sampler begins. A loop that is still open is left by that."""
        if self.loop and self.loop.is_open:
            self.loop.leave()
            self.end(self.loop)
        self.loop = _loop_after(self.loop, self._session)
        self._epoch, self._first = self._sampler.epoch, self._sampler.first_row
        return self.loop

    def end(self, loop: DataLoop) -> None:
        """Go to the next epoch."""
        if loop is self.loop and not loop.is_look:
            self._sampler.complete(self._epoch)

    def position(self) -> dict[str, Any]:
        """Return the position: the epoch, and the rows that all ranks have taken."""
        epoch, rows = self._epoch, self._first
        if self.loop:
            self.loop.report()
            if self.loop.is_over:
                epoch, rows = epoch + 1, 0
            elif not self.loop.is_look:
                rows += self.loop.batches * self._batch_size * self._sampler.num_replicas
        return {"epoch": epoch, "rows": min(rows, self._sampler.rows), "order": self.order}


class StateProgress:
    """The progress of a loader that tells its own state, such as torchdata's StatefulDataLoader."""

    def __init__(self, name: str, loader: Any, session: Session) -> None:
        self._name = name
        self._loader = loader
        self._session = session
        self._rank, self._ranks = session.context.world_rank, session.context.world_size
        self._start: Any = None
        """The state with which the first loop begins, if it is not the first row."""
        self.loop: DataLoop | None = None

    def resume(self, start: Mapping[int, dict[str, Any]]) -> None:
        """Give the loader the state of this rank. Raises DataError for a state among another number of ranks."""
        position = start.get(self._rank)
        if position is None or len(start) < position["ranks"]:
            if self._rank == 0:
                say(
                    f"prepare_data_loader: {self._name} begins its epoch again, because the checkpoint has the states "
                    f"of {len(start)} of its ranks only; report the checkpoint on every rank"
                )
            return
        if position["ranks"] != self._ranks:
            raise DataError(
                f"prepare_data_loader: {self._name} has a state for each of {position['ranks']} workers, and cannot go "
                f"on with {self._ranks}; resume=False begins with its first row"
            )
        self._start = position["state"]
        if self._rank == 0 and self._start is not None:
            say(f"prepare_data_loader: {self._name} goes on where the checkpoint was; resume=False turns this off")

    @property
    def order(self) -> dict[str, Any]:
        """Nothing: it is known to the loader alone."""
        return {}

    def begin(self) -> DataLoop:
        """Begin a loop, the first one with the state of the checkpoint."""
        if self._start is not None:
            if self.loop is None or self.loop.is_look:
                self._loader.load_state_dict(decode_state(self._start))
            else:
                self._forget_start()
        self.loop = _loop_after(self.loop, self._session)
        return self.loop

    def _forget_start(self) -> None:
        """Let a Hugging Face stream begin at its first row again.

        In the process that has loaded a state, it begins every pass there (huggingface/datasets#7447).
        """
        self._start = None
        if is_instance(self._loader.dataset, "datasets", "IterableDataset"):
            self._loader.load_state_dict({})  # drops the iterator, and so its persistent workers
            self._loader.dataset.load_state_dict({})

    def end(self, loop: DataLoop) -> None:
        """Do nothing: the loader knows it."""

    def position(self) -> dict[str, Any]:
        """Return the state. At the end of a pass there is none, as many loaders have one that ends again at once."""
        state = self._start
        if self.loop:
            self.loop.report()
            if self.loop.is_over:
                state = None
            elif not self.loop.is_look:
                state = encode_state(self._loader.state_dict())
        return {"rank": self._rank, "ranks": self._ranks, "state": state}
