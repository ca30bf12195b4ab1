"""What goes into the run machine and what comes out of it. Runs in: coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain import wire
    from distrain.backend import BackendConfig
    from distrain.config import FailureConfig, ScalingConfig
    from distrain.decisions.states import RunState
    from distrain.errors import RankFailure
    from distrain.hosts.host import HostSettings
    from distrain.hosts.world import WorldPlan
    from distrain.work.job import Job

# -- what goes in ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Validator:
    """How checkpoints are validated: the pickled work that holds the function and its usual keyword arguments, its
    usual limit in seconds, and where and how it runs, which is as the user's process does.
    """

    blob: bytes
    timeout_s: float | None
    directory: str
    sys_path: list[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """All that a run is made of. ``hosts``: by name, in the order of placement; ``checkpoint``: path or URL to start
    from; ``filesystem``: see :class:`~distrain.wire.WorkerSpec`.
    """

    run_id: str
    run_name: str
    storage_path: str
    job: Job
    backend: BackendConfig
    scaling: ScalingConfig
    hosts: Mapping[str, HostSettings]
    failure_config: FailureConfig
    stop_grace_s: float
    argv: list[str]
    python_flags: list[str]
    first_attempt: int = 0
    checkpoint: str | None = None
    filesystem: str = ""
    validator: Validator | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message from an agent, or from a worker through it. ``reports``: how many the worker had made. ``reason``: why
    its native code aborted, if its output tells.
    """

    host: str
    message: wire.Message
    reports: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HostLost:
    """The connection to an agent has ended, its lease has run out, or it could not be started. ``owes``: whether
    a checkpoint cannot be committed without it.
    """

    host: str
    why: str
    owes: bool = False


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user wants the run to end; ``why`` in a few words. Asked twice: at once."""

    why: str


@dataclass(frozen=True, slots=True)
class StorageFailed:
    """The run directory cannot be written any more; ``why`` names the file and the cause."""

    why: str


@dataclass(frozen=True, slots=True)
class CheckpointsInProgress:
    """Ranks, each with the ordinal of its checkpoint, that are inside report() and store checkpoints which need nothing
    more from the ranks that have failed, the one included whose failure is announced next. ``expected``: ranks that may
    bring one with a report that the failed ranks have made already.
    """

    parts: frozenset[tuple[int, int]] = frozenset()
    expected: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class CheckpointAvailable:
    """A checkpoint was committed; restarts resume from it."""

    path: str


@dataclass(frozen=True, slots=True)
class HangDetected:
    """No rank has made progress for longer than the user allows; ``where`` they are, in lines; ``suspects``: for whom
    the others may be waiting.
    """

    after_s: float
    where: tuple[str, ...]
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    MessageReceived
    | HostLost
    | StopRequested
    | StorageFailed
    | CheckpointsInProgress
    | CheckpointAvailable
    | HangDetected
    | Tick
)


# -- what comes out --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to a host."""

    host: str
    message: wire.Message


@dataclass(frozen=True, slots=True)
class ConnectHost:
    """Start an agent on a host: its first, or one in place of another that was lost, of which nothing may be left."""

    host: str


@dataclass(frozen=True, slots=True)
class ShowLine:
    """One line for the user. ``once``: not again in this process, also in later runs."""

    text: str
    once: bool = False


@dataclass(frozen=True, slots=True)
class AttemptStarts:
    """A new attempt with this plan; earlier reports are complete."""

    attempt: int
    plan: WorldPlan


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """No process of the attempt is left. ``why``: what ended it early, if that was not the failure of a rank."""

    attempt: int
    failures: tuple[RankFailure, ...] = ()
    why: str | None = None


Action = SendMessage | ConnectHost | ShowLine | AttemptStarts | AttemptEnded


# -- what has come of it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a run stands or has ended.

    value: rank 0's pickled return value, if the run has finished. failures: of the latest attempt; errors: the
    exceptions themselves, where they are at hand. problem: why it could not be done, if no rank is to blame.
    hung, no_retry: see the machine. hosts: of each rank. finished: ranks that have done their work; where: the stopped
    ones were. entered: whether any rank ever got into train_func. earlier: how the attempts before failed, a line each.
    """

    state: RunState
    attempt: int
    metrics: dict[str, Any] | None = None
    value: bytes | None = None
    failures: Sequence[RankFailure] = ()
    errors: Mapping[int, BaseException] = field(default_factory=dict)
    stopped_ranks: Sequence[int] = ()
    last_lines: Mapping[int, Sequence[str]] = field(default_factory=dict)
    stop_reason: str | None = None
    problem: str | None = None
    hung: HangDetected | None = None
    no_retry: str | None = None
    hosts: Sequence[str] = ()
    finished: Sequence[int] = ()
    where: Sequence[str] = ()
    storage_failed: bool = False
    resources_missing: bool = False
    entered: bool = False
    earlier: Sequence[str] = ()
