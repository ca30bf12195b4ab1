"""The position of a prepared DataLoader: how far train_func has come in it. Runs in: worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import BatchSampler

from distrain.errors import DataError
from distrain.system.log import say
from distrain.system.states import decode_state, encode_state
from distrain.torch.sampler import ResumableSampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import DataLoader

    from distrain.worker.session import Session

__all__ = ["Progress", "progress_of"]


_BEGIN = {"epoch": 0, "rows": 0}


class Progress(Protocol):
    """The progress of a loader."""

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass, and count them."""

    def position(self) -> dict[str, Any]:
        """Return the position after the batches that train_func has got, as JSON."""


def progress_of(loader: DataLoader[Any], session: Session, *, resume: bool) -> Progress | None:
    """Return the progress of a loader, which begins at the position of the checkpoint; None if it has no position.

    Raises DataError if the loader is not the one of the checkpoint.
    """
    session.loaders += 1
    name = f"loader {session.loaders}"
    start = session.positions_at_start(name) if resume else {}
    order = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = order.sampler if type(order) is BatchSampler else order
    progress: SamplerProgress | StateProgress
    if isinstance(sampler, ResumableSampler) and getattr(loader, "in_order", True):
        size = order.batch_size if type(order) is BatchSampler else 1
        progress = SamplerProgress(name, sampler, size, session)
        _note_repetition(progress.position()["order"], session)
    elif callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        progress = StateProgress(name, loader, session)
    else:
        if resume and session.started_from is not None and session.context.world_rank == 0:
            say(f"prepare_data_loader: {name} begins an epoch, because a loader of its kind has no position")
        return None
    if start:
        progress.resume(start)
    if resume:
        session.positions[name] = progress.position
    return progress


def _note_repetition(order: dict[str, Any], session: Session) -> None:
    """Say once on rank 0 that a loader is prepared again and again, and so is not found again by its number."""
    earlier = [position() for position in session.positions.values()]
    used = [position for position in earlier if position.get("order") == order and position != {**position, **_BEGIN}]
    if len(used) == 1 and session.context.world_rank == 0:
        say(
            "prepare_data_loader: a loader was prepared again after its first epoch. Prepare it once, before the loop "
            "over the epochs: only then does a run resume in the middle of an epoch"
        )


def _was_epoch(batches: int, session: Session) -> bool:
    """Return whether a loop that train_func has left was an epoch: no look at one batch, and no stop of the run."""
    return batches > 1 and not session.stopped


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
        self._batches = 0

    def resume(self, start: Mapping[int, dict[str, Any]]) -> None:
        """Begin at the position of a checkpoint. If ranks have come further than others, some rows come again."""
        position = min(start.values(), key=lambda position: (position["epoch"], position["rows"]))
        if position["order"] != self._order:
            raise DataError(
                f"prepare_data_loader: {self._name} is not the one of the checkpoint: it was {position['order']}, and "
                f"is {self._order}; resume=False begins with its first row"
            )
        self._epoch, self._first = position["epoch"], position["rows"]
        self._sampler.resume(self._epoch, self._first)
        if self._first and self._session.context.world_rank == 0:
            say(
                f"prepare_data_loader: {self._name} goes on in epoch {self._epoch} after {self._first:,} of "
                f"{self._sampler.rows:,} rows; resume=False turns this off"
            )

    @property
    def _order(self) -> dict[str, Any]:
        """What identifies the order."""
        sampler = self._sampler
        return {"length": len(sampler.dataset), "kind": sampler.kind, "seed": sampler.seed}  # type: ignore[arg-type]

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass, and count them. At the end, go to the next epoch."""
        self._epoch, self._first, self._batches = self._sampler.epoch, self._sampler.first_row, 0
        try:
            for batch in batches:
                self._batches += 1
                yield batch
        except GeneratorExit:
            if _was_epoch(self._batches, self._session):
                self._complete()
            elif not self._session.stopped:
                self._batches = 0
            raise
        self._complete()

    def _complete(self) -> None:
        self._sampler.complete(self._epoch)
        self._epoch, self._first, self._batches = self._epoch + 1, 0, 0

    def position(self) -> dict[str, Any]:
        """Return the position: the epoch, and the rows that all ranks have taken."""
        taken = self._batches * self._batch_size * self._sampler.num_replicas
        rows = min(self._first + taken, self._sampler.rows)
        return {"epoch": self._epoch, "rows": rows, "order": self._order}


class StateProgress:
    """The progress of a loader that tells its own state, such as torchdata's StatefulDataLoader."""

    def __init__(self, name: str, loader: Any, session: Session) -> None:
        self._name = name
        self._loader = loader
        self._session = session
        self._rank, self._ranks = session.context.world_rank, session.context.world_size
        self._start: Any = None
        """The state with which the next pass begins, if it is not the first row."""
        self._ended = True
        """True before the first batch and after the last one: the next pass is a whole epoch."""

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
        if position["state"] is not None:
            self._load(position["state"])
            if self._rank == 0:
                say(f"prepare_data_loader: {self._name} goes on where the checkpoint was; resume=False turns this off")

    def _load(self, state: Any) -> None:
        self._start, self._ended = state, False
        self._loader.load_state_dict(decode_state(state))

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass."""
        start, self._start = self._start, None
        self._ended = False
        taken = 0
        try:
            for batch in batches:
                taken += 1
                yield batch
        except GeneratorExit:
            if not self._session.stopped:
                self._ended = _was_epoch(taken, self._session) or start is None
                if not self._ended:
                    self._load(start)
            raise
        self._ended = True

    def position(self) -> dict[str, Any]:
        """Return the state. At the end of a pass there is none, as many loaders have one that ends again at once."""
        state = None if self._ended else encode_state(self._loader.state_dict())
        return {"rank": self._rank, "ranks": self._ranks, "state": state}
