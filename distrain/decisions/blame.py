"""The blame for a failure: which rank failed first, and why the run ended. Runs in: coordinator.

Pure: no I/O, no clock. A worker says itself if its exception blames another rank (:func:`blames_peer`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from distrain.errors import RankFailure
from distrain.system.peer_errors import CONNECTION_GONE
from distrain.system.text import name_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_FINISHED = "finished train_func while other ranks waited for it"

BATCHES = "every rank must take part in every collective: do all have the same number of batches?"
"""The cure if ranks wait for one that has finished."""

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
