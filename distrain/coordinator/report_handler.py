"""The coordinator's part of report(), barrier() and get_all_reported_checkpoints(). Runs in: coordinator.

:class:`ReportHandler` writes the reports to metrics.jsonl, has checkpoints stored and committed, and sends the answers
that ranks wait for. The decisions are made by :mod:`distrain.decisions`.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.api.observer import Committed, RankTrains, Reported, ReportsJoined, TroubleBegan, TroubleEnded
from distrain.decisions.barriers import BarrierTracker
from distrain.decisions.checkpoint_assembly import CheckpointAssembly, Drop, Proceed, Refuse, RequestFiles
from distrain.decisions.events import CheckpointsInProgress, ShowLine
from distrain.decisions.report_rows import RowAssembly
from distrain.hosts.troubles import Trouble
from distrain.storage import retention
from distrain.storage.checkpoint import DICT_FILE
from distrain.storage.commit import Commit, merged_positions, other_data
from distrain.storage.files import advice_on
from distrain.system.log import warn, warn_once
from distrain.system.loop import PausableClock
from distrain.system.text import is_full_disk, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from distrain.api.config import CheckpointConfig
    from distrain.api.observer import BecameSlow
    from distrain.coordinator.memory_rounds import MemoryRounds
    from distrain.coordinator.observers import Observers
    from distrain.coordinator.store.run_store import RunStore
    from distrain.coordinator.validations import Validations
    from distrain.decisions import checkpoint_assembly
    from distrain.storage.records import CommittedCheckpoint


_ACKNOWLEDGE_AFTER = wire.MOST_UNACKNOWLEDGED // 4
"""Reports of a rank after which it is sent an acknowledgement."""
_COMMIT_S = 10.0
"""Seconds more that a rank waits for a checkpoint that is being stored when the time for other ranks is over."""
_MOST_SLOW_SHOWN = 3
"""Ranks that become slow at the same time and get a line each; the slowest."""
_MOST_TROUBLES_SHOWN = 5
"""Troubles with memory and GPUs that get a line each. All GPUs of a run are often full at the same time."""
_INCOMPARABLE = (DICT_FILE, ".keras")
"""Equal tensors pickle to different bytes, and a ``.keras`` file holds the time at which it was written."""


@dataclass(slots=True)
class _Unsettled:
    """The n-th reports that have a checkpoint, until it is committed or dropped."""

    since: float
    """When the first report came, on the clock of the handler."""
    reports: dict[int, wire.Reported] = field(default_factory=dict)
    name: str | None = None
    """The name of the checkpoint's directory, if ranks have chosen one: all of them the same."""

    def add(self, report: wire.Reported) -> None:
        self.reports[report.rank] = report
        self.name = self.name or report.name

    @property
    def is_synced(self) -> bool:
        """True unless all ranks have reported their files with ASYNC, which can take long."""
        return any(report.waits or report.in_place or report.in_memory for report in self.reports.values())


