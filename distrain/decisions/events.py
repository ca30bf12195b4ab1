"""The events that the run machine handles, and the actions that it returns. Runs in: coordinator.

Events and actions are plain data. The coordinator turns messages and failures into events, and carries the actions out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.hosts.world import WorkerFacts
from distrain.system.text import on_host

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain import wire
    from distrain.api.backend import BackendConfig
    from distrain.api.config import FailureConfig, ScalingConfig
    from distrain.api.job import Job
    from distrain.errors import RankFailure
    from distrain.hosts.host import HostSettings
    from distrain.hosts.world import RankPlan, WorldPlan
    from distrain.storage.checkpoint import Checkpoint

# -- the request -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Validator:
    """The user's validation function and the settings of the process that calls it.

    order: has everything but the checkpoint.
    timeout_s: default time limit of one validation.
    environment: that of the user's process.
    """

    order: wire.RunValidation
    timeout_s: float | None
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Everything that the user has asked for.

    run_name, storage_path: the run directory, and the directory or URL that holds it; empty until it is open.
    hosts: settings by host name, in the order in which ranks are placed.
    stop_grace_s: seconds that ranks get to stop by themselves when the user asks the run to stop.
    peer_failure_grace_s: seconds that the other ranks get after SIGTERM when one has failed.
    is_script: the ranks run a script or a module, not a function.
    stop_signals: names of the signals that stop the run; see :class:`~distrain.RunConfig`.
    argv: ``sys.argv`` of the workers.
    python_flags: interpreter flags of the workers, such as ``-O``.
    first_attempt: number of the first attempt; it is above 0 if the run was continued.
    checkpoint: path or URL of the checkpoint that the first attempt starts from.
    filesystem, metadata: see :class:`~distrain.hosts.world.WorkerFacts`.
    debug_rank: see :class:`~distrain.RunConfig`.
    resume_from: the checkpoint that a new run starts from.
    plan: where the ranks are, if another launcher has placed them.
    keeps_logs: the run gets what the ranks print, and has a log of each.
    checks_hosts: only the hosts are looked at, see :mod:`distrain.coordinator.host_check`.
    memory_every: see :class:`~distrain.CheckpointConfig`.
    skips: after earlier rollbacks, by path of the checkpoint ("" for none): up to where rows are left out.
    """

    run_id: str
    job: Job
    backend: BackendConfig
    scaling: ScalingConfig
    hosts: Mapping[str, HostSettings]
    failure_config: FailureConfig
    stop_grace_s: float
    argv: list[str]
    python_flags: list[str]
    run_name: str = ""
    storage_path: str = ""
    first_attempt: int = 0
    checkpoint: str | None = None
    filesystem: str = ""
    validator: Validator | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    debug_rank: int | None = None
    peer_failure_grace_s: float = 0.0
    is_script: bool = False
    stop_signals: Sequence[str] | None = None
    resume_from: Checkpoint | None = None
    plan: WorldPlan | None = None
    memory_every: int | None = None
    keeps_logs: bool = True
    checks_hosts: bool = False
    skips: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def worker_facts(self, plan: WorldPlan, rank: RankPlan, attempt: int) -> WorkerFacts:
        """Return the facts that the worker of this rank gets."""
        return WorkerFacts(
            world_rank=rank.rank,
            world_size=plan.world_size,
            local_rank=rank.local_rank,
            local_world_size=rank.local_world_size,
            node_rank=rank.node_rank,
            run_name=self.run_name,
            storage_path=self.storage_path,
            attempt=attempt,
            devices=rank.devices,
            shares_gpu=plan.shares_gpu,
            run_id=self.run_id,
            metadata=self.metadata,
            resources=self.scaling.worker_resources,
            filesystem=self.filesystem,
            validates=self.validator is not None,
        )


# -- events ----------------------------------------------------------------------------------------------------------


