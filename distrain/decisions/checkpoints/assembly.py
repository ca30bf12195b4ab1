"""Reports of N ranks -> checkpoints: which rank copies which files, and when to commit. Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument.

The n-th calls of report() on all ranks belong together, even if only some have a checkpoint. The *ordinal* of a
checkpoint is this n, counted from 1 in each attempt. It is complete when every rank has made its n-th report or has
finished. If several ranks report a file of the same name, that of the lowest rank is kept.

An event of one rank never looks at all other ranks. Instead, ranks are grouped by the number of their reports, and each
checkpoint has a cursor, which passes every rank once.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrain.decisions.events import ShowLine
from distrain.decisions.report_rows import ReportCounts
from distrain.storage.commit import Commit, CommittedFile
from distrain.system.text import count, name_ranks, ranks_have

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distrain import wire
    from distrain.api.config import CheckpointConfig

PATIENCE_S = 1.0
"""Seconds for which the files of a rank wait for lower ranks, which may report the same ones. This saves copying them
twice; it never decides which are kept."""
HEAD_START_S = 2.0
"""Seconds after the first report for which ranks that are ahead wait for ranks without one, which may never report."""
MOST_UNCOMMITTED = 4
"""Checkpoints that may wait for other ranks, or for the disk. A rank with another one waits in report()."""
_NEWCOMER_S = 5.0
"""Seconds to wait, after a failure, for the first report of ranks other than rank 0 if no checkpoint waits for it."""
_MOST_METRICS = 1000
"""Reports of rank 0 that are remembered for the checkpoints of slower ranks."""

_SAY_IT = "If only some ranks save checkpoints, name them: CheckpointConfig(checkpoint_ranks=[0])"
"""The cure for waiting for ranks that never report a checkpoint."""
_STARTING, _FETCHING, _ENDED = "starting", "fetching", "ended"
"""Why a rank reports nothing now: it has not entered train_func, waits for the files of a checkpoint, or has ended."""

# -- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestFiles:
    """Have these files of a rank's checkpoint stored, by the rank itself or by the uploader of its host.

    They replace files of the same names that a higher rank has stored, which has not waited for this rank long enough.
    from_memory: files in memory are stored, and not only hashed there, because other ranks have stored theirs.
    """

    rank: int
    ordinal: int
    files: tuple[str, ...]
    from_memory: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """Make ``report()`` of a rank fail."""

    rank: int
    ordinal: int
    why: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Give the checkpoint up: it will never be committed."""

    ordinal: int


@dataclass(frozen=True, slots=True)
class Proceed:
    """Let the rank write its next checkpoint to memory, though this one still waits for ranks that never reported."""

    rank: int
    ordinal: int


Action = RequestFiles | Refuse | Commit | Drop | Proceed | ShowLine


# -- state ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Part:
    """The files that one rank reports for one checkpoint."""

    reported_at: float
    files: frozenset[str]
    body: bytes
    in_place: str = ""
    in_memory: bool = False
    own: set[str] = field(default_factory=set)
    """Those of the files that no lower rank has reported."""
    stored: tuple[tuple[str, int, int], ...] = ()
    skipped: tuple[tuple[str, int, int], ...] = ()


