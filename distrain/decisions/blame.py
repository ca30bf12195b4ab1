"""The blame for a failure: how each rank ended, which failure came first, and why the run ended. Runs in: coordinator.

Pure: no I/O, no clock. A worker says itself if its exception blames another rank (:func:`blames_peer`).
"""

from __future__ import annotations

import enum
import math
import signal
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distrain.errors import RankFailure
from distrain.system.peer_errors import CONNECTION_GONE, blames_peer
from distrain.system.text import is_full_disk, signal_in_words

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distrain import wire
    from distrain.decisions.events import HangDetected
    from distrain.decisions.states import RunState

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "often the kernel does it, when the host is out of memory; use fewer workers or smaller batches",
    signal.SIGSEGV: "a crash in native code; the last call of your code in the stack leads there",
    signal.SIGBUS: "a crash in native code, or /dev/shm is full",
    signal.SIGABRT: "native code gave up; its message, if it had one, is in the log",
}
_STAGES = {"import": "unpickling it and importing what it needs", "setup": "setting up the process group"}

# -- how a rank has ended --------------------------------------------------------------------------------------------


def failure_of(
    rank: int,
    host: str,
    order: int,
    *,
    outcome: wire.Outcome | None,
    exited: wire.Exited | None,
    entered: bool = True,
    reason: str = "",
    was_told: bool = False,
) -> RankFailure | None:
    """Return the failure of a rank, or None if it finished its work or distrain ended it.

    order: its position among the failures of the attempt.
    entered: the rank had entered train_func.
    reason: why its native code aborted, if its output contains a reason.
    was_told: another rank had failed, and this one was told to end.
    """
    if outcome is not None and outcome.ok:
        return None  # whatever happens afterwards: gloo may abort when the interpreter exits
    if outcome is not None:
        return RankFailure(
            rank=rank,
            host=host,
            order=order,
            summary=_summary(outcome, exited),
            traceback=outcome.traceback,
            exit_code=outcome.exit_code,
            consequence=outcome.blames_peer or was_told,
            max_rss_bytes=exited.max_rss_bytes if exited is not None else 0,
            payload=outcome.body,
        )
    if exited is None or exited.by_us:
        return None
    return RankFailure(
        rank=rank,
        host=host,
        order=order,
        summary=_death(exited, entered=entered, reason=reason),
        traceback="",
        kind=_kind(exited),
        signal=exited.signal,
        max_rss_bytes=exited.max_rss_bytes,
        exit_code=exited.exit_code or (128 + exited.signal if exited.signal else 1),
        consequence=was_told or (exited.signal == signal.SIGABRT and blames_peer(reason)),
    )


def hang_failures(hosts: Mapping[int, str], suspects: Sequence[int], *, after_s: float) -> list[RankFailure]:
    """Return a failure for each rank that had not finished, the suspects first.

    hosts: the host of each of these ranks.
    suspects: ranks that the others may have waited for; all ranks if it is empty.
    """
    blamed = set(suspects or hosts)
    order = sorted(hosts, key=lambda rank: (rank not in blamed, rank))
    return [
        RankFailure(
            rank=rank,
            host=hosts[rank],
            order=number,
            summary=f"made no progress for {after_s:g} s",
            traceback="",
            exit_code=1,
            consequence=rank not in blamed,
            kind="hang",
        )
        for number, rank in enumerate(order)
    ]


def culprit_first(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """Sort failures: those with a cause of their own before consequences, each in order of arrival.

    An error about any connection becomes a consequence if another rank had failed by itself before, or has died: a
    death is noticed later than the connections that it breaks.
    """
    found = list(failures)
    own = [one for one in found if not one.consequence and not _is_about_connection(one)]
    first = min((one.order for one in own), default=math.inf)
    has_death = any(one.kind != "exception" for one in own)
    judged = [
        replace(one, consequence=True) if _is_about_connection(one) and (has_death or first < one.order) else one
        for one in found
    ]
    return sorted(judged, key=lambda failure: (failure.consequence, failure.order))


def _is_about_connection(failure: RankFailure) -> bool:
    return failure.kind == "exception" and bool(CONNECTION_GONE.search(failure.summary))


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


def _death(exited: wire.Exited, *, entered: bool, reason: str) -> str:
    """Describe how a process ended without an outcome."""
    memory = f"; peak memory {exited.max_rss_bytes / 2**20:.0f} MiB" if exited.max_rss_bytes else ""
    when = "during training" if entered else "before it entered train_func"
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
    cure = "os._exit() or os.exec*()? An exception would say where"
    return f"exited with code {exited.exit_code} {when}, without an exception: {cure}{memory}"


# -- how the run has ended -------------------------------------------------------------------------------------------


class Cause(enum.Enum):
    """Why a run has not finished. It decides which exception fit() raises."""

    STOP = "stop"
    """The user asked it to stop."""
    HANG = "hang"
    """No rank made progress."""
    RANKS = "ranks"
    """Ranks failed."""
    STORAGE = "storage"
    """The run directory cannot be written."""
    RESOURCES = "resources"
    """The hosts do not have what the scaling config asks for."""
    HOSTS = "hosts"
    """Hosts were lost, or cannot continue."""
    START = "start"
    """No rank has ever entered train_func."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The state of a run, and how it ended if it has. Facts about ranks are of the latest attempt.

    value: rank 0's pickled return value, if every rank has finished its work.
    failures: the ranks that failed by themselves or were lost.
    errors: exceptions by rank, if they were raised in this process.
    stopped_ranks: ranks that distrain stopped.
    stop_reason: why the user asked the run to stop.
    problem: why the run cannot continue, if no rank is to blame.
    hung: the hang that ended the attempt.
    no_retry: why the run was not restarted although its budget allowed a restart.
    hosts: the host of each rank.
    finished: ranks that have finished their work.
    storage_failed: the run directory cannot be written.
    resources_missing: the hosts do not have what the scaling config asks for.
    entered: some rank of some attempt has entered train_func.
    earlier_attempts: one line for each earlier attempt, with its failure.
    """

    state: RunState
    attempt: int
    value: bytes | None = None
    failures: Sequence[RankFailure] = ()
    errors: Mapping[int, BaseException] = field(default_factory=dict)
    stopped_ranks: Sequence[int] = ()
    stop_reason: str | None = None
    problem: str | None = None
    hung: HangDetected | None = None
    no_retry: str | None = None
    hosts: Sequence[str] = ()
    finished: Sequence[int] = ()
    storage_failed: bool = False
    resources_missing: bool = False
    entered: bool = False
    earlier_attempts: Sequence[str] = ()

    @property
    def cause(self) -> Cause:
        """Why the run has not finished."""
        if self.stop_reason is not None:
            return Cause.STOP
        if self.hung is not None and not self.failures:
            return Cause.HANG
        if self.failures and not self._problem_explains_failures():
            return Cause.RANKS
        if self.storage_failed:
            return Cause.STORAGE
        if self.resources_missing:
            return Cause.RESOURCES
        return Cause.HOSTS if self.entered else Cause.START

    def _problem_explains_failures(self) -> bool:
        """Return True if no rank is to blame: its host was lost, or its error came from the full disk of the run."""
        if self.problem and all(failure.lost for failure in self.failures):
            return True
        return self.storage_failed and all(is_full_disk(failure.summary) for failure in self.failures)

    def own_failures(self, requested: Collection[int]) -> list[RankFailure]:
        """Return the failures with a cause of their own, without those by the exit codes of the stop."""
        return [one for one in self.failures if not one.consequence and one.exit_code not in requested]
