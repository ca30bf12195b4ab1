"""Reports of N ranks -> checkpoints: which rank copies which files, and when to commit. Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument.

The n-th calls of report() on all ranks belong together, even if only some have a checkpoint. The *ordinal* of a
checkpoint is this n, counted from 1 in each attempt. It is complete when every rank has made its n-th report or has
finished; :mod:`~distrain.decisions.checkpoints.attendance` says which ranks are not waited for. If several ranks report
a file of the same name, that of the lowest rank is kept.

An event of one rank never looks at all other ranks: each checkpoint has a cursor, which passes every rank once.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.decisions.checkpoints.actions import MakeDirectory, Settled, Store
from distrain.decisions.checkpoints.attendance import SAY_IT, Attendance
from distrain.decisions.events import CheckpointsInProgress, SendMessage, ShowLine
from distrain.storage.commit import Commit, file_entry
from distrain.storage.names import DICT_FILE
from distrain.system.text import name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from distrain.decisions.checkpoints.actions import Action
    from distrain.decisions.checkpoints.site import Site
    from distrain.storage.checkpoint import Checkpoint

PATIENCE_S = 1.0
"""Seconds for which the files of a rank wait for lower ranks, which may report the same ones. This saves copying them
twice; it never decides which are kept."""
MOST_UNCOMMITTED = 4
"""Checkpoints that may wait for other ranks, or for the disk. A rank with another one waits in report()."""
_INCOMPARABLE = (DICT_FILE, ".keras")
"""Equal tensors pickle to different bytes, and a ``.keras`` file holds the time at which it was written."""
_MOST_METRICS = 1000
"""Reports of rank 0 that are remembered for the checkpoints of slower ranks."""

# -- state ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Part:
    """The part of one rank in one checkpoint."""

    report: wire.Reported
    reported_at: float
    own: set[str] = field(default_factory=set)
    """Those of the files that no lower rank has reported."""
    stored: tuple[tuple[str, int, int], ...] = ()
    skipped: tuple[tuple[str, int, int], ...] = ()
    ordered: Sequence[str] | None = None
    """The files to store once they are there: they are still being written to memory."""


@dataclass(slots=True)
class Joining:
    """One checkpoint that is neither committed nor dropped.

    A part is in ``patient``, ``ready`` or ``in_place`` until its files are ordered.
    """

    last_at: float = 0.0
    """When the last part was reported."""
    parts: dict[int, Part] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    """By name of a file: the lowest rank that reports it."""
    named_by: tuple[int, str | None] = (-1, None)
    """The first rank that has named the directory, and the name."""
    folders: dict[str, int] = field(default_factory=dict)
    """By name of a directory: the first rank that reports files in it."""
    ordered: dict[str, int] = field(default_factory=dict)
    """By name of a file: the rank that was the last to be ordered to store it."""
    patient: OrderedDict[int, Part] = field(default_factory=OrderedDict)
    """Parts that wait for lower ranks, which may report the same files. In the order of the reports."""
    ready: set[int] = field(default_factory=set)
    """Ranks whose files are ordered next."""
    in_place: set[int] = field(default_factory=set)
    """Ranks whose files are in place. They wait until every rank has reported."""
    unstored: set[int] = field(default_factory=set)
    in_memory: set[int] = field(default_factory=set)
    """Ranks that write no further checkpoint to memory before this one is settled."""
    leaves_memory: bool = False
    """True once parts in memory are stored, and not only hashed there, because other ranks have stored theirs."""
    supersedes: bool = False
    """True if a rank has written an earlier one to memory, and did not wait until that was complete."""
    undecided: int = 0
    """A cursor: every lower rank has reported its part, or reports none."""
    is_synced: bool = False
    """True unless all ranks have reported their files with ASYNC, which can take long."""

    @property
    def since(self) -> float:
        """When the first part was reported; infinite if there is none."""
        return next((part.reported_at for part in self.parts.values()), math.inf)

    def clash(self, report: wire.Reported, folders: Collection[str]) -> str | None:
        """Return why names that the rank reports clash with those of another rank, or None if they do not."""
        rank, (first, name) = report.rank, self.named_by
        if None not in (name, report.name) and name != report.name:
            return (
                f"checkpoint_dir_name is {name!r} on rank {first} and {report.name!r} on rank {rank}; the ranks are "
                "not at the same step, or must give one name"
            )
        for names, is_a, others, is_other in (
            (report.files, "file", self.folders, "directory"),
            (folders, "directory", self.files, "file"),
        ):
            if clashes := others.keys() & names:
                name = min(clashes)
                return (
                    f"{name!r} is a {is_other} on rank {others[name]} and a {is_a} on rank {rank}; give them different "
                    "names, or put the rank into them"
                )
        return None

    def add(self, part: Part, folders: Iterable[str]) -> None:
        """Add a part. Of files that a higher rank has reported, this rank's are kept from now on."""
        report, rank = part.report, part.report.rank
        self.parts[rank] = part
        self.unstored.add(rank)
        self.is_synced |= report.waits or report.in_place or report.in_memory
        if self.named_by[1] is None:
            self.named_by = rank, report.name
        for folder in folders:
            self.folders.setdefault(folder, rank)
        for file in report.files:
            lowest = self.files.get(file)
            if lowest is not None and lowest < rank:
                continue
            self.files[file] = rank
            part.own.add(file)
            if lowest is not None:
                self.parts[lowest].own.discard(file)
                if not self.parts[lowest].own:
                    self.make_ready(lowest)
        if report.in_memory:
            self.in_memory.add(rank)
        if report.in_place:
            self.in_place.add(rank)
        else:
            self.patient[rank] = part
            if not part.own or rank < self.undecided:
                self.make_ready(rank)

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

    def take_ready(self) -> Iterator[int]:
        """Yield the ready ranks, but not those with files that another rank stores now.

        If two ranks stored a file of one name at the same time, the bytes of either could be the last ones.
        """
        for rank in sorted(self.ready):
            own = self.parts[rank].own
            if not any(self.ordered.get(file) in self.unstored for file in own):
                self.ready.discard(rank)
                self.ordered |= dict.fromkeys(own, rank)
                yield rank

    def take_in_place(self) -> Iterator[int]:
        """Yield the lowest rank whose files are in place: its host lists those of all ranks."""
        if self.in_place:
            lowest = min(self.in_place)
            self.unstored -= self.in_place - {lowest}
            self.in_place.clear()
            yield lowest

    def take_from_memory(self) -> list[int]:
        """Return the ranks whose parts are in memory and have to be stored, as other ranks have stored theirs."""
        ranks = [rank for rank, part in sorted(self.parts.items()) if part.report.in_memory]
        if self.leaves_memory or not 0 < len(ranks) < len(self.parts):
            return []
        self.leaves_memory = True
        self.unstored.update(ranks)
        return ranks


