"""Reports of N ranks -> checkpoints: which rank copies which files, and when to commit. Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument.

The n-th checkpoint of a rank in an attempt has the *ordinal* n. Checkpoints of different ranks belong together if
their ordinals are equal. If several ranks report a file of the same name, that of the lowest rank is kept.

An event of one rank never looks at all other ranks. Instead, each checkpoint has cursors, which pass every rank once.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.decisions.events import ShowLine
from distrain.decisions.report_rows import ReportCounts
from distrain.storage.commit import Commit, CommittedFile
from distrain.system.text import name_ranks, ranks_have

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distrain.api.config import CheckpointConfig

PATIENCE_S = 1.0
"""Seconds for which the files of a rank wait for lower ranks, which may report the same ones. This saves copying them
twice; it never decides which are kept."""

_SAY_IT = "If only some ranks save checkpoints, name them: CheckpointConfig(checkpoint_ranks=[0])"
"""The cure for waiting for ranks that never report a checkpoint."""

# -- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestFiles:
    """Have these files of a rank's checkpoint stored, by the rank itself or by the uploader of its host.

    They replace files of the same names that a higher rank has stored, which has not waited for this rank long enough.
    """

    rank: int
    ordinal: int
    files: tuple[str, ...]


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


Action = RequestFiles | Refuse | Commit | Drop | ShowLine


# -- state ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Part:
    """The files that one rank reports for one ordinal."""

    index: int
    """The number of the report that it came with."""
    reported_at: float
    files: frozenset[str]
    metrics: dict[str, Any]
    in_place: str
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
    index: int = 0
    """The largest index of a report that has a part."""
    latest: int = 0
    """The largest index of any report of the ranks that have reported a part."""
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
    failed: set[int] = field(default_factory=set)
    """Ranks whose report() has failed, so that they report nothing although they should."""
    in_step: set[int] = field(default_factory=set)
    """Ranks that have made the same report without a checkpoint, or the next one, or as many as one that has it."""
    undecided: int = 0
    """A cursor: every lower rank has reported its part, or has been seen to report nothing."""
    problem: str | None = None
    """Why a part is missing: the rest of the sentence "checkpoint_000001 is dropped"."""

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
        """Let a part wait no longer for lower ranks."""
        if self.patient.pop(rank, None) is not None:
            self.ready.add(rank)

    def order_ready(self, ordinal: int) -> list[Action]:
        """Order the files of ready ranks that no lower rank has reported, unless another rank stores some of them now.

        If two ranks stored a file of one name at the same time, the bytes of either could be the last ones.
        """
        ready, self.ready = sorted(self.ready), set()
        actions: list[Action] = []
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
    brings: bool | None = None
    """True once the rank has reported a part, or if the user says that it does. False if nobody waits for it: the user
    says that it reports nothing, or a checkpoint was committed without it, in this attempt or before. Else None."""
    silent: bool = False
    """True if ``brings`` is False only because the rank had not reported in time."""
    last_index: int = 0
    last_ordinal: int = 0
    running_since: float | None = None
    """When the rank entered train_func, or continued after it had waited for the files of a checkpoint."""
    is_fetching: bool = False
    finished: bool = False
    ended: bool = False
    """True if the rank's process has ended before train_func did."""