@dataclass(eq=False)
class ReportHandler:
    """The reports of one attempt after the other.

    send: sends a message to a rank. upload: has the files of a rank stored by another process. lacks_storage: tells if
    the host of a rank does not see the storage. on_commit: called with the path of the checkpoint to restart from,
    whenever it changes; None if there is none left.
    clock: the time for which ranks wait for each other.
    """

    store: RunStore
    config: CheckpointConfig
    observers: Observers
    send: Callable[[wire.ToWorker], None]
    upload: Callable[[wire.Upload], None]
    on_commit: Callable[[str | None], None]
    validations: Validations
    memory: MemoryRounds
    lacks_storage: Callable[[int], bool] = lambda rank: False
    clock: PausableClock = field(default_factory=PausableClock)

    def __post_init__(self) -> None:
        self.last: dict[str, Any] | None = None
        """Rank 0's latest report: its line with all metrics."""
        self.validations.changed = self.after_change
        self._warned_of_score = False
        self.begin(-1, 0)

    def begin(self, attempt: int, world_size: int) -> None:
        """Begin a new attempt, and forget the unfinished checkpoints of the last one."""
        self._attempt = attempt
        self._first_step = 0 if self.store.latest is None else self.store.latest.step
        """The reports of a rank before those of this attempt, without those that the attempt repeats."""
        self._is_over = False
        self._world_size = world_size
        self._unsettled: dict[int, _Unsettled] = {}
        """By number of the report: the checkpoints that are neither committed nor dropped."""
        self._list_requests: list[tuple[wire.AskCheckpointList, float]] = []
        """Unanswered requests, and when each came."""
        self._list_deadline: float | None = None
        """When the first of these requests stops waiting for other ranks."""
        self._settled_up_to = (0.0, 0.0, 0.0, math.inf)
        """See :meth:`_find_settled`."""
        self._uploads: set[tuple[int, int]] = set()
        """Rank and ordinal of the files that uploaders are storing."""
        self._lost: set[int] = set()
        """The ranks whose hosts are lost."""
        self._unwritten: dict[tuple[int, int], RequestFiles] = {}
        """By rank and ordinal: orders for files in memory that are still being written."""
        similar = [saved for saved in self.store.committed if saved.world_size == world_size]
        self._assembly = CheckpointAssembly(
            world_size,
            self.config,
            incomparable=_INCOMPARABLE,
            silent=similar[-1].silent if similar else (),
            before=self._first_step,
        )
        self._start = -1 if self.store.latest is None else self.store.latest.index
        """The index of the checkpoint that the attempt has started from, if that is one of this run."""
        self._start_until = math.inf
        self._unheard = set(range(world_size))
        """The ranks that may still read the checkpoint that the attempt has started from."""
        self._bringing: dict[int, int] = {}
        """By rank that has reported a checkpoint, or has tried to: the number of the first such report."""
        self._barriers = BarrierTracker(attempt, world_size)
        self._rows = RowAssembly(world_size) if self.observers.hears(ReportsJoined) else None
        self.report_counts: dict[int, int] = {}
        """By rank: the number of reports in this attempt."""
        self._troubles_shown: set[tuple[int, str, str]] = set()
        self._unacknowledged: dict[int, int] = {}
        """By rank: the report to acknowledge as soon as it is written."""

    def handle(self, message: wire.FromWorker) -> None:
        """Handle a message from a rank of this attempt, or about its files; ignore it if it is about something else."""
        now = self.clock.now()
        if isinstance(message, (wire.Reported, wire.Outcome)):
            self._unheard.discard(message.rank)
        match message:
            case wire.Reported(failed=None):
                self._on_reported(message, now)
            case wire.Reported(rank=rank, index=index, has_checkpoint=has_checkpoint, failed=str(why)):
                self._count_report(rank, index)
                if has_checkpoint:
                    self._note_bringing(rank, index)
                self._do(self._assembly.failed(rank, index, why, now, has_checkpoint=has_checkpoint))
                self._add_to_row(rank, index, None, now)
            case wire.FilesCopied():
                if not self.memory.stored(message):
                    self._on_stored(message, now)
            case wire.PartWritten():
                self._on_written(message, now)
            case wire.CollectiveEntered():
                self._do(self._barriers.entered(message, now))
            case wire.AskCheckpointList():
                self._answer([(message, now)])
            case wire.Running(rank=rank):
                if self.memory.is_off:
                    self.send(wire.StoreInstead(attempt=message.attempt, rank=rank))
                self.observers.tell(RankTrains(rank, time.monotonic()))
                self._start_until = now + self.config.missing_rank_s
                self._do(self._assembly.running(rank, now))
            case wire.Vitals():
                self._on_slow(self.observers.status.heard_vitals(message, time.monotonic()))
            case wire.FetchCheckpoint(rank=rank):
                self._assembly.fetching(rank)
            case wire.Outcome(ok=False, rank=rank):
                self.rank_ended(rank)
            case wire.Outcome(rank=rank):
                self._do(self._assembly.finished(rank, now))
                self._do(self._barriers.finished(rank))
                if self._rows:
                    self._do(self._rows.finished(rank))
        if self._list_requests and self._find_settled() != self._settled_up_to:
            self._answer_list_requests()

    def fetched(self, rank: int) -> None:
        """Note that a rank has the files of the checkpoint for which it waited."""
        self._do(self._assembly.running(rank, self.clock.now()))

    def rank_ended(self, rank: int) -> None:
        """Note that the process of a rank has ended, or that it will report nothing more."""
        self._assembly.ended(rank)

    def host_lost(self, ranks: Collection[int]) -> None:
        """Note that the host of these ranks is lost: what it was storing for them never ends."""
        self._lost.update(ranks)
        self._uploads = {(rank, ordinal) for rank, ordinal in self._uploads if rank not in ranks}
        for rank in ranks:
            self.rank_ended(rank)

    def deadline(self) -> float | None:
        """Return when :meth:`tick` should be called if nothing else happens."""
        rows_due = self._rows.deadline() if self._rows else None
        moments = self._assembly.deadline(), rows_due, self._barriers.deadline(), self._list_deadline
        return self.clock.monotonic(min((moment for moment in moments if moment is not None), default=None))

    def tick(self) -> None:
        """Do whatever is due by now."""
        now = self.clock.now()
        self._do(self._assembly.tick(now))
        if self._rows:
            self._do(self._rows.tick(now))
        self._do(self._barriers.tick(now))
        self._answer_list_requests()

    @property
    def is_busy(self) -> bool:
        """True while files are stored for ranks."""
        return bool(self._uploads)

    def awaits_uploads(self) -> bool:
        """Return whether uploads are all that the next checkpoint waits for."""
        return self._assembly.awaits_only(self._uploads)

    def storing(self, failed: Collection[int], standing: Collection[int]) -> CheckpointsInProgress:
        """Return what other ranks store, or may still report, for checkpoints that don't need the ``failed`` ones.

        standing: the ranks that stand still, and so will not report.
        """
        parts = self._assembly.storing(failed, self._uploads)
        expected = self._assembly.expected(failed, self._uploads, self.clock.now())
        for rank in (*standing, *self._barriers.waiting):
            expected.pop(rank, None)
        return CheckpointsInProgress(parts, expected, self._assembly.time_for(expected))

    def awaits(self, ranks: Collection[int]) -> bool:
        """Return whether a checkpoint waits for files of these ranks."""
        return self._assembly.awaits(ranks)

    def end(self) -> None:
        """End the attempt: no rank will report again."""
        self._do(self._assembly.close(self.clock.now()))
        self._is_over = True
        self._delete_surplus()
        self._end_rows()

    def _end_rows(self) -> None:
        """Complete the rows of an attempt that is over, once its checkpoints are committed."""
        if self._rows and self._is_over and not self.store.is_committing:
            self._do(self._rows.end())

    def flush(self) -> None:
        """Have the reports written that have arrived, then acknowledge them."""
        reports, self._unacknowledged = self._unacknowledged, {}
        self.store.flush(partial(self._acknowledge, self._attempt, reports) if reports else None)

    def _acknowledge(self, attempt: int, reports: Mapping[int, int], _: object) -> None:
        if attempt == self._attempt:
            for rank, index in reports.items():
                self.send(wire.Acknowledged(attempt=attempt, rank=rank, index=index))

    # -- reports --------------------------------------------------------------------------------------------------

    def _on_reported(self, message: wire.Reported, now: float) -> None:
        rank, index = message.rank, message.index
        metrics: dict[str, Any] = json.loads(message.body)
        self._count_report(rank, index)
        line: dict[str, Any] = {"time": message.time, "attempt": message.attempt, "rank": rank, "index": index}
        if message.progress is not None:
            line["progress"] = message.progress
        if message.waited is not None:
            line["waits"] = message.waited
        self.store.append_metrics(line, metrics)
        if rank == 0:
            self.last = {**line, "metrics": metrics}
        number = self._first_step + index
        self.observers.tell(Reported(rank, index, number, metrics, message.progress, time.monotonic()))
        if message.has_checkpoint:
            self._note_bringing(rank, index)
            self._unsettled.setdefault(index, _Unsettled(now)).add(message)
        self._do(self._assembly.reported(message, metrics, now))
        self._add_to_row(rank, index, metrics, now)

    def _add_to_row(self, rank: int, index: int, metrics: dict[str, Any] | None, now: float) -> None:
        if self._rows:
            self._do(self._rows.reported(rank, index, metrics, now, has_checkpoint=index in self._unsettled))

    def _note_bringing(self, rank: int, index: int) -> None:
        if rank not in self._bringing:
            self._bringing[rank] = index
            self._disown(rank)

    def _disown(self, rank: int) -> None:
        """Give up the checkpoints of this attempt that were committed without a rank that is slow, and not silent.

        Those that it had none for are whole. The next attempt starts from the newest of them, or an earlier one.
        """
        first = self._first_step + self._bringing[rank]
        whole = [saved.index for saved in self.store.committed if saved.step < first]
        if lacking := self.store.disown(rank, after=max([self._start, *whole])):
            names = ", ".join(saved.path.name for saved in lacking)
            warn(f"{names} won't be used for restarts: rank {rank} saves checkpoints too, and its files are missing")
            latest = self.store.latest
            self.memory.drop_others()
            self.on_commit(None if latest is None else str(latest.path))

    def _count_report(self, rank: int, index: int) -> None:
        if index // _ACKNOWLEDGE_AFTER > self.report_counts.get(rank, 0) // _ACKNOWLEDGE_AFTER:
            self._unacknowledged[rank] = index
        self.report_counts[rank] = index

    def heard_troubles(self, host: str, message: wire.Troubles) -> None:
        """Show and record what is wrong with the memory and the GPUs of a host, or is over. A line appears once."""
        new, over = self.observers.status.heard_troubles(host, [Trouble(**fields) for fields in message.troubles])
        for one in new:
            if one.key not in self._troubles_shown:
                self._troubles_shown.add(one.key)
                self._show_trouble(f"rank {one.rank} on {host}: {one.text}")
            self.observers.tell(TroubleBegan(host, one))
        for one in over:
            self.observers.tell(TroubleEnded(host, one))

    def _show_trouble(self, text: str) -> None:
        if len(self._troubles_shown) <= _MOST_TROUBLES_SHOWN:
            warn(text)
        elif len(self._troubles_shown) == _MOST_TROUBLES_SHOWN + 1:
            warn("more ranks have troubles with memory or GPUs; events.jsonl names them")

    def _on_slow(self, slow: Sequence[BecameSlow]) -> None:
        """Show and record the ranks that have become slow."""
        for one in slow[:_MOST_SLOW_SHOWN]:
            warn(str(one))
        if more := slow[_MOST_SLOW_SHOWN:]:
            warn(f"{name_ranks([one.rank for one in more])} also became slow, but less so")
        for one in slow:
            self.observers.tell(one)

    def _on_stored(self, answer: wire.FilesCopied, now: float) -> None:
        rank, ordinal, failed = answer.rank, answer.ordinal, answer.failed
        self._uploads.discard((rank, ordinal))
        if failed is not None and is_full_disk(failed):
            why = f"rank {rank} cannot store a checkpoint in {self.store.location}"
            self.store.on_failure(f"{why}: {failed}{advice_on(failed)}")
        report = self._report(rank, ordinal)
        if report is not None and self._needs_uploader(report) and (failed is not None or not report.in_memory):
            self.send(wire.FilesStored(attempt=self._attempt, rank=rank, ordinal=ordinal, failed=failed))
        self._do(self._assembly.stored(answer, now))

    def _on_written(self, message: wire.PartWritten, now: float) -> None:
        """Continue with a part that was still being written to memory when it was reported."""
        report = self._report(message.rank, message.ordinal)
        if message.failed is None and report is not None:
            reports = self._unsettled[message.ordinal].reports
            reports[message.rank] = replace(report, is_written=True, facts=message.facts)
            if (order := self._unwritten.pop((message.rank, message.ordinal), None)) is not None:
                self._store_files(order)
        elif message.failed is not None:
            self.memory.short_of_memory(message.rank, message.failed)
            for rank in range(self._world_size):
                self.send(wire.StoreInstead(attempt=message.attempt, rank=rank))
            why, rank, ordinal = "its host cannot keep it in memory", message.rank, message.ordinal
            self._on_stored(wire.FilesCopied(attempt=message.attempt, rank=rank, ordinal=ordinal, failed=why), now)

    # -- actions --------------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[checkpoint_assembly.Action | wire.CollectiveDone | ReportsJoined]) -> None:
        for action in actions:
            match action:
                case RequestFiles():
                    self._store_files(action)
                case Refuse(rank, ordinal, why):
                    del self._unsettled[ordinal].reports[rank]
                    if not self._unsettled[ordinal].reports:
                        del self._unsettled[ordinal]
                    self.send(wire.FilesStored(attempt=self._attempt, rank=rank, ordinal=ordinal, failed=why))
                case Commit():
                    self._commit(action)
                case Drop(ordinal):
                    for rank in self._unsettled[ordinal].reports if ordinal in self._unsettled else ():
                        self._send_done(rank, ordinal)
                    self._settle(ordinal, None)
                case Proceed(rank, ordinal):
                    self.send(wire.FilesStored(attempt=self._attempt, rank=rank, ordinal=ordinal))
                case wire.CollectiveDone():
                    self.send(action)
                case ReportsJoined():
                    self.observers.tell(action)
                case ShowLine(text):
                    warn(text)

    def _needs_uploader(self, report: wire.Reported) -> bool:
        """Return whether an uploader or a mover stores the files, and not the worker itself."""
        return not report.waits or self.store.is_remote or self.lacks_storage(report.rank)

    def _store_files(self, action: RequestFiles) -> None:
        """Have files of a rank stored, once there is a directory for them."""
        self.flush()  # when report() returns, it is written
        rank, ordinal = action.rank, action.ordinal
        unsettled = self._unsettled[ordinal]
        report = unsettled.reports[rank]
        if report.in_memory and not report.is_written:
            self._unwritten[rank, ordinal] = action
            return
        if self._needs_uploader(report):
            if rank in self._lost:
                return
            self._uploads.add((rank, ordinal))
        if report.in_memory and not action.from_memory:
            self.memory.hash(report, action.files)
            return
        order = partial(self._order_copy, self._attempt, action)
        if report.in_place:
            order(report.folder)
        else:
            self.store.prepare(self._attempt, ordinal, name=unsettled.name, then=order)

    def _order_copy(self, attempt: int, action: RequestFiles, directory: str) -> None:
        """Tell the worker or the uploader of its host to copy the files into ``directory``."""
        rank, ordinal, files = action.rank, action.ordinal, list(action.files)
        report, ordered = self._report(rank, ordinal), frozenset(files)
        if attempt != self._attempt or report is None:
            return
        if not self._needs_uploader(report):
            self.send(wire.CopyFiles(attempt=attempt, rank=rank, ordinal=ordinal, directory=directory, files=files))
            return
        self.upload(
            wire.Upload(
                attempt=attempt,
                rank=rank,
                ordinal=ordinal,
                source="" if report.in_place else report.folder,
                files=files,
                others=[path for path in report.files if path not in ordered],
                directory=directory,
                facts={} if report.in_memory else report.facts or {},
            )
        )

    def _report(self, rank: int, ordinal: int) -> wire.Reported | None:
        """Return the report that this part of a checkpoint came with, unless it was refused."""
        unsettled = self._unsettled.get(ordinal)
        return None if unsettled is None else unsettled.reports.get(rank)

    def _commit(self, commit: Commit) -> None:
        """Make the files of all ranks a checkpoint."""
        unsettled = self._unsettled[commit.ordinal]
        reports = [unsettled.reports[rank] for rank in commit.ranks]
        of = [self._attempt, reports[0].index]
        validation = next(({**report.validation, "report": of} for report in reports if report.validation), None)
        folder = reports[0].folder if reports[0].in_place else None
        then = partial(self._on_committed, self._attempt, commit)
        positions = {report.rank: report.positions or {} for report in reports}
        if warning := other_data(positions):
            warn_once(warning)
        to_memory = partial(self.memory.publish, unsettled.reports, keeps_start=self._is_start_read())
        self.store.commit(
            self._attempt,
            commit,
            name=unsettled.name,
            folder=folder,
            step=self._first_step + reports[0].index,
            progress=reports[0].progress,
            validation=validation,
            positions=merged_positions(positions),
            to_memory=to_memory if all(report.in_memory for report in reports) else None,
            then=then,
        )

    def _on_committed(self, attempt: int, commit: Commit, saved: CommittedCheckpoint) -> None:
        """Tell the ranks, and only then delete checkpoints that are no longer kept."""
        latest, ranks = self.store.committed[-1], frozenset(commit.ranks)  # a newer one may have been committed faster
        path = str(latest.path)
        self.on_commit(path)
        unsettled = self._unsettled[commit.ordinal] if attempt == self._attempt else None
        since = unsettled.since if unsettled else self.clock.now()
        self.observers.tell(
            Committed(
                attempt=attempt,
                name=saved.path.name,
                index=saved.index,
                step=saved.step,
                bytes=sum(file.size for file in commit.files),
                seconds=round(self.clock.now() - since, 3),
                ranks=commit.ranks,
                metrics=saved.metrics,
                checkpoint=saved.checkpoint,
                is_in_memory=saved.is_in_memory,
                now=time.monotonic(),
            )
        )
        if attempt == self._attempt:
            for rank in range(self._world_size):
                self._send_done(rank, commit.ordinal, path, has_files=rank in ranks)
            self._settle(commit.ordinal, saved)
            self._end_rows()
            self._do(self._assembly.committed(commit.ordinal, self.clock.now()))
        if saved.is_pending:
            self.validations.add(saved)
        if self.memory.is_off and not (latest.is_in_memory or self._is_start_read()):
            self.memory.free_all()
        for rank in self._bringing.keys() & saved.silent:  # it came while this was committed
            self._disown(rank)
        self.after_change()

    def _send_done(self, rank: int, ordinal: int, path: str = "", *, has_files: bool = False) -> None:
        self.send(wire.CommitDone(attempt=self._attempt, rank=rank, ordinal=ordinal, path=path, has_files=has_files))

    def _settle(self, ordinal: int, saved: CommittedCheckpoint | None) -> None:
        """Note that a checkpoint is committed, or (None) dropped."""
        self._unsettled.pop(ordinal, None)  # it has none if report() has failed on all ranks
        if self._rows:
            self._do(self._rows.settled(ordinal, saved.checkpoint if saved else None))

    # -- which checkpoints are kept -------------------------------------------------------------------------------

    def after_change(self) -> None:
        """Act on a checkpoint that was committed or stored, or whose validation has ended."""
        self._warn_of_missing_scores()
        self._delete_surplus()
        self._answer_list_requests()

    def _delete_surplus(self) -> None:
        stored = [saved for saved in self.store.committed if not saved.is_in_memory]
        doubtful = {n for n, saved in enumerate(stored) if saved.silent}
        surplus = retention.surplus([saved.metrics for saved in stored], self.config, doubtful)
        self.store.delete([stored[n] for n in surplus if not self._is_needed(stored[n])])

    def _is_needed(self, saved: CommittedCheckpoint) -> bool:
        return self.validations.awaits(saved) or (saved.index == self._start and self._is_start_read())

    def _is_start_read(self) -> bool:
        """Return whether a rank that has not reported yet may read the checkpoint that the attempt has started from."""
        return bool(self._unheard) and not self._is_over and self.clock.now() < self._start_until

    def _warn_of_missing_scores(self) -> None:
        """Warn once, of the first checkpoint without a score whose validation can no longer add one."""
        attribute = self.config.checkpoint_score_attribute
        if attribute is None or self._warned_of_score:
            return
        for saved in self.store.committed:
            if not (self.validations.awaits(saved) or retention.has_metric(saved.metrics, attribute)):
                self._warned_of_score = True
                known = ", ".join(sorted(retention.flatten(saved.metrics))) or "no metrics at all"
                warn(
                    f"{saved.path.name} has no metric {attribute!r} (CheckpointConfig.checkpoint_score_attribute), so "
                    f"it counts as the worst; its metrics: {known}"
                )
                return

    # -- lists of checkpoints -------------------------------------------------------------------------------------

    def _answer_list_requests(self) -> None:
        """Answer the ranks that have waited long enough."""
        if self._list_requests:
            requests, self._list_requests, self._list_deadline = self._list_requests, [], None
            self._answer(requests)

    def _answer(self, requests: Sequence[tuple[wire.AskCheckpointList, float]]) -> None:
        """Answer these requests, or have them wait.

        A rank waits for its own checkpoints, and for those of other ranks up to the report that it has made itself.
        It waits for ranks with fewer reports no longer than ``missing_rank_s``, and with ``synced`` for nothing longer.
        """
        now = self.clock.now()
        self._settled_up_to = self._find_settled()
        validating = any(map(self.validations.awaits, self.store.committed))
        patience_s = self.config.missing_rank_s + _COMMIT_S * (self.store.is_committing or self.awaits_uploads())
        body = b""
        for request, since in requests:
            reports = self.report_counts.get(request.rank, 0)
            settled, settled_synced, settled_soon, head_start_ends = self._settled_up_to
            if request.synced:
                settled = settled_soon if now >= head_start_ends else settled_synced
            limit = since + patience_s
            others = now < limit and reports > settled
            own = not request.synced and any(
                request.rank in unsettled.reports for unsettled in self._unsettled.values()
            )
            if (others or own or (request.validated and validating)) and not request.at_once:
                self._list_requests.append((request, since if others else -math.inf))
                if others:
                    due = min(limit, head_start_ends if now < head_start_ends else limit)
                    self._list_deadline = min(due, self._list_deadline or due)
                continue
            body = body or self._checkpoint_list()
            self.send(wire.CheckpointList(attempt=request.attempt, rank=request.rank, index=request.index, body=body))
            if request.synced and now >= limit and reports > settled:
                self._do(self._assembly.write_off_laggards(reports))

    def _find_settled(self) -> tuple[float, float, float, float]:
        """Return the number of reports up to which the checkpoints of all ranks are committed or dropped.

        The second number leaves out checkpoints that ASYNC stores. The third one also leaves out ranks that have made
        no report; it counts when the head start of the others, the last number, is over.
        """
        first = min(self._unsettled, default=math.inf)
        first_synced = min((n for n, unsettled in self._unsettled.items() if unsettled.is_synced), default=math.inf)
        fewest, fewest_soon = self._assembly.fewest_reports()
        settled = [min(fewest, first - 1), min(fewest, first_synced - 1), min(fewest_soon, first_synced - 1)]
        return settled[0], settled[1], settled[2], self._assembly.head_start_ends

    def _checkpoint_list(self) -> bytes:
        checkpoints = [
            {
                "path": str(saved.path),
                "metrics": saved.metrics,
                "status": saved.validation["status"] if saved.validation else "COMMITTED",
            }
            for saved in self.store.committed
        ]
        return json.dumps(checkpoints).encode()
