"""Ranks that torchrun started: who this process is, and how they meet without a coordinator. Runs in: coordinator.

Only with ``num_workers=0``. Everything goes over the framework's own process group.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.decisions.barriers import Answer, BarrierTracker
from distrain.errors import CollectiveError
from distrain.inprocess.local_channel import InProcessChannel
from distrain.system.log import warn
from distrain.work.job import Work
from distrain.worker.session import Session

if TYPE_CHECKING:
    from distrain.backend import BackendConfig
    from distrain.storage.records import CommittedCheckpoint
    from distrain.storage.run_store import RunStore

_LAUNCHER_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun_rank() -> int | None:
    """Return the rank that torchrun, or a launcher with the same variables, gave this process; None without one."""
    started = all(name in os.environ for name in _LAUNCHER_SETS) and Session.current is None
    return int(os.environ["RANK"]) if started else None


class TorchrunChannel(InProcessChannel):
    """The line of one of torchrun's ranks. Rank 0 has a ledger to ``hear`` it; reports of the others are not kept."""

    def __init__(self, backend: BackendConfig) -> None:
        super().__init__()
        self.metrics: dict[str, Any] | None = None
        """The last report of a rank without a ledger."""
        self.hear = self._pass_over
        self._backend = backend
        self._index = 0
        self._deletes: set[int] = set()
        """Checkpoints of a rank without a ledger whose local files are to be deleted."""
        self._held: list[wire.Discard] = []

    def send(self, message: wire.FromWorker) -> None:
        if not isinstance(message, wire.CollectiveEntered):
            if isinstance(message, wire.Reported) and message.ordinal is not None:
                self._let_go()
            self.hear(message)
            return
        attempt, rank = message.attempt, message.rank
        data, refused = self._meet(rank, message.operation, message.body)
        body = data if refused is None else b""
        self.answer(wire.CollectiveDone(attempt=attempt, rank=rank, index=message.index, body=body, refused=refused))

    def answer(self, message: wire.ToWorker) -> None:
        """Local files are left at first, as no rank hears whether another one brings the same directory: until this
        rank brings its next checkpoint, or all have met in the end.
        """
        if isinstance(message, wire.Discard) and message.at_once:
            self._held.append(message)
            message = replace(message, at_once=False)
        super().answer(message)

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for message in held:
            super().answer(message)

    def finish(self, attempt: int, rank: int, data: Any) -> Any:
        """Meet the others after train_func; returns rank 0's ``data``. Raises CollectiveError if one of them waits in a
        collective.
        """
        data, refused = self._meet(rank, None, data)
        if refused is not None:
            raise CollectiveError(refused)
        self._let_go()
        super().answer(wire.Release(attempt=attempt, rank=rank))
        return data

    def _meet(self, rank: int, operation: str | None, data: Any) -> tuple[Any, str | None]:
        """Rank 0's data, or why this is no meeting: the same words on every rank."""
        self._index += 1
        calls = self._backend.gather((operation, data))
        together = BarrierTracker(len(calls))
        answers: list[Answer] = []
        for other, (name, _) in enumerate(calls):
            answers += [] if name is None else together.joined(other, self._index, name, b"", 0.0)
        for other, (name, _) in enumerate(calls):
            answers += together.finished(other) if name is None else []
        refused = next((answer.refused for answer in answers if answer.refused is not None), None)
        return calls[0][1], refused

    def _pass_over(self, message: wire.FromWorker) -> None:
        match message:
            case wire.AskCheckpointList(attempt=attempt, rank=rank, index=index):
                self.answer(wire.CheckpointList(attempt=attempt, rank=rank, index=index, body=b"[]"))
            case wire.FilesCopied(attempt=attempt, rank=rank, ordinal=ordinal) if ordinal in self._deletes:
                self._deletes.remove(ordinal)
                self.answer(wire.Discard(attempt=attempt, rank=rank, ordinal=ordinal, at_once=True))
            case wire.Reported(attempt=attempt, rank=rank, ordinal=ordinal, body=body):
                self.metrics = json.loads(body)
                if ordinal is not None:
                    self._deletes |= {ordinal} if message.delete else set()
                    if ordinal == 1 and rank == 1:
                        warn(
                            "under torchrun, only rank 0's files of a checkpoint are kept, and not those of other ranks"
                        )
                    self.answer(wire.CopyFiles(attempt=attempt, rank=rank, ordinal=ordinal, directory="", files=[]))


@dataclass(frozen=True, kw_only=True)
class TorchrunWork(Work):
    """The work of one of torchrun's ranks. Rank 0 (``store``) tells the others where the run is kept, and at the end
    which checkpoints it has, which they put into ``kept``. All return what rank 0 does.
    """

    work: Work
    session: Session
    desk: TorchrunChannel
    store: RunStore | None = None
    kept: list[CommittedCheckpoint] = field(default_factory=list)

    def run(self) -> Any:
        session = self.session
        context = session.context
        here = (context.run_name, context.storage_path, context.filesystem, session.checkpoint)
        name, storage_path, filesystem, session.checkpoint = self.backend.gather(here)[0]
        session.context = replace(context, run_name=name, storage_path=storage_path, filesystem=filesystem)
        value = self.work.run()
        end = (self.store.committed, value) if self.store else None
        self.kept[:], value = self.desk.finish(session.context.attempt, session.context.world_rank, end)
        session.wait_for_release()  # and delete what has been left until now
        return value