@dataclass(slots=True)
class _Pending:
    """One checkpoint that is neither committed nor dropped.

    A part begins in ``patient``, ``ready`` or ``in_place``. From ``ready``, it may go to ``queued`` and back. It is in
    none of them once its files were ordered.
    """

    last_at: float = 0.0
    """When the last part was reported."""
    parts: dict[int, _Part] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    """By name of a file: the lowest rank that reports it."""
    named_by: tuple[int, str] | None = None
    """The first rank that has named the directory, and the name."""
    folders: dict[str, int] = field(default_factory=dict)
    """By name of a directory: the first rank that reports files in it."""
    ordered: dict[str, int] = field(default_factory=dict)
    """By name of a file: the rank that was the last to be ordered to store it."""
    patient: OrderedDict[int, _Part] = field(default_factory=OrderedDict)
    """Parts that wait for lower ranks, which may report the same files. In the order of the reports."""
    ready: set[int] = field(default_factory=set)
    """Ranks whose files are ordered next."""
    queued: dict[int, set[int]] = field(default_factory=dict)
    """By rank that stores its files now: lower ranks that replace some of them afterwards."""
    in_place: set[int] = field(default_factory=set)
    """Ranks whose files are in place. They wait until every rank has reported."""
    lister: int | None = None
    """The lowest rank whose host was ordered to list the files that are in place."""
    unstored: set[int] = field(default_factory=set)
    in_memory: set[int] = field(default_factory=set)
    """Ranks that write no further checkpoint to memory before this one is settled."""
    supersedes: bool = False
    """True if a rank has written an earlier one to memory, and did not wait until that was complete."""
    undecided: int = 0
    """A cursor: every lower rank has reported its part, or reports none."""
    is_wanted: bool = False
    """True once a rank has reported a part, or tried to."""
    problem: str | None = None
    """Why a part is missing: the rest of the sentence "the checkpoint of report 3 is dropped"."""

    @property
    def since(self) -> float:
        """When the first part was reported; infinite if there is none."""
        return next((part.reported_at for part in self.parts.values()), math.inf)

    def other_name(self, rank: int, name: str | None) -> str | None:
        """Return why the rank's name for the directory differs from another rank's, or None if it does not."""
        if name is None:
            return None
        first, known = self.named_by = self.named_by or (rank, name)
        if name == known:
            return None
        return (
            f"checkpoint_dir_name is {known!r} on rank {first} and {name!r} on rank {rank}; the ranks are not at the "
            "same step, or must give one name"
        )

    def clash(self, rank: int, files: Collection[str], folders: Collection[str]) -> str | None:
        """Return why names that the rank reports clash with those of another rank, or None if they do not."""
        for names, is_a, others, is_other in (
            (files, "file", self.folders, "directory"),
            (folders, "directory", self.files, "file"),
        ):
            if clashes := others.keys() & names:
                name = min(clashes)
                return (
                    f"{name!r} is a {is_other} on rank {others[name]} and a {is_a} on rank {rank}; give them different "
                    "names, or put the rank into them"
                )
        return None

    def add_files(self, rank: int, part: _Part, folders: Iterable[str]) -> None:
        """Add the names of a part. Of files that a higher rank has reported, this rank's are kept from now on."""
        for folder in folders:
            self.folders.setdefault(folder, rank)
        for file in part.files:
            lowest = self.files.get(file)
            if lowest is not None and lowest < rank:
                continue
            self.files[file] = rank
            part.own.add(file)
            if lowest is not None:
                self.parts[lowest].own.discard(file)
                if not self.parts[lowest].own:
                    self.make_ready(lowest)

    def make_ready(self, rank: int) -> None:
        """Stop holding the part back for lower ranks."""
        if self.patient.pop(rank, None) is not None:
            self.ready.add(rank)

    def end_patience(self, now: float) -> None:
        """Stop holding back the parts that have waited for lower ranks long enough."""
        while self.patient:
            rank, part = next(iter(self.patient.items()))
            if now < part.reported_at + PATIENCE_S:
                return
            self.make_ready(rank)

    def order_ready(self, ordinal: int) -> list[Action]:
        """Order the files of ready ranks that no lower rank has reported, unless another rank stores some of them now.

        If two ranks stored a file of one name at the same time, the bytes of either could be the last ones.
        """
        actions: list[Action] = []
        ready, self.ready = sorted(self.ready), set()
        for rank in ready:
            own = self.parts[rank].own
            storing = next((self.ordered[file] for file in own if self.ordered.get(file) in self.unstored), None)
            if storing is None:
                self.ordered |= dict.fromkeys(own, rank)
                actions.append(RequestFiles(rank, ordinal, tuple(sorted(own))))
            else:
                self.queued.setdefault(storing, set()).add(rank)
        return actions

    def note_stored(self, rank: int) -> None:
        """Note that nothing writes the rank's files from now on."""
        self.unstored.discard(rank)
        self.ready |= self.queued.pop(rank, set())


@dataclass(slots=True)
class _RankRecord:
    brings: bool = False
    """True once the rank has reported a part, or tried to, or if the user says that it does."""
    silent: bool = False
    """True while nobody waits for the rank, because it did not report in time, in this attempt or an earlier one."""
    last_index: int = 0
    reported_at: float = -math.inf