@dataclass(eq=False)
class CheckpointAssembly:
    """The checkpoints of the latest attempt, joined from the parts of its ranks.

    emit: called with all that has to be done. on_complete: called when all files of a checkpoint are stored.
    """

    site: Site
    emit: Callable[[Action], None]
    on_complete: Callable[[Commit, Joining], None]

    def begin(self, attempt: int, world_size: int, *, silent: Collection[int] = (), first_step: int = 0) -> None:
        """Begin an attempt, and forget the unfinished checkpoints of the last one.

        silent: the ranks that did not report in time for the latest checkpoint of an earlier attempt with as many
        ranks. first_step: the reports of a rank before those of this attempt, without those that it repeats. Messages
        to users count them, too.
        """
        self.attempt, self.world_size, self.first_step = attempt, world_size, first_step
        self.attendance = Attendance(world_size, self.site.config, silent)
        self.uploads: set[tuple[int, int]] = set()
        """Rank and ordinal of the files that uploaders are storing."""
        self._held_since = math.inf
        """Since when files of some part wait for ranks that are behind."""
        self._metrics_of_rank_0: deque[tuple[int, bytes]] = deque(maxlen=_MOST_METRICS)
        """The latest ones as JSON, with the number of the report."""
        self._problems: dict[int, str] = {}
        """By ordinal, why a part is missing: the rest of the sentence "the checkpoint of report 3 is dropped"."""
        self._joining: dict[int, Joining] = {}
        self._committing: dict[int, Joining] = {}
        self._settled = self._committed = 0
        """The highest ordinal that was committed or dropped, and that was committed."""
        self._lost: set[int] = set()
        """The ranks whose hosts are lost."""
        self._ticked_at = -math.inf
        self._warnings: set[str] = set()

    def tell(self, kind: type[wire.ToWorker], rank: int, **fields: Any) -> None:
        """Send a message to a rank."""
        self.emit(SendMessage(self.site.host_of(rank), kind(attempt=self.attempt, rank=rank, **fields)))

    # -- events ---------------------------------------------------------------------------------------------------

    def running(self, rank: int, now: float) -> None:
        """Note that the rank is in train_func, or that it continues there with the files for which it has waited."""
        self.attendance.running(rank, now)
        self.tick(now)

    def reported(self, report: wire.Reported, now: float) -> None:
        """Handle one call of report(). If it has raised, only its checkpoint is dropped.

        Files that are in place are listed when every rank has reported the directory. A rank that has written files
        into memory writes no others there until this checkpoint is settled, or :class:`~distrain.wire.FilesStored`
        arrives.
        """
        rank, index, known = report.rank, report.index, self.attendance[report.rank]
        for missed in range(known.reports + 1, index) if known.brings is not False else ():
            self._miss_part(rank, missed, "an exception came before it was sent")
        self.attendance.reported(rank, index, now, catches_up=index > self._settled)
        if rank == 0 and report.failed is None:
            self._metrics_of_rank_0.append((index, report.body))
        if report.has_checkpoint and (refusal := self._add_part(report, now)) and report.failed is None:
            self.tell(wire.FilesStored, rank, ordinal=index, failed=refusal)
        self.tick(now)

    def _cannot_store(self, rank: int, ordinal: int, why: str) -> None:
        self._problems.setdefault(ordinal, f", as rank {rank} could not store its part: {why}")

    def _miss_part(self, rank: int, ordinal: int, why: str) -> None:
        self._problems.setdefault(ordinal, f", as report() has failed on rank {rank}: {why}")

    def _join(self, ordinal: int, now: float) -> Joining:
        """Return a checkpoint of which a rank has reported a part now, or has tried to."""
        joining = self._joining.setdefault(ordinal, Joining())
        joining.last_at = now
        return joining

    def _add_part(self, report: wire.Reported, now: float) -> str | None:
        """Add the part of a rank. Return why report() of the rank must fail, or None."""
        rank, ordinal = report.rank, report.index
        if self.attendance[rank].brings is False:
            return self._not_declared(rank)
        self.attendance.brought(rank)
        if report.failed is not None:
            self._miss_part(rank, ordinal, report.failed)
            if not self._is_settled(ordinal):
                self._join(ordinal, now)
            return None
        if ordinal <= self._committed:
            return self._too_late(rank)
        if self._is_settled(ordinal):
            self._drop(ordinal, [rank])
            return None
        supersedes = report.in_memory and self._supersede(rank, ordinal)
        joining = self._join(ordinal, now)
        joining.supersedes |= supersedes
        folders = {name for path in report.files for name in accumulate(path.split("/")[:-1], "{}/{}".format)}
        if (clash := joining.clash(report, folders)) is not None:
            self._cannot_store(rank, ordinal, clash)
            return f"{self.name(ordinal)}: {clash}"
        joining.add(Part(report, now), folders)
        return None

    def _supersede(self, rank: int, ordinal: int) -> bool:
        """Drop the earlier checkpoints that the rank has in memory, if there are any: it was allowed to proceed."""
        older = []
        for earlier, joining in sorted(self._joining.items()):
            part = joining.parts.get(rank)
            is_in_memory = part is not None and part.report.in_memory and not joining.leaves_memory
            if earlier < ordinal and is_in_memory and earlier not in self._problems:
                older.append(earlier)
                self._settle(earlier)
                self._drop(earlier, joining.parts)
        return bool(older)

    def _drop(self, ordinal: int, ranks: Iterable[int]) -> None:
        """Tell these ranks, which have reported it, that the checkpoint will never be committed."""
        for rank in ranks:
            self.tell(wire.CommitDone, rank, ordinal=ordinal, path="", has_files=False)
        self.emit(Settled(ordinal, None))

    def written(self, message: wire.PartWritten) -> None:
        """Continue with a part that was still being written to memory when it was reported."""
        if (part := self.part(message.rank, message.ordinal)) is not None:
            part.report = replace(part.report, is_written=True, facts=message.facts)
            if part.ordered is not None:
                self._store(message.rank, message.ordinal, part.ordered)

    def stored(self, answer: wire.FilesCopied, now: float) -> None:
        """Note that files of a rank are on disk, or (``failed``) cannot be stored."""
        rank, ordinal, failed = answer.rank, answer.ordinal, answer.failed
        self.uploads.discard((rank, ordinal))
        joining = self._joining.get(ordinal)
        if joining is None or rank not in joining.parts:
            return  # it was refused, and an exception ended report() before the refusal arrived
        part = joining.parts[rank]
        if self.site.needs_uploader(part.report) and (failed is not None or not part.report.in_memory):
            self.tell(wire.FilesStored, rank, ordinal=ordinal, failed=failed)
        stored = tuple((str(p), int(s), int(c)) for p, s, c in answer.files)
        if failed is None and part.stored and not set(stored) <= set(part.stored):
            failed = "its files were damaged in memory"
        part.stored, part.skipped = stored, tuple((str(p), int(s), int(c)) for p, s, c in answer.skipped)
        joining.unstored.discard(rank)
        if failed is not None:
            self._cannot_store(rank, ordinal, failed)
        self.tick(now)

    def committed(self, ordinal: int, latest: str, checkpoint: Checkpoint, now: float) -> None:
        """Tell the ranks that a checkpoint is committed. latest: the path of the newest one."""
        joining = self._committing.pop(ordinal)
        for rank in range(self.world_size):
            self.tell(wire.CommitDone, rank, ordinal=ordinal, path=latest, has_files=rank in joining.parts)
        self.emit(Settled(ordinal, checkpoint))
        self.tick(now)

    def finished(self, rank: int, now: float) -> None:
        """Note that the rank has done its work and will not report again."""
        self.attendance.finished(rank)
        self.tick(now)

    def lost(self, ranks: Collection[int]) -> None:
        """Note that the host of these ranks is lost."""
        self._lost.update(ranks)
        self.uploads = {(rank, ordinal) for rank, ordinal in self.uploads if rank not in ranks}
        for rank in ranks:
            self.attendance.ended(rank)

    def close(self, now: float) -> None:
        """End the attempt: no rank will report again. Say which checkpoints are lost because they may lack ranks."""
        for rank in range(self.world_size):
            self.attendance.ended(rank)
        self.tick(now)
        self._describe_dropped()

    def tick(self, now: float) -> None:
        """Decide everything that can be decided by now."""
        self._ticked_at = now
        is_blocked = now >= self._held_since + self.site.config.missing_rank_s
        self.give_up_waiting(min(self._joining, default=0) if is_blocked else 0, now)
        self._order_files(now)
        while self._settle_next(now):
            self._order_files(now)

    def give_up_waiting(self, behind: int, now: float) -> None:
        """Stop waiting for ranks that have had their time. See :meth:`~Attendance.give_up`."""
        if ranks := self.attendance.give_up(now, behind):
            self._warn_once(
                "silent",
                f"checkpoints are committed without {name_ranks(ranks)}: no report from "
                f"{'it' if len(ranks) == 1 else 'them'} within {self.site.config.missing_rank_s:g} s "
                f"(CheckpointConfig.missing_rank_s). {SAY_IT}",
            )

    def deadline(self) -> float | None:
        """Return when :meth:`tick` may decide more if nothing else happens; in the past if that is overdue."""
        if not self._joining:
            return None
        missing_s = self.site.config.missing_rank_s
        moments = [self._joining[min(self._joining)].last_at + missing_s, self._held_since + missing_s]
        moments += self.attendance.deadlines(self._held_since)
        for joining in self._joining.values():
            moments.append(joining.since + missing_s)
            if joining.patient:
                moments.append(next(iter(joining.patient.values())).reported_at + PATIENCE_S)
        return min((moment for moment in moments if moment > self._ticked_at), default=None)

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def _with_parts(self) -> dict[int, Joining]:
        """The checkpoints that are joining or being committed, and of which a rank has reported a part."""
        return {n: joining for n, joining in {**self._committing, **self._joining}.items() if joining.parts}

    def part(self, rank: int, ordinal: int) -> Part | None:
        """Return the part of a rank, unless it was refused or the checkpoint is gone."""
        joining = self._joining.get(ordinal)
        return None if joining is None else joining.parts.get(rank)

    def has_part(self, ordinal: int) -> bool:
        """Return whether a rank has reported a part of a checkpoint that is neither committed nor dropped."""
        return ordinal in self._with_parts

    def awaits(self, ranks: Collection[int]) -> bool:
        """Return whether a part of one of these ranks is not stored yet."""
        return any(not joining.unstored.isdisjoint(ranks) for joining in self._joining.values())

    def awaits_uploads(self) -> bool:
        """Return whether uploads are all that the next checkpoint waits for."""
        if not self._joining:
            return False
        ordinal = min(self._joining)
        unstored = self._joining[ordinal].unstored
        are_stored_apart = all((rank, ordinal) in self.uploads for rank in unstored)
        return bool(unstored) and are_stored_apart and self.attendance.are_decided(ordinal)

    def awaits_parts_of(self, rank: int) -> bool:
        """Return whether a checkpoint that the rank has reported is neither committed nor dropped."""
        return any(rank in joining.parts for joining in self._with_parts.values())

    def settled(self, now: float, *, synced: bool) -> float:
        """Return the number of reports up to which the checkpoints of all ranks are committed or dropped.

        synced: neither those that ASYNC stores count, nor, after a moment, ranks that have never reported.
        """
        first = min((n for n, one in self._with_parts.items() if one.is_synced or not synced), default=math.inf)
        return min(self.attendance.fewest(now if synced else -math.inf), first - 1)

    def in_progress(self, failed: Collection[int], standing: Collection[int], now: float) -> CheckpointsInProgress:
        """Return what other ranks store, or may still report, for checkpoints that don't need the ``failed`` ones.

        standing: the ranks that stand still, and so will not report.
        """
        least = min(map(self._reports_made, failed), default=0)
        hopeless = {*failed, *standing}
        expected, within_s = self.attendance.expected(hopeless, least, now, is_awaited=bool(self._joining))
        return CheckpointsInProgress(self._storing(failed), expected, within_s)

    def _storing(self, failed: Collection[int]) -> frozenset[tuple[int, int]]:
        """Return the parts (rank, ordinal) that ranks store themselves, of checkpoints that can do without ``failed``.

        Such a checkpoint needs nothing more from the failed ranks. Parts that uploaders store are left out: they are
        stored also when the ranks are gone.
        """
        found: set[tuple[int, int]] = set()
        for ordinal, joining in sorted(self._joining.items()):
            storing = {(rank, ordinal) for rank in joining.unstored if not joining.parts[rank].report.in_place}
            storing -= self.uploads
            needed = any(not self.attendance.is_decided(rank, ordinal) for rank in failed)
            if needed or ordinal in self._problems or any(rank in failed for rank, _ in storing):
                break
            found |= storing
        return frozenset(found)

    def _reports_made(self, rank: int) -> int:
        """Return how many reports need nothing more from the rank."""
        unfinished = [
            ordinal - 1
            for ordinal, joining in self._joining.items()
            if rank in joining.unstored and (rank, ordinal) not in self.uploads
        ]
        return min([self.attendance[rank].reports, *unfinished])

    # -- which rank copies which files ----------------------------------------------------------------------------

    def _order_files(self, now: float) -> None:
        uncommitted = committing = len(self._committing)
        is_held = False
        for ordinal, joining in sorted(self._joining.items()):
            has_all_parts = self.attendance.are_decided(ordinal)
            uncommitted += not has_all_parts
            waits = now < joining.since + self.site.config.missing_rank_s and self.attendance.fewest(now) < ordinal
            self._pass_decided(ordinal, joining)
            joining.end_patience(now)
            may_store = uncommitted <= MOST_UNCOMMITTED or not (waits or committing > MOST_UNCOMMITTED)
            for rank in joining.take_ready() if may_store else ():
                self._store(rank, ordinal, sorted(joining.parts[rank].own))
            if has_all_parts:
                for rank in joining.take_in_place():
                    self._store(rank, ordinal, ())
            elif not (waits or joining.unstored):  # ranks that never reported don't keep others from their next one
                for rank in sorted(joining.in_memory):
                    self.tell(wire.FilesStored, rank, ordinal=ordinal)
                joining.in_memory.clear()
            is_blocked = (joining.ready and not may_store) or (joining.supersedes and joining.in_memory)
            is_held |= waits and bool(is_blocked)
        self._held_since = min(self._held_since, now) if is_held else math.inf

    def _store(self, rank: int, ordinal: int, files: Sequence[str]) -> None:
        """Have these files of a rank stored, by the rank itself or by an uploader, once there is a directory for them.

        They replace files of the same names that a higher rank has stored, which has not waited for this rank long
        enough.
        """
        joining = self._joining[ordinal]
        part, report = joining.parts[rank], joining.parts[rank].report
        if report.in_memory and not report.is_written:
            part.ordered = files
            return
        if self.site.needs_uploader(report):
            if rank in self._lost:
                return
            self.uploads.add((rank, ordinal))
        if report.in_memory and not joining.leaves_memory:
            self.emit(SendMessage(self.site.host_of(rank), self._upload(report, files)))
        elif report.in_place:
            self._copy(self.attempt, rank, ordinal, files, report.folder)
        else:
            then = partial(self._copy, self.attempt, rank, ordinal, files)
            self.emit(MakeDirectory(f"{self.attempt}-{ordinal}", joining.named_by[1], then))

    def _copy(self, attempt: int, rank: int, ordinal: int, files: Sequence[str], directory: str) -> None:
        """Tell the worker or the uploader of its host to copy the files into ``directory``."""
        part = self.part(rank, ordinal)
        if attempt != self.attempt or part is None:
            return
        if self.site.needs_uploader(part.report):
            self.emit(Store(self.site.host_of(rank), self._upload(part.report, files, directory)))
        else:
            self.tell(wire.CopyFiles, rank, ordinal=ordinal, directory=directory, files=list(files))

    def _upload(self, report: wire.Reported, files: Sequence[str], directory: str = "") -> wire.Upload:
        """Return the order to store files of a part; without a directory, they are only hashed, in memory."""
        ordered, is_hashed = frozenset(files), not directory
        return wire.Upload(
            attempt=report.attempt,
            rank=report.rank,
            ordinal=report.index,
            source="" if report.in_place else report.folder,
            files=list(files),
            others=[] if is_hashed else [path for path in report.files if path not in ordered],
            directory=directory,
            facts=(report.facts or {}) if is_hashed or not report.in_memory else {},
        )

    def _pass_decided(self, ordinal: int, joining: Joining) -> None:
        """Move the cursor to the lowest rank that may still report a part. Lower ranks wait for no others."""
        while joining.undecided < self.world_size and self.attendance.is_decided(joining.undecided, ordinal):
            joining.make_ready(joining.undecided)
            joining.undecided += 1

    # -- when to commit -------------------------------------------------------------------------------------------

    def _settle(self, ordinal: int) -> None:
        del self._joining[ordinal]
        self._settled = max(self._settled, ordinal)

    def _is_settled(self, ordinal: int) -> bool:
        """Return whether a checkpoint is committed or dropped. An earlier one may still be joining."""
        return ordinal <= self._settled and ordinal not in self._joining

    def _settle_next(self, now: float) -> bool:
        """Commit or drop the next checkpoint. Return False if it has to wait."""
        if not self._joining:
            return False
        ordinal = min(self._joining)
        joining = self._joining[ordinal]
        if not self.attendance.are_decided(ordinal):
            self._warn_of_missing(ordinal, joining, now)
            return False
        if joining.unstored:
            return False
        if ordinal not in self._problems and (ranks := joining.take_from_memory()):
            for rank in ranks:
                self._store(rank, ordinal, sorted(joining.parts[rank].own))
            return True
        self._settle(ordinal)
        if (problem := self._problems.get(ordinal) or _mixed_directories(joining.parts)) is not None:
            self.emit(ShowLine(f"{self.name(ordinal)} is dropped{problem}"))
            self._drop(ordinal, joining.parts)
            return True
        self._committed = ordinal
        self._committing[ordinal] = joining
        commit = self._commit(ordinal, joining.parts)
        self._warn_of_differences(joining.parts, commit.files)
        self.on_complete(commit, joining)
        return True

    def _commit(self, ordinal: int, parts: Mapping[int, Part]) -> Commit:
        files: dict[str, dict[str, Any]] = {}
        for rank in sorted(parts):
            for path, size, crc32 in parts[rank].stored:
                files.setdefault(path, file_entry(size, crc32, rank))
        metrics = json.loads(dict(self._metrics_of_rank_0).get(ordinal) or parts[min(parts)].report.body)
        silent = tuple(rank for rank in self.attendance.silent() if rank not in parts)
        files = dict(sorted(files.items()))
        return Commit(ordinal, files, tuple(sorted(parts)), metrics, world_size=self.world_size, silent=silent)

    def name(self, ordinal: int) -> str:
        """Return the words for a checkpoint that has no name yet."""
        return f"the checkpoint of report {self.first_step + ordinal}"

    # -- warnings -------------------------------------------------------------------------------------------------

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warnings:
            self._warnings.add(key)
            self.emit(ShowLine(text))

    def _warn_of_missing(self, ordinal: int, joining: Joining, now: float) -> None:
        is_early = now < joining.last_at + self.site.config.missing_rank_s
        if "missing" in self._warnings or is_early:
            return
        missing = self.attendance.missing(ordinal)
        if not self.attendance.will_be_given_up(missing):
            self._warn_once(
                "missing",
                f"{self.name(ordinal)} of {name_ranks(joining.parts)} is not complete: "
                f"{self.attendance.describe(missing)}. It will be committed once they make that report or finish.",
            )

    def _describe_dropped(self) -> None:
        """Say which checkpoints of an attempt that has ended may lack ranks that had not reported one yet."""
        wanted = sorted(self._joining)
        missing = self.attendance.missing(wanted[0]) if wanted else []
        if missing := [rank for rank in missing if not self.attendance[rank].brings]:
            first, last = self.first_step + wanted[0], self.first_step + wanted[-1]
            one, many = f"{self.name(wanted[0])} is", f"the checkpoints of reports {first} to {last} are"
            text = (
                f"{one if last == first else many} dropped: the attempt ended before {name_ranks(missing)} made that "
                f"report, so files may be missing. {SAY_IT}"
            )
            self.emit(ShowLine(text))

    def _warn_of_differences(self, parts: Mapping[int, Part], kept: Mapping[str, Mapping[str, Any]]) -> None:
        for rank in sorted(parts):
            for path, size, crc32 in (*parts[rank].skipped, *parts[rank].stored):
                entry = file_entry(size, crc32, kept[path]["rank"]) if path in kept else None
                if entry not in (None, kept.get(path)) and not path.endswith(_INCOMPARABLE):
                    self._warn_once(
                        "different",
                        f"ranks reported different contents for the checkpoint file {path!r}; the lowest rank's is "
                        "kept. Put the rank into the file name to keep each rank's own.",
                    )
                    return

    def _not_declared(self, rank: int) -> str:
        declared = self.site.config.checkpoint_ranks
        assert not isinstance(declared, str | None)
        named = name_ranks(declared)
        return (
            f"rank {rank} reported a checkpoint, but CheckpointConfig.checkpoint_ranks names only {named}; add this "
            "rank there, or report its metrics alone"
        )

    def _too_late(self, rank: int) -> str:
        return (
            f"a checkpoint was committed without rank {rank}, which had not called report() as often as the others. "
            "Ranks that save checkpoints must call it equally often; raise "
            f"CheckpointConfig.missing_rank_s (now {self.site.config.missing_rank_s:g} s) if this rank is just slow"
        )


def _mixed_directories(parts: Mapping[int, Part]) -> str | None:
    """Return the rest of the sentence "the checkpoint … is dropped" if the ranks do not agree on one directory."""
    named = {rank: part.report.folder if part.report.in_place else "" for rank, part in sorted(parts.items())}
    if len(set(named.values())) == 1:
        return None
    directories = ", ".join(f"{folder or 'files to copy'} (rank {rank})" for rank, folder in named.items())
    return (
        ": with CheckpointUploadMode.NO_UPLOAD, and with a checkpoint_upload_fn, all ranks that report one must name "
        f"the same directory, and not {directories}"
    )
