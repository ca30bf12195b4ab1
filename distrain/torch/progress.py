"""The position of a prepared DataLoader: how far train_func has come in it. Runs in: worker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from distrain.data.positions import DataLoop
from distrain.errors import DataError
from distrain.system.log import say
from distrain.torch.sampler import ResumableSampler, is_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import DataLoader

    from distrain.worker.session import Session

__all__ = ["Progress", "counted", "progress_of", "timed"]


def progress_of(loader: DataLoader[Any], session: Session, *, resume: bool) -> Progress | None:
    """Return the progress of a loader, which begins at the position of the checkpoint; None if it has no position.

    Raises DataError if the loader is not the one of the checkpoint.
    """
    name = f"loader {len(session.loaders) + 1}"
    start = session.positions_at_start(name) if resume else {}
    order: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    is_batched = is_plain(order, "BatchSampler")
    sampler = order.sampler if is_batched else order
    if not isinstance(sampler, ResumableSampler) or not getattr(loader, "in_order", True):
        if resume and session.started_from is not None and session.context.world_rank == 0:
            say(f"prepare_data_loader: {name} begins an epoch, because a loader of its kind has no position")
        session.loaders.append(None)
        return None
    progress = Progress(name, sampler, order.batch_size if is_batched else 1, session)
    _note_repetition(progress, session)
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


def _note_repetition(progress: Progress, session: Session) -> None:
    """Say once on rank 0 that a loader is prepared again and again, and so is not found again by its number."""
    used = [other for other in session.loaders if other and other.loop and other.order == progress.order]
    if len(used) == 1 and session.context.world_rank == 0:
        say(
            "prepare_data_loader: a loader was prepared again after its first epoch. Prepare it once, before the loop "
            "over the epochs: only then does a run resume in the middle of an epoch"
        )


def _loop_after(before: DataLoop | None, session: Session) -> DataLoop:
    return DataLoop(is_first=before is None, is_stopping=lambda: session.stopped)


class Progress:
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