class CheckpointAssembly:
    """The checkpoints of one attempt, joined from the parts of its ranks.

    incomparable: endings of file names whose bytes differ although their contents are the same.
    absent: the ranks without a part in the latest checkpoint that as many ranks have made in an earlier attempt.
    silent: those of them that had just not reported in time.
    number: that of the first checkpoint over the whole run, as in the name of its directory.
    """

    def __init__(
        self,
        world_size: int,
        config: CheckpointConfig,
        *,
        incomparable: Collection[str] = (),
        absent: Collection[int] = (),
        silent: Collection[int] = (),
        number: int = 0,
    ) -> None:
        self._number = number
        self._incomparable = tuple(incomparable)
        self._world_size = world_size
        self._declared = config.checkpoint_ranks
        self._ranks = {rank: _RankRecord(brings=self._is_declared(rank)) for rank in range(world_size)}
        if self._declared is None:
            for rank in absent:
                self._ranks[rank].brings, self._ranks[rank].silent = False, rank in silent
        self._counts = ReportCounts(world_size)
        """Of the ranks that are neither finished nor known to report nothing."""
        self._bringing = ReportCounts(0)
        """Of the ranks that report checkpoints; rank 0 among them until it is known that it does not."""
        for rank, record in self._ranks.items():
            if record.brings is False:
                self._counts.remove(rank)
            elif record.brings or rank == 0:
                self._bringing.set(rank, 0)
        self._metrics_of_rank_0: dict[str, Any] = {}
        self._missing_rank_s = config.missing_rank_s
        self._pending: dict[int, _Pending] = {}
        self._entered: deque[tuple[float, int]] = deque()
        """When ranks have entered train_func that may have never reported."""
        self._settled_ordinal = 0
        self._ticked_at = -math.inf
        self._warnings: set[str] = set()

    def _is_declared(self, rank: int) -> bool | None:
        """Return whether the rank reports checkpoints as the user says, None if the user does not say it."""
        return None if self._declared is None else self._declared == "all" or rank in self._declared

    # -- events ---------------------------------------------------------------------------------------------------

    def running(self, rank: int, now: float) -> list[Action]:
        """Note that the rank has entered train_func."""
        self._ranks[rank].running_since = now
        self._entered.append((now, rank))
        return self.tick(now)

    def fetching(self, rank: int) -> None:
        """Note that the rank waits for the files of a checkpoint. It is not written off meanwhile."""
        self._ranks[rank].is_fetching = True

    def fetched(self, rank: int, now: float) -> list[Action]:
        """Note that the rank continues: its time for a first report begins."""
        self._ranks[rank].is_fetching = False
        return self.running(rank, now)

    def reported(
        self,
        rank: int,
        index: int,
        metrics: dict[str, Any],
        ordinal: int | None,
        files: Iterable[str],
        now: float,
        in_place: str = "",
        name: str | None = None,
    ) -> list[Action]:
        """Handle one call of report(); ``index`` counts the calls of the rank from 1.

        name: the name that the rank gives to the checkpoint's directory.
        in_place: the directory of the run directory that the ranks have filled themselves; empty if ``files`` are to be
            copied. Its files are listed when every rank has reported it.
        """
        self._note_report(rank, index)
        if rank == 0:
            self._metrics_of_rank_0 = metrics
        refusals: list[Action] = []
        if ordinal is not None:
            if self._is_declared(rank) is False:
                return [Refuse(rank, ordinal, self._not_declared(rank))]
            if ordinal <= self._settled_ordinal:
                return [Refuse(rank, ordinal, self._too_late(rank, ordinal))]
            refusals = self._add_part(rank, ordinal, _Part(index, now, frozenset(files), metrics, in_place), name)
        return [*refusals, *self.tick(now)]

    def failed(self, rank: int, index: int, ordinal: int | None, why: str, now: float) -> list[Action]:
        """Handle a call of report() that has raised: the n-th checkpoint is dropped, and the next one is the n+1-th."""
        self._note_report(rank, index)
        if ordinal is not None and self._is_declared(rank) is not False:
            self._miss_part(rank, ordinal, why, now)
        return self.tick(now)

    def _miss_part(self, rank: int, ordinal: int, why: str, now: float) -> None:
        """Note that the rank does not report this part, which it should, nor those before that it has left out."""
        record = self._ranks[rank]
        for missed in range(max(record.last_ordinal, self._settled_ordinal) + 1, ordinal + 1):
            pending = self._pending.setdefault(missed, _Pending())
            pending.last_at = now
            pending.failed.add(rank)
            pending.problem = pending.problem or f", as report() has failed on rank {rank}: {why}"
        record.last_ordinal, record.brings, record.silent = ordinal, True, False
        self._bringing.set(rank, record.last_index)

    def _note_report(self, rank: int, index: int) -> None:
        record = self._ranks[rank]
        record.last_index = index
        if rank in self._bringing:
            self._bringing.set(rank, index)
        if rank in self._counts:
            self._counts.set(rank, index)
        for pending in self._pending.values():
            if rank in pending.parts and index > pending.latest:
                self._note_in_step(pending, index)
            elif not record.last_ordinal and index - pending.index in (0, 1):
                pending.in_step.add(rank)

    def _note_in_step(self, pending: _Pending, index: int) -> None:
        """Note which ranks are in step with one that reports a part, and has made its report of this index."""
        pending.latest = max(pending.latest, index)
        pending.in_step |= self._counts.ranks_with(index) | self._counts.ranks_with(index + 1)

    def _add_part(self, rank: int, ordinal: int, part: _Part, name: str | None) -> list[Action]:
        record = self._ranks[rank]
        self._miss_part(rank, ordinal - 1, "an exception came before it was sent", part.reported_at)
        record.last_ordinal = ordinal
        self._counts.set(rank, record.last_index)
        pending = self._pending.setdefault(ordinal, _Pending())
        pending.last_at = part.reported_at
        pending.parts[rank] = part
        if part.index > pending.index:
            pending.index = part.index
            self._note_in_step(pending, part.index)
        folders = _folders_of(part.files)
        clash = pending.other_name(rank, name) or pending.clash(rank, part.files, folders)
        if clash is not None:
            self._cannot_store(pending, rank, clash)
            return [Refuse(rank, ordinal, f"{self.name(ordinal)}: {clash}")]
        pending.unstored.add(rank)
        pending.add_files(rank, part, folders)
        if part.in_place:
            pending.in_place.add(rank)
        else:
            pending.patient[rank] = part
            if not part.own or rank < pending.undecided:
                pending.make_ready(rank)
        return []

    def _cannot_store(self, pending: _Pending, rank: int, why: str) -> None:
        pending.problem = pending.problem or f", as rank {rank} could not store its part: {why}"

    def stored(
        self,
        rank: int,
        ordinal: int,
        files: Sequence[Sequence[Any]],
        skipped: Sequence[Sequence[Any]],
        now: float,
        failed: str | None = None,
    ) -> list[Action]:
        """Handle the end of :class:`RequestFiles`: the files are on disk, or (``failed``) cannot be stored.

        files, skipped: path, size and crc32 of the files that were stored, and of those that a lower rank reports.
        """
        pending = self._pending.get(ordinal)
        if pending is None or rank not in pending.parts:
            return self.tick(now)  # it was refused, and an exception ended report() before the refusal arrived
        part = pending.parts[rank]
        part.stored = tuple((str(p), int(s), int(c)) for p, s, c in files)
        part.skipped = tuple((str(p), int(s), int(c)) for p, s, c in skipped)
        pending.note_stored(rank)
        if failed is not None:
            self._cannot_store(pending, rank, failed)
        return self.tick(now)

    def finished(self, rank: int, now: float) -> list[Action]:
        """Note that the rank has done its work and will not report again."""
        self._ranks[rank].finished = True
        self._counts.remove(rank)
        self._bringing.remove(rank)
        return self.tick(now)

    def ended(self, rank: int) -> None:
        """Note that the rank's process has ended. Nobody knows what it would have reported, however long they wait."""
        self._ranks[rank].ended = True
        self._bringing.remove(rank)

    def close(self, now: float) -> list[Action]:
        """End the attempt: no rank will report again. Say which checkpoints are lost because they may lack ranks."""
        for rank in self._ranks:
            self.ended(rank)
        return [*self.tick(now), *self._describe_dropped(now)]

    def tick(self, now: float) -> list[Action]:
        """Decide everything that can be decided by now."""
        self._ticked_at = now
        actions = self._order_files(now)
        while (settled := self._settle_next(now)) is not None:
            actions += [*settled, *self._order_files(now)]
        return actions

    def deadline(self) -> float | None:
        """Return when :meth:`tick` may decide more if nothing else happens; in the past if that is overdue."""
        if not self._pending:
            return None
        moments = []
        for pending in self._pending.values():
            moments.append(pending.last_at + self._missing_rank_s)
            if pending.patient:
                moments.append(next(iter(pending.patient.values())).reported_at + PATIENCE_S)
        while self._entered and self._is_over(*self._entered[0]):
            self._entered.popleft()
        if self._entered:
            moments.append(self._entered[0][0] + self._missing_rank_s)
        return min((moment for moment in moments if moment > self._ticked_at), default=None)

    def _is_over(self, entered: float, rank: int) -> bool:
        """Return whether nothing still waits for the first checkpoint of a rank."""
        record = self._ranks[rank]
        is_known = record.brings is not None or record.finished or record.ended
        return is_known or entered + self._missing_rank_s <= self._ticked_at

    # -- questions ------------------------------------------------------------------------------------------------

    def awaits(self, ranks: Collection[int]) -> bool:
        """Return whether a part of one of these ranks is not stored yet."""
        return any(not pending.unstored.isdisjoint(ranks) for pending in self._pending.values())

    def awaits_only(self, uploads: Collection[tuple[int, int]], now: float) -> bool:
        """Return whether the next checkpoint can be committed as soon as these uploads (rank, ordinal) are done."""
        ordinal = self._settled_ordinal + 1
        pending = self._pending.get(ordinal)
        return (
            pending is not None
            and bool(pending.unstored)
            and all((rank, ordinal) in uploads for rank in pending.unstored)
            and self._has_all_parts(pending, now)
        )

    def fewest_reports(self) -> float:
        """Return how many reports the slowest rank has made, of those that may still report checkpoints."""
        return self._counts.fewest

    def fewest_reports_of_bringing(self, now: float) -> float:
        """Return how many reports the slowest of the ranks with checkpoints has made.

        Rank 0 is taken for one of them, but not if it has not reported within ``missing_rank_s``.
        """
        if 0 in self._bringing and not (self._ranks[0].brings or self._ranks[0].last_index):
            since = self._ranks[0].running_since
            if since is not None and now >= since + self._missing_rank_s:
                self._bringing.remove(0)
        return self._bringing.fewest

    def storing(
        self, failed: Collection[int], uploads: Collection[tuple[int, int]], now: float
    ) -> frozenset[tuple[int, int]]:
        """Return the parts (rank, ordinal) that ranks store themselves, of checkpoints that can do without ``failed``.

        Such a checkpoint needs nothing more from the failed ranks. Parts that uploaders store are left out: they are
        stored also when the ranks are gone.
        """
        found: set[tuple[int, int]] = set()
        ordinal = self._settled_ordinal + 1
        while pending := self._pending.get(ordinal):
            storing = {rank for rank in pending.unstored if not pending.parts[rank].in_place}
            storing -= {rank for rank, number in uploads if number == ordinal}
            needed = any(rank not in pending.parts and not self._brings_nothing(rank, pending, now) for rank in failed)
            if needed or not storing.isdisjoint(failed) or pending.problem is not None:
                break
            found |= {(rank, ordinal) for rank in storing}
            ordinal += 1
        return frozenset(found)

    def expected(self, failed: Collection[int], uploads: Collection[tuple[int, int]]) -> frozenset[int]:
        """Return the ranks that may still report a checkpoint in a report that all ``failed`` ranks have made.

        These are the ranks one or two reports behind that have reported one before, and rank 0 with its first report.
        """
        made = min((self._reports_made(rank, uploads) for rank in failed), default=0)
        behind = self._counts.ranks_with(made - 1) | self._counts.ranks_with(made - 2)
        return frozenset(rank for rank in behind if rank not in failed and self._may_bring_next(rank))

    def _may_bring_next(self, rank: int) -> bool:
        record = self._ranks[rank]
        is_first = rank == 0 and not record.last_index and record.running_since is not None
        return bool(record.last_ordinal) or is_first

    def _reports_made(self, rank: int, uploads: Collection[tuple[int, int]]) -> int:
        """Return how many reports need nothing more from the rank."""
        unfinished = [
            pending.parts[rank].index - 1
            for ordinal, pending in self._pending.items()
            if rank in pending.unstored and (rank, ordinal) not in uploads
        ]
        return min([self._ranks[rank].last_index, *unfinished])

    # -- which rank copies which files ----------------------------------------------------------------------------

    def _order_files(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for ordinal in sorted(self._pending):
            pending = self._pending[ordinal]
            self._pass_decided(pending, now)
            self._end_patience(pending, now)
            actions += pending.order_ready(ordinal)
            if pending.in_place and self._has_all_parts(pending, now):
                actions += self._order_in_place(ordinal, pending)
        return actions

    def _pass_decided(self, pending: _Pending, now: float) -> None:
        """Move the cursor to the lowest rank that may still report a part. Lower ranks wait for no others."""
        while pending.undecided < self._world_size and self._is_decided(pending.undecided, pending, now):
            pending.make_ready(pending.undecided)
            pending.undecided += 1

    def _end_patience(self, pending: _Pending, now: float) -> None:
        while pending.patient:
            rank, part = next(iter(pending.patient.items()))
            if now < part.reported_at + PATIENCE_S:
                return
            pending.make_ready(rank)

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

    def _is_decided(self, rank: int, pending: _Pending, now: float) -> bool:
        return rank in pending.parts or rank in pending.failed or self._brings_nothing(rank, pending, now)

    def _brings_nothing(self, rank: int, pending: _Pending, now: float) -> bool:
        """Return whether ``rank``, which has reported no part yet, will not report one.

        docs/checkpoints.md has the rule. A rank that has reported one before, or should by what the user says, reports
        the next one, too, or finishes.
        """
        record = self._ranks[rank]
        if record.finished or record.brings is not None:
            return record.finished or not record.brings
        return rank in pending.in_step or self._is_silent(record, pending, now)

    def _is_silent(self, record: _RankRecord, pending: _Pending, now: float) -> bool:
        """Return whether the rank has had ``missing_rank_s`` to report its part, in train_func."""
        since = record.running_since
        if since is None or record.is_fetching or record.ended:
            return False
        return self._waited_for_missing(pending, now) and now >= since + self._missing_rank_s

    def _waited_for_missing(self, pending: _Pending, now: float) -> bool:
        return now >= pending.last_at + self._missing_rank_s

    # -- when to commit -------------------------------------------------------------------------------------------

    def _settle_next(self, now: float) -> list[Action] | None:
        """Commit or drop the next checkpoint. Return None if it has to wait."""
        ordinal = self._settled_ordinal + 1
        pending = self._pending.get(ordinal)
        if pending is None or pending.unstored:
            return None
        if not self._has_all_parts(pending, now):
            return self._warn_of_missing(ordinal, pending, now) or None
        del self._pending[ordinal]
        self._settled_ordinal = ordinal
        silent = self._write_off(pending)
        if (problem := pending.problem or _mixed_directories(pending.parts)) is not None:
            return [ShowLine(f"{self.name(ordinal)} is dropped{problem}"), Drop(ordinal)]
        commit = self._commit(ordinal, pending.parts)
        return [
            *self._warn_of_silent(ordinal, silent),
            *self._warn_of_differences(pending.parts, commit.files),
            commit,
        ]

    def _has_all_parts(self, pending: _Pending, now: float) -> bool:
        """Return whether no rank may still report a part."""
        self._pass_decided(pending, now)
        if pending.undecided == self._world_size:  # a rank that was passed while it was silent may report after all
            pending.undecided = min(self._missing(pending, now), default=self._world_size)
        return pending.undecided == self._world_size

    def _missing(self, pending: _Pending, now: float) -> list[int]:
        """Return the ranks that may still report a part. This looks at all ranks."""
        return [rank for rank in range(self._world_size) if not self._is_decided(rank, pending, now)]

    def _write_off(self, pending: _Pending) -> list[int]:
        """Wait no longer for the ranks without a part, until they report one. Return those that were just silent."""
        newly_silent = []
        for rank in sorted(self._ranks.keys() - pending.parts.keys() - pending.failed):
            record = self._ranks[rank]
            if record.brings is None and not record.finished:
                record.brings, record.silent = False, rank not in pending.in_step
                newly_silent += [rank] if record.silent else []
            record.silent = record.silent and not (record.finished or rank in pending.in_step)
            self._counts.remove(rank)
            self._bringing.remove(rank)
        return newly_silent

    def _warn_of_silent(self, ordinal: int, ranks: Sequence[int]) -> list[Action]:
        if not ranks:
            return []
        return self._warn_once(
            "silent",
            f"{self.name(ordinal)} is committed without {name_ranks(ranks)}: no checkpoint from "
            f"{'it' if len(ranks) == 1 else 'them'} within {self._missing_rank_s:g} s "
            f"(CheckpointConfig.missing_rank_s). {_SAY_IT}",
        )

    def _commit(self, ordinal: int, parts: Mapping[int, _Part]) -> Commit:
        files: dict[str, CommittedFile] = {}
        for rank in sorted(parts):
            for path, size, crc32 in parts[rank].stored:
                files.setdefault(path, CommittedFile(path, rank, size, crc32))
        metrics = parts[0].metrics if 0 in parts else self._metrics_of_rank_0 or parts[min(parts)].metrics
        silent = tuple(rank for rank, record in self._ranks.items() if rank not in parts and record.silent)
        chosen = tuple(files[path] for path in sorted(files))
        return Commit(ordinal, chosen, tuple(sorted(parts)), metrics, world_size=self._world_size, silent=silent)

    def name(self, ordinal: int) -> str:
        """Return the name that a checkpoint has, or would have had, unless the user gives the names."""
        return f"checkpoint_{self._number + ordinal - 1:06d}"

    # -- warnings -------------------------------------------------------------------------------------------------

    def _warn_once(self, key: str, text: str) -> list[Action]:
        if key in self._warnings:
            return []
        self._warnings.add(key)
        return [ShowLine(text)]

    def _warn_of_missing(self, ordinal: int, pending: _Pending, now: float) -> list[Action]:
        if "missing" in self._warnings or not self._waited_for_missing(pending, now):
            return []
        if all(self._is_due(self._ranks[rank]) for rank in self._missing(pending, now)):
            return []  # they are silent before long, or have ended
        return self._warn_once(
            "missing",
            f"{self.name(ordinal)} of {name_ranks(pending.parts)} is not complete: "
            f"{self._describe_missing(pending, now)}. It will be committed when they report it or finish.",
        )

    @staticmethod
    def _is_due(record: _RankRecord) -> bool:
        is_slow = record.brings is None and record.running_since is not None and not record.is_fetching
        return is_slow or record.ended

    def _describe_missing(self, pending: _Pending, now: float) -> str:
        """Return what keeps a checkpoint from being committed."""
        missing = self._missing(pending, now)
        records = {rank: self._ranks[rank] for rank in missing}
        if fetching := [rank for rank, record in records.items() if record.is_fetching]:
            return f"{ranks_have(fetching)} to wait for the files of a checkpoint to read"
        if starting := [rank for rank, record in records.items() if record.running_since is None]:
            return f"{ranks_have(starting)} not entered train_func"
        if silent := [rank for rank, record in records.items() if not record.last_ordinal]:
            return f"{ranks_have(silent)} not reported one yet"
        return f"{name_ranks(missing)} reported earlier ones, but not this one"

    def _describe_dropped(self, now: float) -> list[Action]:
        """Say which checkpoints of an attempt that has ended may lack ranks that had not reported one yet."""
        first = self._settled_ordinal + 1
        if (pending := self._pending.get(first)) is None:
            return []
        missing = [rank for rank in self._missing(pending, now) if not self._ranks[rank].last_ordinal]
        if not missing:
            return []
        last = max(self._pending)
        which = f"{self.name(first)} is" if last == first else f"{self.name(first)} to {self.name(last)} are"
        return [
            ShowLine(
                f"{which} dropped: the attempt ended before {name_ranks(missing)} had reported one, so files "
                f"may be missing. {_SAY_IT}"
            )
        ]

    def _warn_of_differences(self, parts: Mapping[int, _Part], files: Iterable[CommittedFile]) -> list[Action]:
        kept = {file.path: (file.size, file.crc32) for file in files}
        for rank in sorted(parts):
            for path, size, crc32 in (*parts[rank].skipped, *parts[rank].stored):
                if not path.endswith(self._incomparable) and kept.get(path, (size, crc32)) != (size, crc32):
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

    def _too_late(self, rank: int, ordinal: int) -> str:
        return (
            f"{self.name(ordinal)} was committed without rank {rank}, which had reported without one, or not at all, "
            "when the others reported theirs. Every rank that saves checkpoints must do so at the same report; "
            f"raise CheckpointConfig.missing_rank_s (now {self._missing_rank_s:g} s) if this rank is just slow."
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
    """Return the rest of the sentence "checkpoint_000001 is dropped" if the ranks do not agree on one directory."""
    if len({part.in_place for part in parts.values()}) == 1:
        return None
    directories = ", ".join(f"{part.in_place or 'files to copy'} (rank {rank})" for rank, part in sorted(parts.items()))
    return (
        ": with CheckpointUploadMode.NO_UPLOAD, and with a checkpoint_upload_fn, all ranks that report one must name "
        f"the same directory, and not {directories}"
    )
