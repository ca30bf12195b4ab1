"""The ranks for which the checkpoints of an attempt wait. Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument.

Unless the user names the ranks that save checkpoints, nobody knows them. So a checkpoint waits for the report of every
rank, but not for ranks that have finished, nor for *silent* ones. A rank that has had no checkpoint becomes silent when

- it has never reported, ``missing_rank_s`` after the first part of a checkpoint, or
- others have been blocked for ``missing_rank_s``, and for as long it has not reported.

It is waited for again once it has caught up, or has a checkpoint. A rank that starts, or gets files, has all the time
that it needs. Ranks in report() and get_checkpoint() wait only for a moment for those that have never reported.

An event of one rank never looks at all other ranks: ranks are grouped by the number of their reports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain.decisions.report_rows import ReportCounts
from distrain.system.text import count, ranks_have

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from distrain.api.config import CheckpointConfig

HEAD_START_S = 2.0
"""Seconds after the first report for which ranks that are ahead wait for ranks without one, which may never report."""
_NEWCOMER_S = 5.0
"""Seconds to wait, after a failure, for ranks other than rank 0 that may never report a checkpoint."""
SAY_IT = "If only some ranks save checkpoints, name them: CheckpointConfig(checkpoint_ranks=[0])"
"""The cure for waiting for ranks that never report a checkpoint."""
_STARTING, _FETCHING, _ENDED = "starting", "fetching", "ended"
"""A rank that reports nothing now has not entered train_func, waits for the files of a checkpoint, or has ended."""


@dataclass(slots=True)
class _Rank:
    """The facts about one rank.

    brings: whether it reports checkpoints, as the user says, or because it has reported one, or tried to; None if
    nobody knows. first: the number of the first such report.
    """

    brings: bool | None = None
    first: int = 0
    is_silent: bool = False
    reports: int = 0
    reported_at: float = -math.inf


class Attendance:
    """The reports of all ranks in one attempt.

    silent: the ranks that did not report in time for the latest checkpoint of an earlier attempt with as many ranks.
    """

    def __init__(self, world_size: int, config: CheckpointConfig, silent: Collection[int]) -> None:
        self.missing_s, declared = config.missing_rank_s, config.checkpoint_ranks
        self._ranks = {rank: _Rank() for rank in range(world_size)}
        self._counts = ReportCounts(world_size)
        """Of the ranks that checkpoints wait for."""
        for rank, record in self._ranks.items():
            if declared is not None:
                record.brings = declared == "all" or rank in declared
            record.is_silent = declared is None and rank in silent
            if record.brings is False or record.is_silent:
                self._counts.remove(rank)
        self._absent = dict.fromkeys(self._ranks, _STARTING)
        """The ranks that are not in train_func, or wait for the files of a checkpoint, and why."""
        self._entered_at = -math.inf
        """When a rank without a report last entered train_func, or continued there."""
        self._first_report_at = self._first_part_at = math.inf
        self._reported_at = -math.inf
        """When the last report came."""

    # -- events ---------------------------------------------------------------------------------------------------

    def running(self, rank: int, now: float) -> None:
        """Note that the rank is in train_func, or that it continues there with the files for which it has waited."""
        self._absent.pop(rank, None)
        if not self._ranks[rank].reports:
            self._entered_at = now

    def fetching(self, rank: int) -> None:
        """Note that the rank waits for the files of a checkpoint."""
        self._absent[rank] = _FETCHING

    def reported(self, rank: int, index: int, now: float, *, catches_up: bool) -> None:
        """Note a report. catches_up: a checkpoint that is still there may wait for it."""
        record = self._ranks[rank]
        record.reports, record.reported_at = index, now
        self._reported_at, self._first_report_at = now, min(self._first_report_at, now)
        if rank in self._counts or (record.is_silent and catches_up):
            record.is_silent = False
            self._counts.set(rank, index)

    def brought(self, rank: int) -> None:
        """Note that the last report of the rank had a checkpoint, or has failed with one."""
        record = self._ranks[rank]
        record.brings, record.is_silent, record.first = True, False, record.first or record.reports
        self._counts.set(rank, record.reports)
        self._first_part_at = min(self._first_part_at, record.reported_at)

    def finished(self, rank: int) -> None:
        """Note that the rank has done its work and will not report again."""
        self._ranks[rank].is_silent = False
        self._counts.remove(rank)

    def ended(self, rank: int) -> None:
        """Note that the rank's process has ended. Nobody knows what it would have reported, however long they wait."""
        self._absent[rank] = _ENDED

    def give_up(self, now: float, behind: float) -> list[int]:
        """Stop waiting for ranks that have had their time, and return them.

        behind: others have been blocked for ``missing_rank_s`` by ranks with fewer reports than this.
        """
        late = [made for made in self._counts.numbers if 0 < made < behind]
        ranks = [rank for made in late for rank in self._counts.ranks_with(made)]
        ranks = [rank for rank in ranks if now >= self._ranks[rank].reported_at + self.missing_s]
        if now >= max(self._first_part_at, self._newcomers_since) + self.missing_s:
            ranks += self._counts.ranks_with(0)
        silent = [rank for rank in ranks if not self._ranks[rank].brings and rank not in self._absent]
        for rank in silent:
            self._ranks[rank].is_silent = True
            self._counts.remove(rank)
        return silent

    # -- questions ------------------------------------------------------------------------------------------------

    def __getitem__(self, rank: int) -> _Rank:
        """Return what is known of a rank."""
        return self._ranks[rank]

    @property
    def has_reports(self) -> bool:
        """True once a rank has reported."""
        return self._first_report_at < math.inf

    @property
    def _newcomers_since(self) -> float:
        """Since when all ranks without a report could have made one; infinite while one of them is not running."""
        return self._entered_at if self._counts.ranks_with(0).isdisjoint(self._absent) else math.inf

    @property
    def head_start_ends(self) -> float:
        """When ranks that are ahead stop waiting for those that never reported."""
        return max(self._first_report_at, self._newcomers_since) + HEAD_START_S

    def deadlines(self, blocked_since: float) -> list[float]:
        """Return the moments at which ranks are no longer waited for. blocked_since: since when others are blocked."""
        newcomers_at = max(self._first_part_at, self._newcomers_since) + self.missing_s
        return [newcomers_at, self.head_start_ends, max(blocked_since, self._reported_at) + self.missing_s]

    def fewest(self, now: float) -> float:
        """Return the reports of the slowest rank for which ranks that are ahead wait now."""
        return self._counts.fewest_above(0) if now >= self.head_start_ends else self._counts.fewest

    def is_decided(self, rank: int, index: int) -> bool:
        """Return whether the rank has made this report, or is not waited for."""
        return rank not in self._counts or self._ranks[rank].reports >= index

    def are_decided(self, index: int) -> bool:
        """Return whether no rank is waited for that has not made this report."""
        return self._counts.fewest >= index

    def missing(self, index: int) -> list[int]:
        """Return the ranks that are waited for and have not made this report. This looks at all ranks."""
        return [rank for rank in self._ranks if not self.is_decided(rank, index)]

    def silent(self) -> list[int]:
        """Return all silent ranks."""
        return [rank for rank, record in self._ranks.items() if record.is_silent]

    def expected(
        self, hopeless: Collection[int], least: int, now: float, *, is_awaited: bool
    ) -> tuple[dict[int, int], float]:
        """Return the ranks that have made fewer reports than ``least``, and may bring a checkpoint; and how many.

        The number is the time that they get, which is not long if they may be ranks that never report.

        hopeless: ranks that will not report. is_awaited: a checkpoint waits for the others. Ranks without a report may
        bring one only while the attempt is young.
        """
        is_young = now < max(self._first_report_at, self._newcomers_since) + self.missing_s
        found = {
            rank: made
            for made in self._counts.numbers
            if made < least
            for rank in self._counts.ranks_with(made)
            if rank not in hopeless
            and self._absent.get(rank) != _ENDED
            and (self._ranks[rank].brings or (is_awaited if made else is_young))
        }
        is_sure = is_awaited or any(rank == 0 or self._ranks[rank].brings for rank in found)
        return found, self.missing_s if is_sure else min(_NEWCOMER_S, self.missing_s)

    def will_be_given_up(self, missing: Collection[int]) -> bool:
        """Return whether these ranks become silent before long, or the attempt ends."""
        are_new = not any(self._ranks[rank].reports or self._ranks[rank].brings for rank in missing)
        return (are_new and self._newcomers_since < math.inf) or all(
            self._absent.get(rank) == _ENDED for rank in missing
        )

    def describe(self, missing: Sequence[int]) -> str:
        """Return why these ranks have not reported."""
        if fetching := [rank for rank in missing if self._absent.get(rank) == _FETCHING]:
            return f"{ranks_have(fetching)} not got the files of a checkpoint yet"
        if starting := [rank for rank in missing if rank in self._absent]:
            return f"{ranks_have(starting)} not entered train_func"
        if silent := [rank for rank in missing if not self._ranks[rank].reports]:
            return f"{ranks_have(silent)} not called report() yet"
        slowest = min(missing, key=lambda rank: self._ranks[rank].reports)
        return f"{ranks_have([slowest])} made only {count(self._ranks[slowest].reports, 'report')}. {SAY_IT}"
