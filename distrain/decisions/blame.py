"""The blame for a failure: which rank failed first, and why the run ended. Runs in: coordinator.

Pure: no I/O, no clock. A worker says itself if its exception blames another rank (:func:`blames_peer`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distrain.errors import RankFailure
from distrain.system.peer_errors import CONNECTION_GONE
from distrain.system.text import is_full_disk, name_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distrain.decisions.events import HangDetected
    from distrain.decisions.states import RunState

_FINISHED = "finished train_func while other ranks waited for it"

BATCHES = "every rank must take part in every collective: do all have the same number of batches?"
"""What to do if ranks wait for one that has finished."""

# -- the blame for a failure -----------------------------------------------------------------------------------------


def hang_failures(
    hosts: Mapping[int, str], suspects: Sequence[int], *, after_s: float, finished: Collection[int] = ()
) -> list[RankFailure]:
    """Return a failure for each rank of ``hosts``, the suspects first.

    finished: ranks that had finished while others waited for them.
    suspects: ranks that the others may have waited for; all ranks if it is empty.
    """
    blamed = set(suspects or hosts)
    order = sorted(hosts, key=lambda rank: (rank not in blamed, rank))
    return [
        RankFailure(
            rank=rank,
            host=hosts[rank],
            order=number,
            summary=_FINISHED if rank in finished else f"made no progress for {after_s:g} s",
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


def finished_early(failures: Sequence[RankFailure], finished: Collection[int]) -> str | None:
    """Return a sentence that blames ranks that had finished, if all failures are consequences of that."""
    if not (failures and finished and all(failure.consequence for failure in failures)):
        return None
    them = "it" if len(finished) == 1 else "them"
    return f"{name_ranks(sorted(finished))} had finished train_func while other ranks still waited for {them}"


def is_refusal(failure: RankFailure) -> bool:
    """Return whether distrain has refused the user's command line, by an error whose summary says it all."""
    is_whole = failure.traceback.rstrip().endswith(failure.summary) and "direct cause" not in failure.traceback
    return failure.summary.startswith(("JobError: ", "LaunchError: ")) and is_whole


def _is_about_connection(failure: RankFailure) -> bool:
    return failure.kind == "exception" and bool(CONNECTION_GONE.search(failure.summary))


# -- how the run has ended -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The state of a run, and how it ended if it has. Facts about ranks are of the latest attempt.

    value: rank 0's pickled return value, if every rank has finished its work.
    failures: the ranks that failed by themselves or were lost.
    errors: exceptions by rank, if they were raised in this process.
    stopped_ranks: ranks that distrain stopped.
    stop_reason: why the user asked the run to stop.
    grace_is_over: ranks were still running when the time was up that they had to stop.
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
    grace_is_over: bool = False
    problem: str | None = None
    hung: HangDetected | None = None
    no_retry: str | None = None
    hosts: Sequence[str] = ()
    finished: Sequence[int] = ()
    storage_failed: bool = False
    resources_missing: bool = False
    entered: bool = False
    earlier_attempts: Sequence[str] = ()

    def problem_explains_failures(self) -> bool:
        """Return True if no rank is to blame: its host was lost, or its error came from the full disk of the run."""
        if self.problem and all(failure.lost for failure in self.failures):
            return True
        return self.storage_failed and all(is_full_disk(failure.summary) for failure in self.failures)

    def own_failures(self, requested: Collection[int]) -> list[RankFailure]:
        """Return the failures with a cause of their own, without those by the exit codes of the stop."""
        return [one for one in self.failures if not one.consequence and one.exit_code not in requested]
