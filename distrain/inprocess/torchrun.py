"""Ranks that torchrun started: which one this process is, and how the ranks meet. Runs in: coordinator.

Used with ``num_workers=0``. There is no coordinator: the ranks talk over the framework's own process group.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.decisions.barriers import BarrierTracker, EndCall
from distrain.errors import CollectiveError
from distrain.inprocess.local_channel import InProcessChannel
from distrain.system.log import warn
from distrain.work.job import Work
from distrain.worker.session import Session

if TYPE_CHECKING:
    from distrain.backend import BackendConfig
    from distrain.decisions import barriers
    from distrain.storage.records import CommittedCheckpoint
    from distrain.storage.run_store import RunStore

_LAUNCHER_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun_rank() -> int | None:
    """Return the rank that torchrun, or a launcher with the same variables, gave this process; None without one."""
    started = all(name in os.environ for name in _LAUNCHER_SETS) and Session.current is None
    return int(os.environ["RANK"]) if started else None


class TorchrunChannel(InProcessChannel):
    """The connection of one of torchrun's ranks. Rank 0 has a report handler; the files of other ranks are not kept.

    No rank learns whether another one brings the same directory. Therefore the session deletes local files only when
    the rank brings its next checkpoint, or when all ranks have met after train_func.
    """

    commits_for_all_ranks = False

    def __init__(self, backend: BackendConfig) -> None:
        super().__init__()
        self.metrics: dict[str, Any] | None = None
        """The last report of a rank without a report handler."""
        self.handle = self._handle_alone
        self._backend = backend
        self._index = 0

    def send(self, message: wire.FromWorker) -> None:
        """Handle a message of the worker; in a collective, meet the other ranks first."""
        if not isinstance(message, wire.CollectiveEntered):
            self.handle(message)
            return
        attempt, rank = message.attempt, message.rank
        data, refused = self._meet(rank, message.operation, message.body)
        body = data if refused is None else b""
        self.answer(wire.CollectiveDone(attempt=attempt, rank=rank, index=message.index, body=body, refused=refused))

    def finish(self, attempt: int, rank: int, data: Any) -> Any:
        """Meet the other ranks after train_func and return rank 0's ``data``.

        Raises CollectiveError if one of them waits in a collective.
        """
        data, refused = self._meet(rank, None, data)
        if refused is not None:
            raise CollectiveError(refused)
        self.answer(wire.Release(attempt=attempt, rank=rank))
        return data

    def _meet(self, rank: int, operation: str | None, data: Any) -> tuple[Any, str | None]:
        """Return rank 0's data, and the reason if the ranks call different operations: the same text on every rank."""
        self._index += 1
        calls = self._backend.gather((operation, data))
        tracker = BarrierTracker(len(calls))
        actions: list[barriers.Action] = []
        for other, (name, _) in enumerate(calls):
            actions += [] if name is None else tracker.entered(other, self._index, name, b"", 0.0)
        for other, (name, _) in enumerate(calls):
            actions += tracker.finished(other) if name is None else []
        reasons = (action.refused for action in actions if isinstance(action, EndCall))
        return calls[0][1], next((reason for reason in reasons if reason is not None), None)

    def _handle_alone(self, message: wire.FromWorker) -> None:
        """Answer a rank without a report handler."""
        match message:
            case wire.AskCheckpointList(attempt=attempt, rank=rank, index=index):
                self.answer(wire.CheckpointList(attempt=attempt, rank=rank, index=index, body=b"[]"))
            case wire.Reported(attempt=attempt, rank=rank, ordinal=ordinal, body=body):
                self.metrics = json.loads(body)
                if ordinal is not None:
                    if ordinal == 1 and rank == 1:
                        warn(
                            "under torchrun, only rank 0's files of a checkpoint are kept, and not those of other ranks"
                        )
                    self.answer(wire.CopyFiles(attempt=attempt, rank=rank, ordinal=ordinal, directory="", files=[]))


@dataclass(frozen=True, kw_only=True)
class TorchrunWork(Work):
    """The work of one of torchrun's ranks. All ranks return what rank 0 returns.

    store: on rank 0 only. kept: is filled with the checkpoints of the run, on every rank.
    """

    work: Work
    session: Session
    channel: TorchrunChannel
    store: RunStore | None = None
    kept: list[CommittedCheckpoint] = field(default_factory=list)

    def run(self) -> Any:
        """Run the work where rank 0 keeps the run, and share its result with the other ranks."""
        session = self.session
        context = session.context
        here = (context.run_name, context.storage_path, context.filesystem, session.checkpoint)
        name, storage_path, filesystem, session.checkpoint = self.backend.gather(here)[0]
        session.started_from = session.checkpoint
        session.context = replace(context, run_name=name, storage_path=storage_path, filesystem=filesystem)
        value = self.work.run()
        end = (self.store.committed, value) if self.store else None
        self.kept[:], value = self.channel.finish(session.context.attempt, session.context.world_rank, end)
        session.wait_for_release()
        return value
