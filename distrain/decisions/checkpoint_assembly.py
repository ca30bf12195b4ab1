"""Reports of N ranks -> checkpoints: which rank copies which files, and when to commit. Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument.

The n-th checkpoint of a rank in an attempt has the *ordinal* n. Checkpoints of different ranks belong together if
their ordinals are equal. If several ranks bring a file of the same name, that of the lowest rank is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.decisions.events import ShowLine
from distrain.decisions.failures import rank_list
from distrain.storage.commit import Commit, CommittedFile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distrain.config import CheckpointConfig

FIRST_PATIENCE_S = 1.0
"""Seconds that a rank's first checkpoint waits for lower ranks, which may bring the same files, before it is copied."""
PATIENCE_S = 10.0
"""Seconds that a later checkpoint waits for lower ranks if one of them brought the same files the last time."""
FIRST_REPORT_TIMEOUT_S = 10.0
"""Seconds in train_func after which others stop waiting for a rank that has never reported."""

MOST_AHEAD = 2
"""Checkpoints of one rank that may be stored while they wait for other ranks; the next one waits in report()."""


# -- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestFiles:
    """Have these files of a rank's checkpoint stored, by the rank itself or by the uploader of its host."""

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
    """The files that one rank brings for one ordinal."""

    index: int
    """The number of the report that brought it."""
    reported_at: float
    files: frozenset[str]
    metrics: dict[str, Any]
    in_place: str
    ordered: bool = False
    """True once the files were ordered to be stored."""
    stored: tuple[tuple[str, int, int], ...] | None = None
    skipped: tuple[tuple[str, int, int], ...] = ()
    failed: str | None = None