class Event:
    """Something that happens to a run, beside the messages of its hosts and ranks."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RankEnds(Event):
    """A rank is about to end: what is known about it beside its last message.

    reports: number of reports that it had made. reason: why its native code aborted, if its output contains a reason.
    """

    rank: int
    reports: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HostLost(Event):
    """A host was lost: its agent could not be started, its connection ended, or its lease expired.

    owes: a checkpoint cannot be committed without this host.
    turned_away: sshd, of the host or of a jump host, has hung up because too many others were logging in.
    """

    host: str
    why: str
    owes: bool = False
    turned_away: bool = False


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """The user asked the run to stop. A second request asks to stop at once.

    why: the reason in a few words, such as ``SIGTERM``.
    """

    why: str


@dataclass(frozen=True, slots=True)
class StorageFailed(Event):
    """The run directory can no longer be written.

    why: names the file and the cause.
    """

    why: str


@dataclass(frozen=True, slots=True)
class CheckpointsInProgress:
    """The checkpoints that other ranks can still complete after some ranks have failed.

    parts: pairs of a rank that is storing its part inside report(), and the number of that report.
    expected: ranks that have made fewer reports than all failed ones, and how many each has made.
    within_s: how long to wait for these.
    """

    parts: frozenset[tuple[int, int]] = frozenset()
    expected: Mapping[int, int] = field(default_factory=dict)
    within_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding(Event):
    """Unfinished work with files that keeps an attempt from starting or ending. Sent whenever the machine waits for it.

    verifying: the checkpoint to start from is being compared with its manifest.
    copying: hosts are getting files that their workers need.
    saving: the checkpoints that ranks may complete after others have failed.
    committing: a checkpoint is being committed.
    uploading: an upload is all that the next checkpoint waits for, or the newest one is only in memory.
    lost: the rank whose part of the newest checkpoint is lost, and how.
    """

    verifying: bool = False
    copying: bool = False
    saving: CheckpointsInProgress = CheckpointsInProgress()
    committing: bool = False
    uploading: bool = False
    lost: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class HangDetected(Event):
    """No rank has made progress for longer than ``FailureConfig.hang_timeout_s``, or none ever can.

    after_s: seconds without progress.
    where: lines that describe what the ranks are doing.
    suspects: ranks that the other ranks may be waiting for.
    deadlock: why progress is impossible, if that is known.
    """

    after_s: float
    where: tuple[str, ...]
    suspects: tuple[int, ...] = ()
    deadlock: str = ""


@dataclass(frozen=True, slots=True)
class RolledBack(Event):
    """The answer to :class:`RollBack`.

    path: the checkpoint from which the next attempt starts, None to start from scratch.
    skip_to: by dataset or loader: the position up to which rows are left out.
    suspect: the name of the checkpoint that was given up, or "".
    """

    path: str | None
    skip_to: Mapping[str, Any]
    suspect: str = ""


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """The deadline of the run machine has passed."""


# -- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to a host."""

    host: str
    message: wire.Message


@dataclass(frozen=True, slots=True)
class ConnectHost:
    """Start an agent on a host. If an earlier agent was lost, first end everything that it has left there."""

    host: str


@dataclass(frozen=True, slots=True)
class ShowLine:
    """Show a line to the user.

    once: show the same line only once in this process, even if there are several runs.
    is_news: the line tells how far the run is; it is not a warning.
    """

    text: str
    once: bool = False
    is_news: bool = False


@dataclass(frozen=True, slots=True)
class AttemptStarts:
    """Begin a new attempt with this plan. All reports of earlier attempts have arrived."""

    attempt: int
    plan: WorldPlan


@dataclass(frozen=True, slots=True)
class WorkersStart:
    """The workers of the attempt are starting: its hosts have all that they need."""

    plan: WorldPlan


@dataclass(frozen=True, slots=True)
class AllTrain:
    """Every rank of the attempt has begun train_func."""


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """Close an attempt: none of its processes is left.

    why: what ended the attempt early, if that was not the failure of a rank. is_planned: the run itself has ended it,
    to continue with more workers.
    """

    attempt: int
    failures: tuple[RankFailure, ...] = ()
    why: str | None = None
    is_planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """A rank has raised :class:`~distrain.Rollback`: choose the checkpoint for the next attempt.

    reports: number of reports that the rank had made in the attempt.
    why: the text of the exception.
    skip_to: by dataset or loader: the position up to which rows are left out; None if none should be.

    Answered at once by :class:`RolledBack`.
    """

    rank: int
    host: str
    reports: int
    why: str
    skip_to: Mapping[str, Any] | None

    def __str__(self) -> str:
        when = f"after report {self.reports}" if self.reports else "before its first report"
        why = f" ({self.why})" if self.why else ""
        return f"rank {self.rank}{on_host(self.host)} asked to roll back {when}{why}"


Action = SendMessage | ConnectHost | ShowLine | AttemptStarts | WorkersStart | AllTrain | AttemptEnded | RollBack
