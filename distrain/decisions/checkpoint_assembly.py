"""Reports of N ranks -> checkpoints: who copies what, when to commit, what to keep. Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument.

The n-th checkpoint of a rank in an attempt has the *ordinal* n; checkpoints of different ranks belong together when
their ordinals agree. Of files with the same name the lowest rank's is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.decisions.failures import rank_list
from distrain.storage.commit import Commit, CommittedFile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distrain.config import CheckpointConfig

FIRST_PATIENCE_S = 1.0
"""How long a rank's first checkpoint waits for lower ranks that may bring the same files, and any that is to be deleted
for other ranks that may bring the same directory."""
PATIENCE_S = 10.0
"""The same, for files that a lower rank brought the last time too."""
SILENCE_S = 10.0
"""Seconds in train_func after which a rank that has not reported yet counts as silent, rather than as slow."""

MOST_AHEAD = 2
"""Checkpoints of one rank that may be stored while they wait for other ranks; the next one waits in report()."""


@dataclass(frozen=True, slots=True)
class CopyFiles:
    """Tell ``rank`` to copy these files of its checkpoint."""

    rank: int
    ordinal: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """The local files of ``rank`` are to be deleted now, or, as others may still bring the same directory, to be left
    until it is said again.
    """

    rank: int
    ordinal: int
    at_once: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """Make ``report()`` of ``rank`` fail."""

    rank: int
    ordinal: int
    why: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop the checkpoint: it will not be committed."""

    ordinal: int


@dataclass(frozen=True, slots=True)
class Say:
    """One line for the user."""

    text: str


