"""The ranks of one attempt: the state of each, and how it has ended. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from distrain.decisions.states import RankState
from distrain.errors import RankFailure
from distrain.system.peer_errors import blames_peer
from distrain.system.text import signal_in_words

if TYPE_CHECKING:
    from distrain import wire
    from distrain.hosts.world import RankPlan, WorldPlan

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "usually by the kernel, because the host ran out of memory; use fewer workers or smaller batches",
    signal.SIGSEGV: "a crash in native code; the last call of your code in the stack leads there",
    signal.SIGBUS: "a crash in native code, or /dev/shm is full",
    signal.SIGXCPU: "its CPU time is limited; raise `ulimit -t` (RLIMIT_CPU) where the run is started",
    signal.SIGABRT: "native code gave up; its message, if it had one, is in the log",
}
_STAGES = {"import": "unpickling it and importing what it needs", "setup": "setting up the process group"}


@dataclass(slots=True)
class Rank:
    """One rank of an attempt.

    reports: number of reports that it has made.
    reason: why its native code aborted, if its output contains a reason.
    failed_order: its position in the order of failures, if it failed.
    when: how far it has got, in words.
    was_told: another rank had failed, and this one was told to end, before its outcome came.
    """

    plan: RankPlan
    state: RankState = RankState.PLANNED
    reports: int = 0
    reason: str = ""
    outcome: wire.Outcome | None = None
    exited: wire.Exited | None = None
    failed_order: int | None = None
    when: str = "before it entered train_func"
    was_told: bool = False

    @property
    def has_finished(self) -> bool:
        """True if the rank has sent a good outcome."""
        return self.outcome is not None and self.outcome.ok

    @property
    def failure(self) -> RankFailure | None:
        """The failure of the rank; None if it has not failed, has finished its work, or distrain ended it."""
        outcome, exited = self.outcome, self.exited
        if self.failed_order is None or self.has_finished:
            return None  # whatever happens after a good outcome: gloo may abort when the interpreter exits
        failure = partial(RankFailure, rank=self.plan.rank, host=self.plan.host, order=self.failed_order)
        if outcome is not None:
            return failure(
                summary=_summary(outcome, exited),
                traceback=outcome.traceback,
                exit_code=outcome.exit_code,
                consequence=outcome.blames_peer or self.was_told,
                max_rss_bytes=exited.max_rss_bytes if exited is not None else 0,
                payload=outcome.body,
            )
        if exited is None or exited.by_us:
            return None
        return failure(
            summary=_death(exited, self.when, reason=self.reason),
            traceback="",
            kind=_kind(exited),
            signal=exited.signal,
            max_rss_bytes=exited.max_rss_bytes,
            exit_code=exited.exit_code or (128 + exited.signal if exited.signal else 1),
            consequence=self.was_told or (exited.signal == signal.SIGABRT and blames_peer(self.reason)),
        )


class Ranks:
    """The ranks of one attempt. Sums over them are kept up to date, because every message needs one.

    Attribute ``outcomes``: the good outcomes, by rank.
    Attribute ``failed``: the ranks that have failed or were stopped, in order.
    """

    def __init__(self, plan: WorldPlan | None = None) -> None:
        self.all = [Rank(plan=rank) for rank in plan.ranks] if plan is not None else []
        self.outcomes: dict[int, wire.Outcome] = {}
        self.failed: list[Rank] = []
        self._starting = self._working = len(self.all)
        self._stopped_early = 0

    def __getitem__(self, number: int) -> Rank:
        return self.all[number]

    @property
    def all_started(self) -> bool:
        """True if no rank is on its way to train_func."""
        return not self._starting

    @property
    def none_works(self) -> bool:
        """True if every rank has ended its work, well or badly."""
        return not self._working

    @property
    def all_finished(self) -> bool:
        """True if every rank has sent a good outcome, and there are ranks."""
        return len(self.outcomes) == len(self.all) > 0

    @property
    def all_work_is_done(self) -> bool:
        """True if, in addition, no rank has ended early because should_stop() was true."""
        return self.all_finished and not self._stopped_early

    def move(self, rank: Rank, new: RankState) -> None:
        """Put a rank into another state. The caller has looked up if the move is allowed."""
        self._starting -= rank.state is RankState.PLANNED
        self._working += (new in _WORKING) - (rank.state in _WORKING)
        rank.state = new

    def set_outcome(self, rank: Rank, outcome: wire.Outcome) -> None:
        """Note how a rank has ended its work."""
        rank.outcome = outcome
        if outcome.ok:
            self.outcomes[rank.plan.rank] = outcome
            self._stopped_early += outcome.stopped

    def drop_outcome(self, rank: Rank) -> None:
        """Forget the good outcome of a rank whose work is lost."""
        rank.outcome = None
        self._stopped_early -= self.outcomes.pop(rank.plan.rank).stopped

    def count_failure(self, rank: Rank) -> None:
        """Note that a rank has failed or was stopped."""
        if rank.failed_order is None:
            self.failed.append(rank)
            rank.failed_order = len(self.failed)

    def failures(self) -> list[RankFailure]:
        """Return the failures of ranks that failed by themselves, in order of arrival."""
        found = [rank.failure for rank in self.failed]
        return [failure for failure in found if failure is not None]


_WORKING = (RankState.PLANNED, RankState.RUNNING)


# -- how a rank has ended --------------------------------------------------------------------------------------------


def _summary(outcome: wire.Outcome, exited: wire.Exited | None) -> str:
    summary = outcome.error or "unknown error"
    if exited is not None and exited.oom:  # the victim is often a DataLoader worker
        summary = f"{summary} (meanwhile, the kernel killed a process for lack of memory: {exited.memory})"
    if outcome.stage != "run":
        summary = f"{summary} (before train_func, while {_STAGES.get(outcome.stage, outcome.stage)})"
    return summary


def _kind(exited: wire.Exited) -> str:
    if exited.lost is not None:
        return "lost"
    if exited.oom and exited.signal == signal.SIGKILL:
        return "memory"
    return "signal" if exited.signal is not None else "exit"


def _death(exited: wire.Exited, when: str, *, reason: str) -> str:
    """Describe how a process ended without an outcome."""
    memory = f"; peak memory {exited.max_rss_bytes / 2**20:.0f} MiB" if exited.max_rss_bytes else ""
    if exited.lost is not None:
        return f"lost: {exited.lost}"
    if _kind(exited) == "memory":
        return f"was killed by the kernel for lack of memory {when}: {exited.memory}"
    if exited.signal is not None:
        hint = (exited.signal == signal.SIGABRT and reason) or _SIGNAL_HINTS.get(exited.signal)
        if exited.memory and exited.signal == signal.SIGBUS:
            hint = exited.memory
        elif exited.memory and exited.signal == signal.SIGKILL:
            hint = f"perhaps the kernel did it, which killed processes for lack of memory on this host: {exited.memory}"
        killed = f"was killed by {signal_in_words(exited.signal)} {when}, not by distrain"
        return f"{killed}{f': {hint}' if hint else ''}{memory}"
    if reason.startswith("libgomp: "):
        return f"exited with code {exited.exit_code} {when}: {reason}; raise ulimit -u or pids.max{memory}"
    cure = "The end of its log may say why" if exited.exit_code else "train_func has to return"
    if reason.startswith("Timeout ("):
        cure = f"faulthandler.dump_traceback_later(exit=True) ended it. {reason}"
    return f"exited with code {exited.exit_code} {when}, without an exception: os._exit() or os.exec*()? {cure}{memory}"