@dataclass(slots=True)
class _Names:
    """The names in one checkpoint: the first rank that brings each as a file, or as a directory."""

    files: dict[str, int] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)

    def add(self, rank: int, files: Collection[str]) -> str | None:
        """Add the files of a rank. Return why they clash with those of another rank, or None if they do not."""
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
    """The checkpoints of one attempt, joined from the parts of its ranks.

    incomparable: endings of file names whose bytes differ although their contents are the same.
    """

    def __init__(self, world_size: int, config: CheckpointConfig, *, incomparable: Collection[str] = ()) -> None:
        self._incomparable = tuple(incomparable)
        self._ranks = {rank: _RankRecord() for rank in range(world_size)}
        self._missing_rank_s = config.missing_rank_s
        self._pending: dict[int, dict[int, _Part]] = {}
        self._previous_files: dict[int, frozenset[str]] = {}
        self._in_step: dict[int, set[int]] = {}
        """By ordinal: ranks that have made the same report without a checkpoint."""
        self._names: dict[int, _Names] = {}
        self._settled_ordinal = 0
        self._ticked_at = -math.inf
        self._closed = False
        self._waited_in_vain = False
        """True if a rank that was ahead has waited for ``missing_rank_s`` since the last commit."""
        self._warnings: set[str] = set()

    # -- events ---------------------------------------------------------------------------------------------------

    def running(self, rank: int, now: float) -> None:
        """Note that the rank has entered train_func."""
        self._ranks[rank].running_since = now

    def reported(
        self,
        rank: int,
        index: int,
        metrics: dict[str, Any],
        ordinal: int | None,
        files: Iterable[str],
        now: float,
        in_place: str = "",
    ) -> list[Action]:
        """Handle one call of report(); ``index`` counts the calls of the rank from 1.

        in_place: the directory of the run directory that the ranks have filled themselves; empty if ``files`` are to be
            copied. Its files are listed when every rank has reported it.
        """
        record = self._ranks[rank]
        record.last_index = index
        record.last_metrics = metrics
        refusals: list[Action] = []
        if ordinal is not None:
            if ordinal <= self._settled_ordinal:
                return [Refuse(rank, ordinal, self._too_late(rank, ordinal))]
            record.last_ordinal, record.written_off = ordinal, False
            part = _Part(index, now, frozenset(files), metrics, in_place)
            self._pending.setdefault(ordinal, {})[rank] = part
            part.failed = self._names.setdefault(ordinal, _Names()).add(rank, part.files)
            if part.failed is not None:
                part.ordered, part.stored = True, ()
                refusals.append(Refuse(rank, ordinal, f"checkpoint {ordinal}: {part.failed}"))
        self._note_who_is_in_step()
        return [*refusals, *self.tick(now)]

    def _note_who_is_in_step(self) -> None:
        for ordinal, parts in self._pending.items():
            index = max(part.index for part in parts.values())
            for rank, record in self._ranks.items():
                if rank not in parts and record.last_index - index in (0, 1):
                    self._in_step.setdefault(ordinal, set()).add(rank)

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

        files, skipped: path, size and crc32 of the files that were stored, and of those that a lower rank brings.
        """
        part = self._pending.get(ordinal, {}).get(rank)
        if part is None:  # it was refused, and an exception ended report() before the refusal arrived
            return self.tick(now)
        part.stored = tuple((str(p), int(s), int(c)) for p, s, c in files)
        part.skipped = tuple((str(p), int(s), int(c)) for p, s, c in skipped)
        part.failed = failed
        return self.tick(now)

    def finished(self, rank: int, now: float) -> list[Action]:
        """Note that the rank has done its work and will not report again."""
        self._ranks[rank].finished = True
        return self.tick(now)

    def close(self, now: float) -> list[Action]:
        """End the attempt: no rank will report again, and ranks that never reported were not just slow."""
        for record in self._ranks.values():
            record.running_since = -math.inf if record.running_since is not None else None
        self._closed = True
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Decide everything that can be decided by now."""
        self._ticked_at = now
        actions = self._order_files(now)
        while (settled := self._settle_next(now)) is not None:
            actions += [*settled, *self._order_files(now)]
        return actions

    def deadline(self) -> float | None:
        """Return when :meth:`tick` may decide more if nothing else happens; in the past if that is overdue."""
        moments = []
        for parts in self._pending.values():
            for rank, part in parts.items():
                if not part.ordered:
                    moments += [part.reported_at + self._patience_s(rank), part.reported_at + self._missing_rank_s]
            reported_at = max(part.reported_at for part in parts.values())
            since = [record.running_since for record in self._ranks.values() if record.running_since is not None]
            moments += [reported_at + self._missing_rank_s, *(moment + FIRST_REPORT_TIMEOUT_S for moment in since)]
        return min((moment for moment in moments if moment > self._ticked_at), default=None)

    # -- questions ------------------------------------------------------------------------------------------------

    def awaits(self, ranks: Collection[int]) -> bool:
        """Return whether a part of one of these ranks is not stored yet."""
        return any(
            rank in ranks and part.stored is None for parts in self._pending.values() for rank, part in parts.items()
        )

    def awaits_only(self, uploads: Collection[tuple[int, int]], now: float) -> bool:
        """Return whether the next checkpoint can be committed as soon as these uploads (rank, ordinal) are done."""
        ordinal = self._settled_ordinal + 1
        parts = self._pending.get(ordinal, {})
        under_way = [(rank, ordinal) for rank, part in parts.items() if part.stored is None]
        absent = [rank for rank in self._ranks if rank not in parts]
        return (
            bool(under_way)
            and all(part in uploads for part in under_way)
            and all(self._brings_nothing(rank, ordinal, now) for rank in absent)
        )

    def fewest_reports(self) -> float:
        """Return how many reports the slowest rank has made, of those that may still bring checkpoints."""
        records = self._ranks.values()
        return min((r.last_index for r in records if not (r.finished or r.written_off)), default=math.inf)

    def storing(
        self, failed: Collection[int], uploads: Collection[tuple[int, int]], now: float
    ) -> frozenset[tuple[int, int]]:
        """Return the parts (rank, ordinal) that ranks store themselves, of checkpoints that can do without ``failed``.

        Such a checkpoint needs nothing more from the failed ranks. Parts that uploaders store are left out: they are
        stored also when the ranks are gone.
        """
        found: set[tuple[int, int]] = set()
        ordinal = self._settled_ordinal + 1
        while parts := self._pending.get(ordinal):
            unstored = {rank for rank, part in parts.items() if part.stored is None and not part.in_place}
            storing = {rank for rank in unstored if (rank, ordinal) not in uploads}
            needed = any(rank not in parts and not self._brings_nothing(rank, ordinal, now) for rank in failed)
            if needed or not storing.isdisjoint(failed) or any(part.failed is not None for part in parts.values()):
                break
            found |= {(rank, ordinal) for rank in storing}
            ordinal += 1
        return frozenset(found)

    def expected(self, failed: Collection[int], uploads: Collection[tuple[int, int]]) -> frozenset[int]:
        """Return the ranks that may bring a checkpoint with a report that all ``failed`` ranks have made.

        These are the ranks one or two reports behind that have brought one before, and rank 0 with its first report.
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
        unfinished = [p.index for o, p in parts if p.stored is None and (rank, o) not in uploads]
        return min([self._ranks[rank].last_index, *(index - 1 for index in unfinished)])

    # -- which rank copies which files ----------------------------------------------------------------------------

    def _order_files(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for ordinal in sorted(self._pending):
            for rank, part in sorted(self._pending[ordinal].items()):
                if part.ordered:
                    continue
                order = self._order_in_place if part.in_place else self._order_copies
                actions += order(ordinal, rank, now)
        return actions

    def _order_copies(self, ordinal: int, rank: int, now: float) -> list[Action]:
        parts = self._pending[ordinal]
        part = parts[rank]
        if self._must_wait(ordinal, part, now):
            return []
        lower = [other for other in self._ranks if other < rank]
        brought = frozenset[str]().union(*(parts[other].files for other in lower if other in parts))
        undecided = [other for other in lower if other not in parts and not self._brings_nothing(other, ordinal, now)]
        needed = part.files - brought
        if needed and undecided and now < part.reported_at + self._patience_s(rank):
            return []
        part.ordered = True
        return [RequestFiles(rank, ordinal, tuple(sorted(needed)))]

    def _order_in_place(self, ordinal: int, rank: int, now: float) -> list[Action]:
        """Have the lowest rank's host list the files of all ranks, once every rank has reported the directory."""
        parts = self._pending[ordinal]
        if not all(other in parts or self._brings_nothing(other, ordinal, now) for other in self._ranks):
            return []
        parts[rank].ordered = True
        if any(part.in_place and other < rank for other, part in parts.items()):
            parts[rank].stored = ()
            return []
        return [RequestFiles(rank, ordinal, ())]

    def _must_wait(self, ordinal: int, part: _Part, now: float) -> bool:
        """Return whether a rank waits with this checkpoint until earlier ones are joined, to not fill the disk.

        It does not wait for ranks that may never bring one: those in train_func that have not done so yet. It waits for
        ``missing_rank_s`` at most.
        """
        if ordinal <= self._settled_ordinal + MOST_AHEAD or self._waited_in_vain or self._closed:
            return False
        earliest = self._settled_ordinal + 1
        if not (brought := self._pending.get(earliest)):
            return False
        self._waited_in_vain = now >= part.reported_at + self._missing_rank_s
        late = [self._ranks[r] for r in self._ranks if r not in brought and not self._brings_nothing(r, earliest, now)]
        may_never_come = late and not any(record.last_ordinal or record.running_since is None for record in late)
        return not (self._waited_in_vain or may_never_come)

    def _patience_s(self, rank: int) -> float:
        """Return how long to wait for lower ranks that may bring the same files.

        Waiting saves copying the same file twice; it never decides which one is kept.
        """
        if not self._previous_files:
            return FIRST_PATIENCE_S
        own = self._previous_files.get(rank, frozenset())
        shared = any(own & files for other, files in self._previous_files.items() if other < rank)
        return PATIENCE_S if shared else 0.0

    def _brings_nothing(self, rank: int, ordinal: int, now: float) -> bool:
        """Return whether ``rank`` will bring nothing for ``ordinal``.

        True once the rank has finished. A rank that has never brought a checkpoint is also written off when it reports
        in step with the others but without one; when it has never reported, though it has had the time, and the others
        have made their next report; and after ``missing_rank_s``.
        """
        record = self._ranks[rank]
        if record.finished or record.written_off:
            return True
        if record.last_ordinal:
            return False
        parts = self._pending[ordinal]
        had_time = record.running_since is not None and now >= record.running_since + FIRST_REPORT_TIMEOUT_S
        others_reported_again = all(self._ranks[other].last_index > part.index for other, part in parts.items())
        return (
            rank in self._in_step.get(ordinal, ())
            or (others_reported_again and had_time and not record.last_index)
            or self._waited_for_missing(parts, now)
        )

    def _waited_for_missing(self, parts: Mapping[int, _Part], now: float) -> bool:
        return now >= max(part.reported_at for part in parts.values()) + self._missing_rank_s

    # -- when to commit -------------------------------------------------------------------------------------------

    def _settle_next(self, now: float) -> list[Action] | None:
        """Commit or drop the next checkpoint. Return None if it has to wait."""
        ordinal = self._settled_ordinal + 1
        parts = self._pending.get(ordinal)
        if parts is None or any(part.stored is None for part in parts.values()):
            return None
        absent = [rank for rank in self._ranks if rank not in parts]
        missing = [rank for rank in absent if not self._brings_nothing(rank, ordinal, now)]
        if missing:
            return self._warn_of_missing(ordinal, missing, parts, now) or None
        warnings = self._warn_of_written_off(ordinal, absent, parts, now)
        for rank in absent:
            self._ranks[rank].written_off = True  # until it brings one
        del self._pending[ordinal], self._names[ordinal]
        self._in_step.pop(ordinal, None)
        self._settled_ordinal = ordinal
        self._waited_in_vain = False
        self._previous_files = {rank: part.files for rank, part in parts.items()}
        if (problem := _why_dropped(parts)) is not None:
            return [ShowLine(f"checkpoint {ordinal} is dropped{problem}"), Drop(ordinal)]
        return [*warnings, *self._warn_of_differences(parts), self._commit(ordinal, parts)]

    def _commit(self, ordinal: int, parts: Mapping[int, _Part]) -> Commit:
        files: dict[str, CommittedFile] = {}
        for rank in sorted(parts):
            for path, size, crc32 in parts[rank].stored or ():
                files.setdefault(path, CommittedFile(path, rank, size, crc32))
        first = parts[min(parts)]
        metrics = parts[0].metrics if 0 in parts else self._ranks[0].last_metrics or first.metrics
        return Commit(ordinal, tuple(files[path] for path in sorted(files)), tuple(sorted(parts)), metrics)

    # -- warnings -------------------------------------------------------------------------------------------------

    def _warn_once(self, key: str, text: str) -> list[Action]:
        if key in self._warnings:
            return []
        self._warnings.add(key)
        return [ShowLine(text)]

    def _warn_of_missing(
        self, ordinal: int, missing: Collection[int], parts: Mapping[int, _Part], now: float
    ) -> list[Action]:
        if not self._waited_for_missing(parts, now):
            return []
        return self._warn_once(
            "missing",
            f"checkpoint {ordinal} of rank(s) {rank_list(parts)} is not complete: rank(s) {rank_list(missing)} brought "
            "earlier ones, but not this one. It is committed when they bring it or finish.",
        )

    def _warn_of_written_off(
        self, ordinal: int, absent: Collection[int], parts: Mapping[int, _Part], now: float
    ) -> list[Action]:
        silent = [rank for rank in absent if not self._ranks[rank].last_index and not self._ranks[rank].finished]
        if not silent or not self._waited_for_missing(parts, now):
            return []
        return self._warn_once(
            "written off",
            f"checkpoint {ordinal} was committed without rank(s) {rank_list(silent)}, which have not called report() "
            f"for {self._missing_rank_s:g} s (CheckpointConfig.missing_rank_s).",
        )

    def _warn_of_differences(self, parts: Mapping[int, _Part]) -> list[Action]:
        kept: dict[str, tuple[int, int]] = {}
        for rank in sorted(parts):
            for path, size, crc32 in parts[rank].stored or ():
                kept.setdefault(path, (size, crc32))
        for rank in sorted(parts):
            for path, size, crc32 in (*parts[rank].skipped, *(parts[rank].stored or ())):
                if not path.endswith(self._incomparable) and kept.get(path, (size, crc32)) != (size, crc32):
                    return self._warn_once(
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


def _folders_of(files: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in files:
        folder = path.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found


def _why_dropped(parts: Mapping[int, _Part]) -> str | None:
    """Return the rest of the sentence "checkpoint 1 is dropped", or None if it can be committed."""
    for rank, part in parts.items():
        if part.failed is not None:
            return f", as rank {rank} could not store its part: {part.failed}"
    if len({part.in_place for part in parts.values()}) == 1:
        return None
    directories = ", ".join(f"{part.in_place or 'files to copy'} (rank {rank})" for rank, part in sorted(parts.items()))
    return (
        ": with CheckpointUploadMode.NO_UPLOAD, and with a checkpoint_upload_fn, all ranks that bring one must name "
        f"the same directory, and not {directories}"
    )