Decision = CopyFiles | Discard | Refuse | Commit | Drop | Say


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The directory that a rank brings. folder: its path, without links. deletes: whether it is to be deleted in the
    end. waits: whether the rank waits for that. in_place: whether all ranks write into it, so that what is in it is
    known when all have said that they are done.
    """

    folder: str = ""
    deletes: bool = False
    waits: bool = True
    in_place: bool = False

    def overlaps(self, other: Source) -> bool:
        """Whether one is the other, or in it; directories of different hosts that are called the same included."""
        first, second = self.folder.rstrip("/") + "/", other.folder.rstrip("/") + "/"
        return first.startswith(second) or second.startswith(first)


_NOWHERE = Source()


@dataclass(slots=True)
class _Part:
    """What one rank brings to one ordinal."""

    index: int
    announced_at: float
    files: frozenset[str]
    metrics: dict[str, Any]
    source: Source
    granted: frozenset[str] | None = None
    delivered: tuple[tuple[str, int, int], ...] | None = None
    delivered_at: float = math.inf
    keeps: bool = True
    """Whether the run alone has what was delivered: the source was not to be deleted, or was, or was left."""
    told_to_leave: bool = False
    told_to_delete: bool = False
    stays: bool = False
    """Whether another one that was told to leave the same directory may have new files there already."""
    skipped: tuple[tuple[str, int, int], ...] = ()
    failed: str | None = None


@dataclass(slots=True)
class _Names:
    """The names of one checkpoint: the first rank that brings each as a file, or as a directory."""

    files: dict[str, int] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)

    def add(self, rank: int, files: Collection[str]) -> str | None:
        """Take in the files of a rank. Return why they do not fit those of other ranks, or None if they do."""
        folders = _folders_of(files)
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
        for name in files:
            self.files.setdefault(name, rank)
        for name in folders:
            self.folders.setdefault(name, rank)
        return None


@dataclass(slots=True)
class _RankRecord:
    last_index: int = 0
    last_ordinal: int = 0
    last_metrics: dict[str, Any] = field(default_factory=dict)
    running_since: float | None = None
    finished: bool = False
    written_off: bool = False


class CheckpointAssembly:
    """Joins the checkpoints of one attempt. ``incomparable``: how the paths of files end whose bytes
    differ although they say the same.
    """

    def __init__(self, world_size: int, config: CheckpointConfig, *, incomparable: Collection[str] = ()) -> None:
        self._incomparable = tuple(incomparable)
        self._ranks = {rank: _RankRecord() for rank in range(world_size)}
        self._missing_rank_s = config.missing_rank_s
        self._pending: dict[int, dict[int, _Part]] = {}
        self._previous_files: dict[int, frozenset[str]] = {}
        self._in_step: dict[int, set[int]] = {}
        self._names: dict[int, _Names] = {}
        self._committed_ordinal = 0
        self._looked_at = -math.inf
        self._closed = False
        self._waited_in_vain = False
        """True if a rank that was ahead has waited for ``missing_rank_s`` since the last commit."""
        self._out_of_patience = False
        """Whether a rank has waited in vain for others that may bring its directory."""
        self._said: set[str] = set()

    # -- events ---------------------------------------------------------------------------------------------------

    def running(self, rank: int, now: float) -> None:
        """The rank has entered train_func."""
        self._ranks[rank].running_since = now

    def reported(
        self,
        rank: int,
        index: int,
        metrics: dict[str, Any],
        ordinal: int | None,
        files: Iterable[str],
        now: float,
        source: Source = _NOWHERE,
    ) -> list[Decision]:
        """One call of report(); ``index`` counts the calls of the rank from 1."""
        record = self._ranks[rank]
        record.last_index = index
        record.last_metrics = metrics
        refusals: list[Decision] = []
        if ordinal is not None:
            if ordinal <= self._committed_ordinal:
                return [Refuse(rank, ordinal, self._too_late(rank, ordinal))]
            record.last_ordinal, record.written_off = ordinal, False
            part = _Part(index=index, announced_at=now, files=frozenset(files), metrics=metrics, source=source)
            part.keeps = source.in_place or not source.deletes
            self._pending.setdefault(ordinal, {})[rank] = part
            part.failed = self._names.setdefault(ordinal, _Names()).add(rank, part.files)
            if part.failed is not None:
                part.granted, part.delivered, part.delivered_at = frozenset(), (), now
                refusals.append(Refuse(rank, ordinal, f"checkpoint {ordinal}: {part.failed}"))
        self._note_who_is_in_step()
        return [*refusals, *self.tick(now)]

    def _note_who_is_in_step(self) -> None:
        """Ranks that report as often as those that bring a checkpoint, but without one."""
        for ordinal, parts in self._pending.items():
            index = max(part.index for part in parts.values())
            for rank, record in self._ranks.items():
                if rank not in parts and record.last_index - index in (0, 1):
                    self._in_step.setdefault(ordinal, set()).add(rank)

    def delivered(
        self,
        rank: int,
        ordinal: int,
        files: Sequence[Sequence[Any]],
        skipped: Sequence[Sequence[Any]],
        now: float,
        failed: str | None = None,
    ) -> list[Decision]:
        """The granted files of the rank are on disk, or why they are not: then this checkpoint will not be."""
        part = self._pending.get(ordinal, {}).get(rank)
        if part is None:  # it was refused, and an exception took the rank out of report() before it heard of that
            return self.tick(now)
        part.delivered = tuple((str(p), int(s), int(c)) for p, s, c in files)
        part.skipped = tuple((str(p), int(s), int(c)) for p, s, c in skipped)
        part.delivered_at = now
        part.failed = failed
        return self.tick(now)

    def discarded(self, rank: int, ordinal: int, now: float, failed: str | None = None) -> list[Decision]:
        """The rank's local files are deleted, or left, and what it has delivered is the run's alone; or why that is not
        certain: then the checkpoint is whole all the same.
        """
        part = self._pending.get(ordinal, {}).get(rank)
        if part is None:  # it was dropped meanwhile
            return self.tick(now)
        part.keeps = True
        if failed is None:
            return self.tick(now)
        why = f"local files of checkpoint {ordinal} may still be in {part.source.folder} of rank {rank}: {failed}"
        return [Say(why), *self.tick(now)]

    def awaits(self, ranks: Collection[int], *, ends: bool) -> bool:
        """Whether a part of one of these ranks is not stored, or, unless the attempt ``ends``, its source not deleted
        that is to be.
        """
        found = (part for parts in self._pending.values() for rank, part in parts.items() if rank in ranks)
        return any(part.delivered is None or not (part.keeps or ends) for part in found)

    def finished(self, rank: int, now: float) -> list[Decision]:
        """The rank has done its work and will not report again."""
        self._ranks[rank].finished = True
        return self.tick(now)

    def close(self, now: float) -> list[Decision]:
        """The attempt is over, nobody will report again: who has been silent so far was not just slow."""
        for record in self._ranks.values():
            record.running_since = -math.inf if record.running_since is not None else None
        self._closed = True
        return self.tick(now)

    def fewest_reports(self) -> float:
        """Return how many reports the slowest rank has made, of those that may still bring checkpoints."""
        records = self._ranks.values()
        return min((r.last_index for r in records if not (r.finished or r.written_off)), default=math.inf)

    def awaits_only(self, uploads: Collection[tuple[int, int]], now: float) -> bool:
        """Whether nothing but these uploads (rank, ordinal) keeps the next checkpoint from being committed."""
        ordinal = self._committed_ordinal + 1
        parts = self._pending.get(ordinal, {})
        under_way = [rank for rank, part in parts.items() if part.delivered is None or (rank, ordinal) in uploads]
        absent = [rank for rank in self._ranks if rank not in parts]
        return (
            bool(under_way)
            and all((rank, ordinal) in uploads for rank in under_way)
            and all(self._stays_away(rank, ordinal, now) for rank in absent)
        )

    def storing(
        self, failed: Collection[int], uploads: Collection[tuple[int, int]], now: float
    ) -> frozenset[tuple[int, int]]:
        """Return the parts (rank, ordinal) that ranks store themselves, of checkpoints that need nothing more from the
        ``failed`` ranks. Parts that uploaders bring are left out: they are stored also when the ranks are gone.
        """
        found: set[tuple[int, int]] = set()
        ordinal = self._committed_ordinal + 1
        while parts := self._pending.get(ordinal):
            waits = {rank for rank, part in parts.items() if part.delivered is None and not part.source.in_place}
            storing = {rank for rank in waits if (rank, ordinal) not in uploads}
            needed = any(rank not in parts and not self._stays_away(rank, ordinal, now) for rank in failed)
            if needed or not storing.isdisjoint(failed) or any(part.failed is not None for part in parts.values()):
                break
            found |= {(rank, ordinal) for rank in storing}
            ordinal += 1
        return frozenset(found)

    def expected(self, failed: Collection[int], uploads: Collection[tuple[int, int]]) -> frozenset[int]:
        """Return the ranks that may bring a checkpoint with a report that all ``failed`` ranks have made: those one or
        two reports behind that have brought one before, and rank 0 with its first report.
        """
        made = min((self._reports_made(rank, uploads) for rank in failed), default=0)
        return frozenset(
            rank
            for rank, record in self._ranks.items()
            if rank not in failed
            and not record.finished
            and made - record.last_index in (1, 2)
            and (record.last_ordinal or (rank == 0 and not record.last_index and record.running_since is not None))
        )

    def _reports_made(self, rank: int, uploads: Collection[tuple[int, int]]) -> int:
        """Return how many reports need nothing more from the rank."""
        parts = ((ordinal, parts[rank]) for ordinal, parts in self._pending.items() if rank in parts)
        unfinished = [p.index for o, p in parts if p.delivered is None and (rank, o) not in uploads]
        return min([self._ranks[rank].last_index, *(index - 1 for index in unfinished)])

    def tick(self, now: float) -> list[Decision]:
        """Whatever can be decided now."""
        self._looked_at = now
        decisions = self._advance(now)
        while (commit := self._next_commit(now)) is not None:
            decisions += [*commit, *self._advance(now)]
        return decisions

    def _advance(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for ordinal in sorted(self._pending):
            for rank in sorted(self._pending[ordinal]):
                decisions += self._grant(ordinal, rank, now)
                decisions += self._discard(ordinal, rank, now)
        return decisions

    def deadline(self) -> float | None:
        """When :meth:`tick` may have something new to say if nothing else happens; in the past if it is overdue."""
        moments = []
        for parts in self._pending.values():
            for rank, part in parts.items():
                if part.granted is None:
                    moments += [part.announced_at + self._patience_s(rank), part.announced_at + self._missing_rank_s]
                if part.source.waits and part.delivered is not None and not part.keeps:
                    moments.append(part.delivered_at + FIRST_PATIENCE_S)
            announced_at = max(part.announced_at for part in parts.values())
            since = [record.running_since for record in self._ranks.values() if record.running_since is not None]
            moments += [announced_at + self._missing_rank_s, *(moment + SILENCE_S for moment in since)]
        return min((moment for moment in moments if moment > self._looked_at), default=None)

    # -- who copies what ------------------------------------------------------------------------------------------

    def _grant(self, ordinal: int, rank: int, now: float) -> list[Decision]:
        parts = self._pending[ordinal]
        part = parts[rank]
        if part.granted is not None:
            return []
        if part.source.in_place:
            return self._grant_in_place(ordinal, rank, now)
        if self._is_ahead(ordinal, part, now):
            return []
        lower = [other for other in self._ranks if other < rank]
        brought = frozenset[str]().union(*(parts[other].files for other in lower if other in parts))
        undecided = [other for other in lower if other not in parts and not self._stays_away(other, ordinal, now)]
        needed = part.files - brought
        if needed and undecided and now < part.announced_at + self._patience_s(rank):
            return []
        part.granted = needed
        return [CopyFiles(rank, ordinal, tuple(sorted(needed)))]

    def _grant_in_place(self, ordinal: int, rank: int, now: float) -> list[Decision]:
        parts = self._pending[ordinal]
        if not all(other in parts or self._stays_away(other, ordinal, now) for other in self._ranks):
            return []
        parts[rank].granted = frozenset()
        return [CopyFiles(rank, ordinal, ())]

    def _is_ahead(self, ordinal: int, part: _Part, now: float) -> bool:
        """Return whether a rank waits with this checkpoint until earlier ones are joined, so that it does not fill the
        disk. It does not wait for ranks that may never bring one: those in train_func that have not done so yet. It
        waits for ``missing_rank_s`` at most.
        """
        if ordinal <= self._committed_ordinal + MOST_AHEAD or self._waited_in_vain or self._closed:
            return False
        earliest = self._committed_ordinal + 1
        if not (brought := self._pending.get(earliest)):
            return False
        self._waited_in_vain = now >= part.announced_at + self._missing_rank_s
        late = [self._ranks[r] for r in self._ranks if r not in brought and not self._stays_away(r, earliest, now)]
        may_never_come = late and not any(record.last_ordinal or record.running_since is None for record in late)
        return not (self._waited_in_vain or may_never_come)

    def _patience_s(self, rank: int) -> float:
        """Waiting saves copying the same file twice; it never decides which one is kept."""
        if not self._previous_files:
            return FIRST_PATIENCE_S
        own = self._previous_files.get(rank, frozenset())
        shared = any(own & files for other, files in self._previous_files.items() if other < rank)
        return PATIENCE_S if shared else 0.0

    # -- what becomes of the local files --------------------------------------------------------------------------

    def _discard(self, ordinal: int, rank: int, now: float) -> list[Decision]:
        """Nothing is deleted while another rank may bring the same directory. A rank that does not wait for it can
        have it done when nobody's part is missing any more, so that nothing is gone if the checkpoint is dropped.
        """
        parts = self._pending[ordinal]
        part = parts[rank]
        stored = part.source.in_place or (part.delivered is not None and part.failed is None)
        if not part.source.deletes or not stored or part.told_to_delete or self._closed:
            return []
        dropped = _will_be_dropped(parts)
        undecided = [r for r in self._ranks if r not in parts and not self._stays_away(r, ordinal, now)]
        missing = [other for other in parts.values() if other.delivered is None and not other.source.in_place]
        if part.source.waits:
            missing = [other for other in missing if other.source.overlaps(part.source)]
        part.stays = part.stays or (part.source.waits and _is_left_by_others(part, parts))
        at_once = not (dropped or undecided or missing or part.stays)
        in_vain = not at_once and now >= part.delivered_at + FIRST_PATIENCE_S
        self._out_of_patience = self._out_of_patience or (part.source.waits and in_vain)
        given_up = part.source.waits and not part.told_to_leave and (dropped or part.stays or self._out_of_patience)
        part.told_to_delete = at_once
        part.told_to_leave = part.told_to_leave or given_up
        return [Discard(rank, ordinal, at_once)] if at_once or given_up else []

    # -- when to commit -------------------------------------------------------------------------------------------

    def _stays_away(self, rank: int, ordinal: int, now: float) -> bool:
        """Whether ``rank`` will bring nothing for ``ordinal``.

        True once it has finished. A rank that has never brought a checkpoint is also written off when it reports in
        step with the others but without one; when it has never reported, though it has had the time, and the others
        have gone on to their next report; and after ``missing_rank_s``.
        """
        record = self._ranks[rank]
        if record.finished or record.written_off:
            return True
        if record.last_ordinal:
            return False
        parts = self._pending[ordinal].values()
        had_time = record.running_since is not None and now >= record.running_since + SILENCE_S
        gone_on = all(self._ranks[other].last_index > part.index for other, part in self._pending[ordinal].items())
        waited = now >= max(part.announced_at for part in parts) + self._missing_rank_s
        return rank in self._in_step.get(ordinal, ()) or (gone_on and had_time and not record.last_index) or waited

    def _next_commit(self, now: float) -> list[Decision] | None:
        ordinal = self._committed_ordinal + 1
        parts = self._pending.get(ordinal)
        if parts is None or any(part.delivered is None for part in parts.values()):
            return None
        absent = [rank for rank in self._ranks if rank not in parts]
        missing = [rank for rank in absent if not self._stays_away(rank, ordinal, now)]
        if missing:
            return self._complain(ordinal, missing, parts, now) or None
        silent = [rank for rank in absent if not self._ranks[rank].last_index and not self._ranks[rank].finished]
        said = self._say_written_off(ordinal, silent, parts, now)
        for rank in absent:
            self._ranks[rank].written_off = True  # until it brings one
        if not self._closed and any(not part.keeps for part in parts.values()) and not _will_be_dropped(parts):
            return None
        del self._pending[ordinal]
        self._in_step.pop(ordinal, None)
        del self._names[ordinal]
        self._committed_ordinal = ordinal
        self._waited_in_vain = False
        self._previous_files = {rank: part.files for rank, part in parts.items()}
        for rank, part in parts.items():
            if part.failed is not None:
                why = f"checkpoint {ordinal} is dropped, as rank {rank} could not store its part: {part.failed}"
                return [Say(why), Drop(ordinal)]
        return [*said, *self._differences(parts), self._commit(ordinal, parts)]

    def _commit(self, ordinal: int, parts: Mapping[int, _Part]) -> Commit:
        files: dict[str, CommittedFile] = {}
        for rank in sorted(parts):
            for path, size, crc32 in parts[rank].delivered or ():
                files.setdefault(path, CommittedFile(path, rank, size, crc32))
        first = parts[min(parts)]
        metrics = parts[0].metrics if 0 in parts else self._ranks[0].last_metrics or first.metrics
        return Commit(ordinal, tuple(files[path] for path in sorted(files)), tuple(sorted(parts)), metrics)

    # -- what to tell the user ------------------------------------------------------------------------------------

    def _once(self, key: str, text: str) -> list[Decision]:
        if key in self._said:
            return []
        self._said.add(key)
        return [Say(text)]

    def _complain(self, ordinal: int, missing: list[int], parts: Mapping[int, _Part], now: float) -> list[Decision]:
        if now < max(part.announced_at for part in parts.values()) + self._missing_rank_s:
            return []
        return self._once(
            "waiting",
            f"checkpoint {ordinal} of rank(s) {rank_list(parts)} is not complete: rank(s) {rank_list(missing)} brought "
            "earlier ones, but not this one. It is committed when they bring it or finish.",
        )

    def _say_written_off(
        self, ordinal: int, silent: list[int], parts: Mapping[int, _Part], now: float
    ) -> list[Decision]:
        waited = now >= max(part.announced_at for part in parts.values()) + self._missing_rank_s
        if not silent or not waited:
            return []
        return self._once(
            "written off",
            f"checkpoint {ordinal} was committed without rank(s) {rank_list(silent)}, which have not called report() "
            f"for {self._missing_rank_s:g} s (CheckpointConfig.missing_rank_s).",
        )

    def _differences(self, parts: Mapping[int, _Part]) -> list[Decision]:
        kept: dict[str, tuple[int, int]] = {}
        for rank in sorted(parts):
            for path, size, crc32 in parts[rank].delivered or ():
                kept.setdefault(path, (size, crc32))
        for rank in sorted(parts):
            for path, size, crc32 in (*parts[rank].skipped, *(parts[rank].delivered or ())):
                if not path.endswith(self._incomparable) and kept.get(path, (size, crc32)) != (size, crc32):
                    return self._once(
                        "different",
                        f"ranks brought different contents for the checkpoint file {path!r}; the lowest rank's is "
                        "kept. Put the rank into the file name to keep each rank's own.",
                    )
        return []

    def _too_late(self, rank: int, ordinal: int) -> str:
        return (
            f"checkpoint {ordinal} was committed without rank {rank}, which had reported without one, or not at all, "
            "when the others brought theirs. Every rank that brings checkpoints must do so in the same of its reports; "
            f"raise CheckpointConfig.missing_rank_s (now {self._missing_rank_s:g} s) if this rank is just slow."
        )


def _is_left_by_others(part: _Part, parts: Mapping[int, _Part]) -> bool:
    left = (other for other in parts.values() if other is not part and other.told_to_leave and not other.stays)
    return not part.told_to_leave and any(other.source.overlaps(part.source) for other in left)


def _folders_of(files: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in files:
        folder = path.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found


def _will_be_dropped(parts: Mapping[int, _Part]) -> bool:
    """Whether one is not stored, or the ranks do not agree on where they are: then the local files are needed."""
    mixed = len({part.source.in_place for part in parts.values()}) > 1
    return mixed or any(part.failed is not None for part in parts.values())


# -- which checkpoints to keep ---------------------------------------------------------------------------------------