@dataclass(eq=False)
class CheckpointAssembly:
    """The checkpoints of one attempt, joined from the parts of its ranks.

    incomparable: endings of file names whose bytes differ although their contents are the same.
    silent: the ranks that did not report in time for the latest checkpoint of an earlier attempt with as many ranks.
    before: the reports of a rank before this attempt. Messages to users count these, too.
    """

    world_size: int
    config: CheckpointConfig
    incomparable: tuple[str, ...] = ()
    silent: Collection[int] = ()
    before: int = 0

    def __post_init__(self) -> None:
        self._declared = self.config.checkpoint_ranks
        self._ranks = {rank: _RankRecord() for rank in range(self.world_size)}
        self._counts = ReportCounts(self.world_size)
        """Of the ranks that checkpoints wait for."""
        if self._declared is not None:
            for rank, record in self._ranks.items():
                record.brings = self._declared == "all" or rank in self._declared
                if not record.brings:
                    self._counts.remove(rank)
        else:
            for rank in self.silent:
                self._ranks[rank].silent = True
                self._counts.remove(rank)
        self._absent = dict.fromkeys(range(self.world_size), _STARTING)
        """The ranks that are not in train_func, or wait for the files of a checkpoint, and why."""
        self._entered_at = -math.inf
        """When a rank without a report last entered train_func, or continued there."""
        self._first_report_at = self._first_part_at = math.inf
        self._reported_at = -math.inf
        """When the last report came."""
        self._held_since: float | None = None
        """Since when files of some part wait for ranks that are behind."""
        self._metrics_of_rank_0: deque[tuple[int, bytes]] = deque(maxlen=_MOST_METRICS)
        """The latest ones as JSON, with the number of the report."""
        self._pending: dict[int, _Pending] = {}
        self._settled = self._committed = 0
        """The highest ordinal that was committed or dropped, and that was committed."""
        self._committing: set[int] = set()
        """The ordinals of checkpoints that are being committed."""
        self._ticked_at = -math.inf
        self._warnings: set[str] = set()

    # -- events ---------------------------------------------------------------------------------------------------

    def running(self, rank: int, now: float) -> list[Action]:
        """Note that the rank is in train_func, or that it continues there with the files for which it has waited."""
        self._absent.pop(rank, None)
        if not self._ranks[rank].last_index:
            self._entered_at = now
        return self.tick(now)

    def fetching(self, rank: int) -> None:
        """Note that the rank waits for the files of a checkpoint. It is not written off meanwhile."""
        self._absent[rank] = _FETCHING

    def reported(self, report: wire.Reported, now: float) -> list[Action]:
        """Handle one call of report().

        Files that are in place are listed when every rank has reported the directory. A rank that has written files
        into memory writes no others there until this checkpoint is settled, or :class:`Proceed` arrives.
        """
        rank, index = report.rank, report.index
        self._note_report(rank, index, now)
        if rank == 0:
            self._metrics_of_rank_0.append((index, report.body))
        actions: list[Action] = []
        if report.has_checkpoint:
            if self._declared is not None and not self._ranks[rank].brings:
                return [Refuse(rank, index, self._not_declared(rank))]
            self._note_bringing(rank, index)
            if index <= self._committed:
                return [Refuse(rank, index, self._too_late(rank)), *self.tick(now)]
            if self._is_settled(index):
                return [Drop(index), *self.tick(now)]
            in_place = report.folder if report.in_place else ""
            part = _Part(now, frozenset(report.files), report.body, in_place, report.in_memory)
            actions = self._add_part(rank, index, part, report.name)
        return [*actions, *self.tick(now)]

    def failed(self, rank: int, index: int, why: str, now: float, *, has_checkpoint: bool) -> list[Action]:
        """Handle a call of report() that has raised: only its checkpoint is dropped."""
        self._note_report(rank, index, now)
        if has_checkpoint and (self._declared is None or self._ranks[rank].brings):
            self._note_bringing(rank, index)
            self._miss_part(rank, index, why, now)
            if index in self._pending:
                self._pending[index].is_wanted = True
        return self.tick(now)

    def _miss_part(self, rank: int, ordinal: int, why: str, now: float) -> None:
        """Note that a part is missing, or may be."""
        if not self._is_settled(ordinal):
            pending = self._pending.setdefault(ordinal, _Pending())
            pending.last_at = now
            pending.problem = pending.problem or f", as report() has failed on rank {rank}: {why}"

    def _note_report(self, rank: int, index: int, now: float) -> None:
        record = self._ranks[rank]
        for missed in range(record.last_index + 1, index) if self._declared is None or record.brings else ():
            self._miss_part(rank, missed, "an exception came before it was sent", now)
        record.last_index, record.reported_at = index, now
        self._reported_at = now
        self._first_report_at = min(self._first_report_at, now)
        if record.silent and index > self._settled:  # it has caught up
            record.silent = False
            self._counts.set(rank, index)
        elif rank in self._counts:
            self._counts.set(rank, index)

    def _note_bringing(self, rank: int, index: int) -> None:
        record = self._ranks[rank]
        record.brings, record.silent = True, False
        self._counts.set(rank, index)

    def _add_part(self, rank: int, ordinal: int, part: _Part, name: str | None) -> list[Action]:
        actions = self._supersede(rank, ordinal) if part.in_memory else []
        self._first_part_at = min(self._first_part_at, part.reported_at)
        pending = self._pending.setdefault(ordinal, _Pending())
        pending.last_at, pending.is_wanted = part.reported_at, True
        pending.supersedes |= bool(actions)
        pending.parts[rank] = part
        folders = _folders_of(part.files)
        clash = pending.other_name(rank, name) or pending.clash(rank, part.files, folders)
        if clash is not None:
            self._cannot_store(pending, rank, clash)
            return [*actions, Refuse(rank, ordinal, f"{self.name(ordinal)}: {clash}")]
        pending.unstored.add(rank)
        pending.add_files(rank, part, folders)
        if part.in_memory:
            pending.in_memory.add(rank)
        if part.in_place:
            pending.in_place.add(rank)
        else:
            pending.patient[rank] = part
            if not part.own or rank < pending.undecided:
                pending.make_ready(rank)
        return actions

    def _supersede(self, rank: int, ordinal: int) -> list[Action]:
        """Drop the earlier checkpoints that the rank has in memory: it was allowed to proceed."""
        older = []
        for earlier, pending in sorted(self._pending.items()):
            part = pending.parts.get(rank)
            if earlier < ordinal and part is not None and part.in_memory and pending.problem is None:
                older.append(earlier)
                self._settle(earlier)
        return [Drop(earlier) for earlier in older]

    def _cannot_store(self, pending: _Pending, rank: int, why: str) -> None:
        pending.problem = pending.problem or f", as rank {rank} could not store its part: {why}"

    def stored(self, answer: wire.FilesCopied, now: float) -> list[Action]:
        """Handle the end of :class:`RequestFiles`: the files are on disk, or (``failed``) cannot be stored."""
        pending, rank, failed = self._pending.get(answer.ordinal), answer.rank, answer.failed
        if pending is None or rank not in pending.parts:
            return self.tick(now)  # it was refused, and an exception ended report() before the refusal arrived
        part = pending.parts[rank]
        stored = tuple((str(p), int(s), int(c)) for p, s, c in answer.files)
        if failed is None and part.stored and not set(stored) <= set(part.stored):
            failed = "its files were damaged in memory"
        part.stored, part.skipped = stored, tuple((str(p), int(s), int(c)) for p, s, c in answer.skipped)
        pending.note_stored(rank)
        if failed is not None:
            self._cannot_store(pending, rank, failed)
        return self.tick(now)

    def committed(self, ordinal: int, now: float) -> list[Action]:
        """Note that a checkpoint is committed."""
        self._committing.discard(ordinal)
        return self.tick(now)

    def finished(self, rank: int, now: float) -> list[Action]:
        """Note that the rank has done its work and will not report again."""
        self._ranks[rank].silent = False
        self._counts.remove(rank)
        return self.tick(now)

    def ended(self, rank: int) -> None:
        """Note that the rank's process has ended. Nobody knows what it would have reported, however long they wait."""
        self._absent[rank] = _ENDED

    def close(self, now: float) -> list[Action]:
        """End the attempt: no rank will report again. Say which checkpoints are lost because they may lack ranks."""
        for rank in self._ranks:
            self.ended(rank)
        return [*self.tick(now), *self._describe_dropped()]

    def tick(self, now: float) -> list[Action]:
        """Decide everything that can be decided by now."""
        self._ticked_at = now
        actions = [*self._write_off(now), *self._order_files(now)]
        while (settled := self._settle_next(now)) is not None:
            actions += [*settled, *self._order_files(now)]
        return actions

    def deadline(self) -> float | None:
        """Return when :meth:`tick` may decide more if nothing else happens; in the past if that is overdue."""
        if not self._pending:
            return None
        missing_s, held_since = self.config.missing_rank_s, self._held_since
        moments = [self._pending[min(self._pending)].last_at + missing_s]
        moments += [pending.since + missing_s for pending in self._pending.values()]
        if self._counts.ranks_with(0):
            moments += [max(self._first_part_at, self._entered_at) + missing_s, self.head_start_ends]
        if held_since is not None:
            moments += [held_since + missing_s, self._reported_at + missing_s]
        for pending in self._pending.values():
            if pending.patient:
                moments.append(next(iter(pending.patient.values())).reported_at + PATIENCE_S)
        return min((moment for moment in moments if moment > self._ticked_at), default=None)

    # -- questions ------------------------------------------------------------------------------------------------

    def awaits(self, ranks: Collection[int]) -> bool:
        """Return whether a part of one of these ranks is not stored yet."""
        return any(not pending.unstored.isdisjoint(ranks) for pending in self._pending.values())

    def awaits_only(self, uploads: Collection[tuple[int, int]]) -> bool:
        """Return whether the next checkpoint can be committed as soon as these uploads (rank, ordinal) are done."""
        if not self._pending:
            return False
        ordinal = min(self._pending)
        unstored = self._pending[ordinal].unstored
        return bool(unstored) and self._has_all_parts(ordinal) and all((rank, ordinal) in uploads for rank in unstored)

    @property
    def has_reports(self) -> bool:
        """True once a rank has reported."""
        return any(record.last_index for record in self._ranks.values())

    def reports_of(self, rank: int) -> int:
        """Return how many reports a rank has made."""
        return self._ranks[rank].last_index

    def fewest_reports(self) -> tuple[float, float]:
        """Return how many reports the slowest rank has made, among those that may still report checkpoints.

        The second number leaves out ranks that have never reported.
        """
        return self._counts.fewest, self._counts.fewest_above(0)

    @property
    def head_start_ends(self) -> float:
        """When ranks that are ahead stop waiting for those that never reported; infinite while these are starting."""
        if self._counts.ranks_with(0).isdisjoint(self._absent):
            return max(self._first_report_at, self._entered_at) + HEAD_START_S
        return math.inf

    def write_off_laggards(self, reports: int) -> list[Action]:
        """Stop waiting for ranks with fewer reports that have never had a checkpoint, until they catch up.

        Ranks that start, or wait for files, are still waited for.
        """
        behind = [made for made in self._counts.numbers if made < reports]
        ranks = [rank for made in behind for rank in self._counts.ranks_with(made)]
        return self._stop_waiting_for(
            [rank for rank in ranks if not self._ranks[rank].brings and rank not in self._absent]
        )

    def storing(self, failed: Collection[int], uploads: Collection[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        """Return the parts (rank, ordinal) that ranks store themselves, of checkpoints that can do without ``failed``.

        Such a checkpoint needs nothing more from the failed ranks. Parts that uploaders store are left out: they are
        stored also when the ranks are gone.
        """
        found: set[tuple[int, int]] = set()
        for ordinal, pending in sorted(self._pending.items()):
            storing = {rank for rank in pending.unstored if not pending.parts[rank].in_place}
            storing -= {rank for rank, number in uploads if number == ordinal}
            needed = any(not self._is_decided(rank, ordinal) for rank in failed)
            if needed or not storing.isdisjoint(failed) or pending.problem is not None:
                break
            found |= {(rank, ordinal) for rank in storing}
        return frozenset(found)

    def expected(self, failed: Collection[int], uploads: Collection[tuple[int, int]], now: float) -> dict[int, int]:
        """Return the ranks that have made fewer reports than all ``failed`` ones, and how many each has made.

        These are only ranks that have had a checkpoint, that a checkpoint waits for, or that have never reported and
        have not had ``missing_rank_s`` to do so.
        """
        is_new = now < max(self._first_report_at, self._entered_at) + self.config.missing_rank_s
        least = min((self._reports_made(rank, uploads) for rank in failed), default=0)
        return {
            rank: made
            for made in self._counts.numbers
            if made < least
            for rank in self._counts.ranks_with(made)
            if rank not in failed
            and self._absent.get(rank) != _ENDED
            and (self._ranks[rank].brings or (self._pending if made else is_new))
        }

    def time_for(self, expected: Collection[int]) -> float:
        """Return for how long these ranks are waited for; not long if they may be ranks that never report."""
        is_sure = self._pending or any(rank == 0 or self._ranks[rank].brings for rank in expected)
        return self.config.missing_rank_s if is_sure else min(_NEWCOMER_S, self.config.missing_rank_s)

    def _reports_made(self, rank: int, uploads: Collection[tuple[int, int]]) -> int:
        """Return how many reports need nothing more from the rank."""
        unfinished = [
            ordinal - 1
            for ordinal, pending in self._pending.items()
            if rank in pending.unstored and (rank, ordinal) not in uploads
        ]
        return min([self._ranks[rank].last_index, *unfinished])

    # -- ranks that are not waited for ----------------------------------------------------------------------------

    def _is_decided(self, rank: int, ordinal: int) -> bool:
        """Return whether the rank has reported its part, or won't report one."""
        return rank not in self._counts or self._ranks[rank].last_index >= ordinal

    def _has_all_parts(self, ordinal: int) -> bool:
        """Return whether no rank may still report a part."""
        return self._counts.fewest >= ordinal

    def _write_off(self, now: float) -> list[Action]:
        """Stop waiting for ranks that have had ``missing_rank_s`` to report, until they catch up or have a checkpoint.

        These are ranks that have never reported, and ranks without a checkpoint that are far behind the others.
        """
        if self._declared is not None or not self._pending:
            return []
        missing_s, newcomers = self.config.missing_rank_s, self._counts.ranks_with(0)
        silent: list[int] = []
        if newcomers.isdisjoint(self._absent) and now >= max(self._first_part_at, self._entered_at) + missing_s:
            silent += newcomers
        if self._held_since is not None and now >= self._held_since + missing_s:
            behind = [made for made in self._counts.numbers if 0 < made < min(self._pending)]
            records = {rank: self._ranks[rank] for made in behind for rank in self._counts.ranks_with(made)}
            silent += [
                rank
                for rank, record in records.items()
                if not record.brings and rank not in self._absent and now >= record.reported_at + missing_s
            ]
        return self._stop_waiting_for(silent)

    def _stop_waiting_for(self, ranks: Sequence[int]) -> list[Action]:
        if not ranks:
            return []
        for rank in ranks:
            self._ranks[rank].silent = True
            self._counts.remove(rank)
        return self._warn_once(
            "silent",
            f"checkpoints are committed without {name_ranks(ranks)}: no report from "
            f"{'it' if len(ranks) == 1 else 'them'} within {self.config.missing_rank_s:g} s "
            f"(CheckpointConfig.missing_rank_s). {_SAY_IT}",
        )

    # -- which rank copies which files ----------------------------------------------------------------------------

    def _order_files(self, now: float) -> list[Action]:
        actions: list[Action] = []
        uncommitted = committing = len(self._committing)
        is_held = False
        for ordinal, pending in sorted(self._pending.items()):
            uncommitted += not self._has_all_parts(ordinal)
            waits = self._waits_for_others(ordinal, pending, now)
            self._pass_decided(ordinal, pending)
            pending.end_patience(now)
            if uncommitted <= MOST_UNCOMMITTED or not (waits or committing > MOST_UNCOMMITTED):
                actions += pending.order_ready(ordinal)
            if pending.in_place and self._has_all_parts(ordinal):
                actions += self._order_in_place(ordinal, pending)
            if not (waits or pending.unstored or self._has_all_parts(ordinal)):
                actions += [Proceed(rank, ordinal) for rank in sorted(pending.in_memory)]
                pending.in_memory.clear()
            is_held |= waits and bool(pending.ready or (pending.supersedes and pending.in_memory))
        if not is_held:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = now
        return actions

    def _waits_for_others(self, ordinal: int, pending: _Pending, now: float) -> bool:
        """Return whether ranks that are far ahead wait with their parts for the others."""
        behind = self._counts.fewest_above(0) < ordinal
        return now < pending.since + self.config.missing_rank_s and (behind or now < self.head_start_ends)

    def _pass_decided(self, ordinal: int, pending: _Pending) -> None:
        """Move the cursor to the lowest rank that may still report a part. Lower ranks wait for no others."""
        while pending.undecided < len(self._ranks) and self._is_decided(pending.undecided, ordinal):
            pending.make_ready(pending.undecided)
            pending.undecided += 1

    def _order_in_place(self, ordinal: int, pending: _Pending) -> list[Action]:
        """Have the host of the lowest rank list the files of all ranks."""
        ranks, pending.in_place = pending.in_place, set()
        lowest = min(ranks)
        if pending.lister is not None and pending.lister < lowest:
            pending.unstored -= ranks
            return []
        pending.lister = lowest
        pending.unstored -= ranks - {lowest}
        return [RequestFiles(lowest, ordinal, ())]

    # -- when to commit -------------------------------------------------------------------------------------------

    def _settle(self, ordinal: int) -> None:
        del self._pending[ordinal]
        self._settled = max(self._settled, ordinal)

    def _is_settled(self, ordinal: int) -> bool:
        """Return whether a checkpoint is committed or dropped. An earlier one may still be pending."""
        return ordinal <= self._settled and ordinal not in self._pending

    def _settle_next(self, now: float) -> list[Action] | None:
        """Commit or drop the next checkpoint. Return None if it has to wait."""
        if not self._pending:
            return None
        ordinal = min(self._pending)
        pending = self._pending[ordinal]
        if not self._has_all_parts(ordinal):
            return self._warn_of_missing(ordinal, pending, now) or None
        if pending.unstored:
            return None
        in_memory = [rank for rank, part in sorted(pending.parts.items()) if part.in_memory]
        if in_memory and len(in_memory) < len(pending.parts) and pending.problem is None:
            return self._store_from_memory(ordinal, pending, in_memory)
        self._settle(ordinal)
        if not pending.is_wanted:
            return []
        if (problem := pending.problem or _mixed_directories(pending.parts)) is not None:
            return [ShowLine(f"{self.name(ordinal)} is dropped{problem}"), Drop(ordinal)]
        self._committed = ordinal
        self._committing.add(ordinal)
        commit = self._commit(ordinal, pending.parts)
        return [*self._warn_of_differences(pending.parts, commit.files), commit]

    def _store_from_memory(self, ordinal: int, pending: _Pending, ranks: Sequence[int]) -> list[Action]:
        """Have parts in memory stored like those of the other ranks."""
        actions: list[Action] = []
        for rank in ranks:
            part = pending.parts[rank]
            part.in_memory = False
            pending.unstored.add(rank)
            actions.append(RequestFiles(rank, ordinal, tuple(sorted(part.own)), from_memory=True))
        return actions

    def _commit(self, ordinal: int, parts: Mapping[int, _Part]) -> Commit:
        files: dict[str, CommittedFile] = {}
        for rank in sorted(parts):
            for path, size, crc32 in parts[rank].stored:
                files.setdefault(path, CommittedFile(path, rank, size, crc32))
        metrics = json.loads(dict(self._metrics_of_rank_0).get(ordinal) or parts[min(parts)].body)
        silent = tuple(rank for rank, record in self._ranks.items() if rank not in parts and record.silent)
        chosen = tuple(files[path] for path in sorted(files))
        return Commit(ordinal, chosen, tuple(sorted(parts)), metrics, world_size=len(self._ranks), silent=silent)

    def name(self, ordinal: int) -> str:
        """Return the words for a checkpoint that has no name yet."""
        return f"the checkpoint of report {self.before + ordinal}"

    # -- warnings -------------------------------------------------------------------------------------------------

    def _warn_once(self, key: str, text: str) -> list[Action]:
        if key in self._warnings:
            return []
        self._warnings.add(key)
        return [ShowLine(text)]

    def _missing(self, ordinal: int) -> list[int]:
        """Return the ranks that may still report a part. This looks at all ranks."""
        return [rank for rank in self._ranks if not self._is_decided(rank, ordinal)]

    def _warn_of_missing(self, ordinal: int, pending: _Pending, now: float) -> list[Action]:
        if "missing" in self._warnings or now < pending.last_at + self.config.missing_rank_s or not pending.is_wanted:
            return []
        missing = set(self._missing(ordinal))
        is_new = self._declared is None and missing <= self._counts.ranks_with(0) and missing.isdisjoint(self._absent)
        if is_new or all(self._absent.get(rank) == _ENDED for rank in missing):
            return []  # they are written off before long, or the attempt ends
        return self._warn_once(
            "missing",
            f"{self.name(ordinal)} of {name_ranks(pending.parts)} is not complete: "
            f"{self._describe_missing(sorted(missing))}. It will be committed once they make that report or finish.",
        )

    def _describe_missing(self, missing: Sequence[int]) -> str:
        """Return what keeps a checkpoint from being committed."""
        if fetching := [rank for rank in missing if self._absent.get(rank) == _FETCHING]:
            return f"{ranks_have(fetching)} not got the files of a checkpoint yet"
        if starting := [rank for rank in missing if rank in self._absent]:
            return f"{ranks_have(starting)} not entered train_func"
        if silent := [rank for rank in missing if not self._ranks[rank].last_index]:
            return f"{ranks_have(silent)} not called report() yet"
        slowest = min(missing, key=lambda rank: self._ranks[rank].last_index)
        return f"{ranks_have([slowest])} made only {count(self._ranks[slowest].last_index, 'report')}. {_SAY_IT}"

    def _describe_dropped(self) -> list[Action]:
        """Say which checkpoints of an attempt that has ended may lack ranks that had not reported one yet."""
        wanted = [ordinal for ordinal, pending in sorted(self._pending.items()) if pending.is_wanted]
        missing = [rank for rank in self._missing(wanted[0]) if not self._ranks[rank].brings] if wanted else []
        if not missing:
            return []
        first, last = self.before + wanted[0], self.before + wanted[-1]
        which = f"{self.name(wanted[0])} is" if last == first else f"the checkpoints of reports {first} to {last} are"
        return [
            ShowLine(
                f"{which} dropped: the attempt ended before {name_ranks(missing)} made that report, so files "
                f"may be missing. {_SAY_IT}"
            )
        ]

    def _warn_of_differences(self, parts: Mapping[int, _Part], files: Iterable[CommittedFile]) -> list[Action]:
        kept = {file.path: (file.size, file.crc32) for file in files}
        for rank in sorted(parts):
            for path, size, crc32 in (*parts[rank].skipped, *parts[rank].stored):
                if not path.endswith(self.incomparable) and kept.get(path, (size, crc32)) != (size, crc32):
                    return self._warn_once(
                        "different",
                        f"ranks reported different contents for the checkpoint file {path!r}; the lowest rank's is "
                        "kept. Put the rank into the file name to keep each rank's own.",
                    )
        return []

    def _not_declared(self, rank: int) -> str:
        assert not isinstance(self._declared, str | None)
        named = name_ranks(self._declared)
        return (
            f"rank {rank} reported a checkpoint, but CheckpointConfig.checkpoint_ranks names only {named}; add this "
            "rank there, or report its metrics alone"
        )

    def _too_late(self, rank: int) -> str:
        return (
            f"a checkpoint was committed without rank {rank}, which had not called report() as often as the others. "
            "Ranks that save checkpoints must call it equally often; raise "
            f"CheckpointConfig.missing_rank_s (now {self.config.missing_rank_s:g} s) if this rank is just slow"
        )


def _folders_of(files: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in files:
        folder = path.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found


def _mixed_directories(parts: Mapping[int, _Part]) -> str | None:
    """Return the rest of the sentence "the checkpoint … is dropped" if the ranks do not agree on one directory."""
    if len({part.in_place for part in parts.values()}) == 1:
        return None
    directories = ", ".join(f"{part.in_place or 'files to copy'} (rank {rank})" for rank, part in sorted(parts.items()))
    return (
        ": with CheckpointUploadMode.NO_UPLOAD, and with a checkpoint_upload_fn, all ranks that report one must name "
        f"the same directory, and not {directories}"
    )
