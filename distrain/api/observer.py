"""The facts that a run tells, and the interface of those who hear them. Runs in: coordinator.

The engine tells each fact once. The console, callbacks, trackers, the page and events.jsonl are observers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from distrain.system.text import on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from distrain.api.result import Result
    from distrain.errors import RankFailure
    from distrain.hosts.troubles import Trouble
    from distrain.storage.checkpoint import Checkpoint
    from distrain.storage.commit import CommittedCheckpoint

RankEnd: TypeAlias = Literal["ended", "failed", "stopped"]
"""The end of a rank: well, by a failure, or because it was stopped."""


@dataclass(frozen=True, slots=True)
class Fact:
    """The base of all facts. ``now`` is a time of ``time.monotonic``."""


@dataclass(frozen=True, slots=True)
class RunBegan(Fact):
    """A call of fit() has begun.

    location: the run directory, a path or URL. directory: the local one, which has the small files of a remote run.
    in_process: train_func runs in the process of fit().
    """

    run_id: str
    name: str
    location: str
    directory: Path
    in_process: bool


@dataclass(frozen=True, slots=True)
class AttemptBegan(Fact):
    """The ranks are being started. hosts: that of each rank. A second one in the same fit() is a restart."""

    attempt: int
    hosts: Sequence[str]
    now: float


@dataclass(frozen=True, slots=True)
class RankTrains(Fact):
    """A rank has entered train_func."""

    rank: int
    now: float


@dataclass(frozen=True, slots=True)
class Reported(Fact):
    """A rank has called report().

    index, number: count its reports from 1, in this attempt and over the whole run. A restart repeats numbers.
    """

    rank: int
    index: int
    number: int
    metrics: Mapping[str, Any]
    progress: Sequence[float] | None
    now: float


@dataclass(frozen=True, slots=True)
class ReportsJoined(Fact):
    """Every rank has made its n-th report, or will make none (None). checkpoint: the one that came with them."""

    metrics: Sequence[dict[str, Any] | None]
    checkpoint: Checkpoint | None


@dataclass(frozen=True, slots=True)
class Printed(Fact):
    """A rank has written bytes to stdout (1) or stderr (2)."""

    rank: int
    stream: int
    data: bytes
    now: float


@dataclass(frozen=True, slots=True)
class Committed(Fact):
    """A checkpoint was committed.

    step: the reports of a rank over the whole run up to it. ranks: those that have saved files. seconds: since the
    first of them reported it. is_in_memory: ``checkpoint`` is in the memory of the hosts, and not on storage yet.
    """

    attempt: int
    name: str
    index: int
    step: int
    bytes: int
    seconds: float
    ranks: Sequence[int]
    metrics: Mapping[str, Any]
    checkpoint: Checkpoint
    now: float
    is_in_memory: bool = False


@dataclass(frozen=True, slots=True)
class BecameSlow(Fact):
    """A rank has become slow.

    factor: its time as a multiple of the median's, between two collectives or two ``reports``. since: such as ``step
    800``. place: where it spends most of its own time, such as ``load_batch (train.py:31)``, and ``share`` of it.
    """

    rank: int
    host: str
    factor: float
    between: str
    since: str | None
    place: str
    share: float

    def __str__(self) -> str:
        since = f" (since {self.since})" if self.since else ""
        factor = f"{round(self.factor, 1):g} times as long as"
        how = (
            f"is slow{since}: its reports take {factor} those of the others"
            if self.between == "reports"
            else f"slows the run down{since}: its own work takes {factor} that of the others"
        )
        share = "all" if self.share > 0.98 else f"{self.share:.0%}"
        where = f", {share} of it in {self.place}" if self.place else ""
        return f"rank {self.rank}{on_host(self.host)} {how}{where}"


@dataclass(frozen=True, slots=True)
class TroubleBegan(Fact):
    """Memory or a GPU of a host is about to end the run, or slows it down; or a rank's parameters differ."""

    host: str
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class TroubleEnded(Fact):
    """A trouble is over."""

    host: str
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class HangBegan(Fact):
    """Every rank stands still.

    text: who is stuck, and who waits. since: when the last rank moved, in seconds since 1970. culprits: the ranks that
    others wait for. text_at: returns the text with the time that has passed until then (time.monotonic).
    """

    text: str
    since: float
    culprits: Sequence[int]
    text_at: Callable[[float], str]


@dataclass(frozen=True, slots=True)
class HangEnded(Fact):
    """The ranks make progress again, or have ended.

    since: when they stopped, in seconds since 1970. text: who was stuck, if that is known.
    """

    since: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class RankEnded(Fact):
    """A rank has ended. Its first end counts: a rank whose work is done may be killed as it exits."""

    rank: int
    end: RankEnd


@dataclass(frozen=True, slots=True)
class AttemptEnded(Fact):
    """The processes of an attempt have ended.

    failures: of its ranks, the culprit first; none if the attempt was stopped, or has finished. why: what has ended it,
        if that was not the failure of a rank.
    exceptions: returns the exceptions of these ranks. It may run the user's code.
    """

    attempt: int
    failures: Sequence[RankFailure]
    why: str | None
    exceptions: Callable[[], dict[int, BaseException]]


@dataclass(frozen=True, slots=True)
class Stopping(Fact):
    """The run was asked to stop. reason: such as ``SIGTERM`` or ``distrain stop``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended(Fact):
    """The call of fit() ends.

    status: ``finished``, ``failed``, or ``stopped`` (by the user). how: the same in words.
    result: None if an exception has ended fit() itself.
    error: what fit() raises.
    checkpoints: those that are kept, the oldest first.
    advice: how to continue the run, if ``error`` does not say it.
    storage_works: False if the run directory can no longer be written.
    """

    status: str
    how: str
    seconds: float
    result: Result | None
    error: BaseException | None
    checkpoints: Sequence[CommittedCheckpoint]
    advice: str | None
    storage_works: bool


class Observer:
    """Hears what happens to a run. Derive from this class, and pass objects to ``RunConfig(callbacks=[...])``.

    distrain calls :meth:`hear` in a thread of the observer's own, with one fact after the other. Training never waits
    for it: an exception is shown once, and fit() waits for a slow observer at its end only, a minute at most.

    name: names it in messages; by default the name of the class.
    advice: is shown if the run ends before it has heard everything.
    hears: the kinds of facts that it wants; by default all.

    ::

        from distrain.api.observer import AttemptEnded, Observer

        class Pager(Observer):
            hears = (AttemptEnded,)

            def hear(self, fact):
                for failure in fact.failures[:1]:
                    print(f"rank {failure.rank} on {failure.host}: {failure.summary}")
    """

    name: str = ""
    advice: str = ""
    hears: ClassVar[tuple[type[Fact], ...]] = ()

    def hear(self, fact: Fact) -> None:
        """Hear a fact."""

    def idle(self) -> None:
        """Do what is to be done from time to time. Called about once per second between two facts."""
