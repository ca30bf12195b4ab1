"""Orders for the processes of a drill, and for their ranks. Runs in: coordinator, worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from distrain.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.coordinator.run.trainer import DataParallelTrainer

Unit = Literal["report", "step"]
"""The unit of progress: calls of report(), or training steps of a script that does not report."""
Act = Literal["", "kill", "kill before report", "kill host", "pause", "linger", "ranks"]


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """The order for each rank.

    act: what ``rank`` does after the ``at``-th unit of the first attempt: it kills its process or its host, kills its
        process before it reports its next checkpoint, waits until the drill kills everything, or lingers for a moment.
        With ``ranks``, all ranks note what the comparison of ranks needs.
    rows: with ``ranks``, the batch size for loaders of which several ranks would make a batch of this size.
    """

    unit: Unit = "report"
    at: int = 0
    rank: int = 0
    act: Act = ""
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """The order for a process.

    arguments: those of ``distrain run``. trainer, command: run instead, if given.
    again: words of a shell that follow the command when it continues. start: the number of its starts before this one.
    storage: the storage path of the run, whose name is ``run``.
    workers: the number of workers, or None for the script's own.
    folder: the directory of the trial. roots: the user's directories that are isolated, the working directory first.
    copies: why the trial works in a copy; empty if it has a namespace. fresh: relative paths that are hidden from it.
    began: when the drill began.
    """

    arguments: tuple[str, ...] = ()
    trainer: DataParallelTrainer | None = None
    command: tuple[str, ...] = ()
    again: str = ""
    start: int = 0
    storage: str = ""
    workers: int | None = None
    folder: str = ""
    roots: tuple[str, ...] = ()
    copies: str = ""
    fresh: tuple[str, ...] = ()
    began: float = 0.0
    probe: ProbeOrder = ProbeOrder()

    @classmethod
    def of_command(cls, words: Sequence[str], workers: int | None, again: str) -> Order:
        """Return the order for a command. Raises JobError unless ``{workers}`` and their number come together."""
        order = cls(command=tuple(words), workers=workers, again=again)
        if (workers is not None) != order.takes_workers:
            raise JobError(
                "to choose the number of workers, pass --workers N and write {workers} into the command, as in "
                "--nproc-per-node {workers}"
            )
        return order

    @property
    def takes_workers(self) -> bool:
        """True if the number of workers can be chosen: a command needs a place for it."""
        return not self.command or any("{workers}" in word for word in self.command)
