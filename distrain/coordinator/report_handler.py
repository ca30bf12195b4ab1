"""What the ranks report, kept: metrics.jsonl, committed checkpoints, and the answers that ranks wait for.

Runs in: coordinator.
"""

from __future__ import annotations

import json
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.checkpoint import DICT_FILE
from distrain.coordinator.worker_output import ReportLines
from distrain.decisions import barriers, checkpoint_assembly, events, report_rows
from distrain.storage import retention
from distrain.storage.commit import Commit
from distrain.storage.files import full_disk_hint, is_full_disk
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from distrain.checkpoint import Checkpoint
    from distrain.config import CheckpointConfig
    from distrain.coordinator.callbacks import Callbacks
    from distrain.coordinator.validations import Validations
    from distrain.storage.records import CommittedCheckpoint
    from distrain.storage.run_store import RunStore

_ACKNOWLEDGED_AT_ONCE = wire.MOST_UNACKNOWLEDGED // 4
_INCOMPARABLE = (DICT_FILE, ".keras")
"""Equal tensors pickle to different bytes, and a ``.keras`` file holds the time at which it was written."""


class ReportHandler:
    """The reports of one attempt after the other.

    tell: sends a message to a rank. upload: has its host store a rank's files, or delete them. saved: hears the path
    of every checkpoint that was committed.
    """

    def __init__(
        self,
        store: RunStore,
        config: CheckpointConfig,
        *,
        tell: Callable[[wire.ToWorker], None],
        upload: Callable[[wire.Upload | wire.Clear], None],
        saved: Callable[[str], None],
        callbacks: Callbacks | None = None,
        validations: Validations,
    ) -> None:
        self.metrics: dict[str, Any] | None = None
        """Rank 0's last report."""
        self._store = store
        self._config = config
        self._tell = tell
        self._upload = upload
        self._saved = saved
        self._callbacks = callbacks
        self._validations = validations
        validations.changed = self._after_change
        self._lines = ReportLines()
        self._complained = False
        self.begin(-1, 0)

    def begin(self, attempt: int, world_size: int) -> None:
        """A new attempt; nobody will hear of the last one's open rounds."""
        self._attempt = attempt
        self._is_over = False
        self._world_size = world_size
        self._announced: dict[tuple[int, int], wire.Reported] = {}
        """What a rank has said of its n-th checkpoint."""
        self._open: dict[tuple[int, int], int] = {}
        """Which of them are neither committed nor dropped: the index of the report, by rank and ordinal."""
        self._asks: list[tuple[wire.AskCheckpointList, float]] = []
        """Unanswered questions, and until when each waits for other ranks (time.monotonic)."""
        self._uploads: set[tuple[int, int]] = set()
        """Ranks and ordinals of what uploaders are bringing, or deleting."""
        self._granted: dict[tuple[int, int], wire.Upload] = {}
        """What uploaders were to bring whose source is to be deleted."""
        self._rounds = checkpoint_assembly.CheckpointAssembly(world_size, self._config, incomparable=_INCOMPARABLE)
        self._collectives = barriers.BarrierTracker(world_size)
        self._rows = report_rows.RowAssembly(world_size) if self._callbacks else None
        self.reports: dict[int, int] = {}
        """How many each rank has made in this attempt."""
        self._acknowledged: dict[int, int] = {}
        self._unacknowledged: dict[int, int] = {}
        """The last report of each rank that waits to hear that its reports are kept, or soon will."""

    def handle(self, message: wire.FromWorker) -> None:
        """What a rank of this attempt said; messages that are not about reports are passed over."""
        now = time.monotonic()
        match message:
            case wire.Reported():
                self._on_reported(message, now)
            case wire.FilesCopied():
                self._uploads.discard((message.rank, message.ordinal))
                if message.failed is not None and is_full_disk(message.failed):
                    why = f"rank {message.rank} cannot store checkpoint {message.ordinal} in {self._store.location}"
                    self._store.on_failure(f"{why}: {message.failed}{full_disk_hint(message.failed)}")
                if self._by_uploader(self._announced[message.rank, message.ordinal]):
                    self._tell(
                        wire.UploadDone(
                            attempt=message.attempt, rank=message.rank, ordinal=message.ordinal, failed=message.failed
                        )
                    )
                parts = (message.rank, message.ordinal, message.files, message.skipped)
                self._decide(self._rounds.delivered(*parts, now, message.failed))
            case wire.Discarded():
                self._uploads.discard((message.rank, message.ordinal))
                self._decide(self._rounds.discarded(message.rank, message.ordinal, now, message.failed))
            case wire.CollectiveEntered():
                call = (message.rank, message.index, message.operation, message.body)
                self._answer(self._collectives.joined(*call, now, message.timeout_s))
            case wire.AskCheckpointList():
                self._asks.append((message, now + self._config.missing_rank_s))
            case wire.Running():
                self._rounds.running(message.rank, now)
            case wire.Outcome(ok=True):
                self._decide(self._rounds.finished(message.rank, now))
                self._answer(self._collectives.finished(message.rank))
                if self._rows:
                    self._call_back(self._rows.finished(message.rank))
        self._answer_asks()

    def deadline(self) -> float | None:
        """When :meth:`tick` should be called if nothing else happens."""
        rows_due = self._rows.deadline() if self._rows else None
        moments = [self._rounds.deadline(), self._collectives.deadline(), self._lines.deadline(), rows_due]
        moments += [until for _, until in self._asks if until < math.inf]
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self) -> None:
        now = time.monotonic()
        self._decide(self._rounds.tick(now))
        if self._rows:
            self._call_back(self._rows.tick(now))
        late = self._collectives.tick(now)
        self._answer([answer for answer in late if isinstance(answer, barriers.Answer)])
        for notice in late:
            if isinstance(notice, barriers.Late):
                warn(notice.text)
        if (due := self._lines.deadline()) is not None and now >= due:
            self._lines.flush(now)
        self._answer_asks()

    def awaits_uploads(self, lost: Collection[int] = ()) -> bool:
        """Whether a checkpoint would be committed, were the attempt not over before uploaders have brought it; those of
        the hosts of ``lost`` ranks never will.
        """
        uploads = {(rank, ordinal) for rank, ordinal in self._uploads if rank not in lost}
        return self._rounds.awaits_only(uploads, time.monotonic())

    def storing(self, failed: Collection[int]) -> events.Storing:
        """Return what other ranks store, or may bring, for checkpoints that need nothing more from ``failed`` ones."""
        parts = self._rounds.storing(failed, self._uploads, time.monotonic())
        return events.Storing(parts, self._rounds.expected(failed, self._uploads))

    def awaits(self, ranks: Collection[int], *, ends: bool) -> bool:
        """Whether a checkpoint waits for what the hosts of these ranks do with their files; ``ends``: the attempt does,
        so that it does not wait for the deletion of local ones.
        """
        return self._rounds.awaits(ranks, ends=ends)

    def end(self) -> None:
        """The attempt is over: no rank will report again."""
        now = time.monotonic()
        self._decide(self._rounds.close(now))
        self._lines.flush(now)
        self._is_over = True
        self._end_rows()

    def _end_rows(self) -> None:
        """Complete the rows of an attempt that is over, once its checkpoints are committed."""
        if self._rows and self._is_over and not self._store.is_committing:
            self._call_back(self._rows.end())

    def flush(self) -> None:
        """Have the reports written that have come, and tell the ranks whose reports those were."""
        reports, self._unacknowledged = self._unacknowledged, {}
        self._store.flush(partial(self._acknowledge, self._attempt, reports) if reports else None)

    def _acknowledge(self, attempt: int, reports: Mapping[int, int], _: object) -> None:
        if attempt == self._attempt:
            self._acknowledged |= reports
            for rank, index in reports.items():
                self._tell(wire.Acknowledged(attempt=attempt, rank=rank, index=index))

    def close(self) -> None:
        self._lines.flush(time.monotonic())
        self.flush()

    # -- reports and checkpoints ----------------------------------------------------------------------------------

    def _on_reported(self, message: wire.Reported, now: float) -> None:
        metrics: dict[str, Any] = json.loads(message.body)
        self.reports[message.rank] = message.index
        if message.index >= self._acknowledged.get(message.rank, 0) + _ACKNOWLEDGED_AT_ONCE:
            self._unacknowledged[message.rank] = message.index
        line = {"time": message.time, "attempt": message.attempt, "rank": message.rank, "index": message.index}
        self._store.append_metrics(line, metrics)
        if message.rank == 0:
            self.metrics = metrics
            self._lines.report(message.index, metrics, now)
        files = [path for path, _ in message.files]
        if message.ordinal is not None:
            self._announced[message.rank, message.ordinal] = message
            self._open[message.rank, message.ordinal] = message.index
        if self._rows:
            self._call_back(self._rows.reported(message.rank, message.index, metrics, message.ordinal, now))
        source = checkpoint_assembly.Source(
            folder=message.real,
            deletes=message.delete,
            waits=message.waits,
            in_place=message.mode == "NO_UPLOAD",
        )
        self._decide(self._rounds.reported(message.rank, message.index, metrics, message.ordinal, files, now, source))

    def _decide(self, decisions: Sequence[checkpoint_assembly.Decision]) -> None:
        for decision in decisions:
            match decision:
                case checkpoint_assembly.CopyFiles(rank, ordinal, files):
                    self.flush()  # report() returns after this
                    self._grant(rank, ordinal, files)
                case checkpoint_assembly.Discard(rank, ordinal, at_once):
                    self._discard(rank, ordinal, at_once=at_once)
                case checkpoint_assembly.Refuse(rank, ordinal, why):
                    self._open.pop((rank, ordinal), None)
                    self._refuse(rank, ordinal, why)
                case Commit():
                    self._commit(decision)
                case checkpoint_assembly.Drop(ordinal):
                    self._settled(ordinal, None)
                case checkpoint_assembly.Say(text):
                    warn(text)

    def _by_uploader(self, said: wire.Reported) -> bool:
        """Whether the files are brought by an uploader, and not by the worker itself."""
        return not said.waits or self._store.is_remote

    def _grant(self, rank: int, ordinal: int, files: tuple[str, ...]) -> None:
        """Have these of a rank's files stored, by itself or by an uploader."""
        said = self._announced[rank, ordinal]
        if self._by_uploader(said):
            self._uploads.add((rank, ordinal))
        if said.mode != "NO_UPLOAD":
            then = partial(self._hand_over, self._attempt, rank, ordinal, files, said.folder)
            self._store.prepare(self._attempt, ordinal, rank, name=self._name(ordinal), then=then)
        elif rank == min(part.rank for part in self._said(ordinal) if part.mode == "NO_UPLOAD"):
            self._hand_over(self._attempt, rank, ordinal, files, "", said.folder)
        else:  # the lowest rank's host looks at all files
            self._deliver_nothing(rank, ordinal)

    def _hand_over(
        self, attempt: int, rank: int, ordinal: int, files: tuple[str, ...], source: str, target: str
    ) -> None:
        """Order what was granted, now that there is a directory for it."""
        said = self._announced.get((rank, ordinal))
        if attempt != self._attempt or said is None:
            return
        if not self._by_uploader(said):
            self._tell(wire.CopyFiles(attempt=attempt, rank=rank, ordinal=ordinal, directory=target, files=list(files)))
            return
        upload = wire.Upload(
            attempt=attempt,
            rank=rank,
            ordinal=ordinal,
            source=source,
            files=list(files),
            others=[path for path, _ in said.files if path not in set(files)],
            directory=target,
            delete=said.delete,
        )
        if said.delete and source and not said.waits:
            self._granted[rank, ordinal] = upload
        self._upload(upload)

    def _deliver_nothing(self, rank: int, ordinal: int) -> None:
        self.handle(wire.FilesCopied(attempt=self._attempt, rank=rank, ordinal=ordinal, files=[], skipped=[]))

    def _discard(self, rank: int, ordinal: int, *, at_once: bool) -> None:
        """The worker itself does it, if it waits."""
        upload = self._granted.pop((rank, ordinal), None)
        if upload is None:
            self._tell(wire.Discard(attempt=self._attempt, rank=rank, ordinal=ordinal, at_once=at_once))
            return
        self._uploads.add((rank, ordinal))
        self._upload(
            wire.Clear(
                attempt=self._attempt,
                rank=rank,
                ordinal=ordinal,
                source=upload.source,
                directory="" if self._store.is_remote else upload.directory,
                files=upload.files,
            )
        )

    def _refuse(self, rank: int, ordinal: int, why: str) -> None:
        if self._by_uploader(self._announced[rank, ordinal]):
            self._tell(wire.UploadDone(attempt=self._attempt, rank=rank, ordinal=ordinal, failed=why))
        else:
            self._tell(
                wire.CopyFiles(attempt=self._attempt, rank=rank, ordinal=ordinal, directory="", files=[], refused=why)
            )

    def _name(self, ordinal: int) -> str | None:
        """What the checkpoint's directory is to be called: what the lowest rank says that says something."""
        return next((part.name for part in self._said(ordinal) if part.name), None)

    def _said(self, ordinal: int) -> list[wire.Reported]:
        """What the ranks say of a checkpoint, the lowest first."""
        return [self._announced[key] for key in sorted(self._announced) if key[1] == ordinal]

    def _commit(self, commit: Commit) -> None:
        """Make it a checkpoint, tell everybody, and only then delete what is superfluous now."""
        name = self._name(commit.ordinal)
        validation = next((part.validation for part in self._said(commit.ordinal) if part.validation), None)
        said = [self._announced.pop((rank, commit.ordinal)) for rank in commit.ranks]
        in_place = {part.folder if part.mode == "NO_UPLOAD" else None for part in said}
        if len(in_place) > 1:
            warn(
                f"checkpoint {commit.ordinal} is dropped: with CheckpointUploadMode.NO_UPLOAD, and with a "
                "checkpoint_upload_fn, all ranks that bring one must name the same directory, and not "
                + ", ".join(
                    f"{part.folder if part.mode == 'NO_UPLOAD' else part.mode} (rank {part.rank})" for part in said
                )
            )
            self._settled(commit.ordinal, None)
            return
        then = partial(self._committed, self._attempt, commit.ordinal)
        self._store.commit(self._attempt, commit, name=name, folder=in_place.pop(), validation=validation, then=then)

    def _committed(self, attempt: int, ordinal: int, saved: CommittedCheckpoint) -> None:
        path = str(saved.path)
        self._saved(path)
        if attempt == self._attempt:
            for rank in range(self._world_size):
                self._tell(wire.CheckpointCommitted(attempt=attempt, rank=rank, ordinal=ordinal, path=path))
            self._settled(ordinal, saved.checkpoint)
            self._end_rows()
        if saved.is_pending:
            self._validations.add(saved)
        self._after_change()

    def _after_change(self) -> None:
        self._warn_of_missing_scores()
        self._delete_surplus()
        self._answer_asks()

    def _settled(self, ordinal: int, checkpoint: Checkpoint | None) -> None:
        self._open = {part: index for part, index in self._open.items() if part[1] != ordinal}
        if self._rows:
            self._call_back(self._rows.settled(ordinal, checkpoint))

    def _delete_surplus(self) -> None:
        kept = [committed.metrics for committed in self._store.committed]
        pending = {n for n, saved in enumerate(self._store.committed) if self._validations.awaits(saved)}
        self._store.delete([n for n in retention.surplus(kept, self._config) if n not in pending])

    def _warn_of_missing_scores(self) -> None:
        """Once, with the first checkpoint from whose validation nothing more can come."""
        attribute = self._config.checkpoint_score_attribute
        if attribute is None or self._complained:
            return
        for saved in self._store.committed:
            if not (self._validations.awaits(saved) or retention.has_metric(saved.metrics, attribute)):
                self._complained = True
                known = ", ".join(sorted(retention.flatten(saved.metrics))) or "no metrics at all"
                warn(
                    f"{saved.path.name} has no metric {attribute!r} (CheckpointConfig.checkpoint_score_attribute), and "
                    f"counts as the worst; it has: {known}"
                )
                return

    # -- which checkpoints there are ------------------------------------------------------------------------------

    def _answer_asks(self) -> None:
        """Answer the ranks whose own checkpoints are settled, and those of other ranks up to the report that the rank
        has reached itself. Other ranks that do not get there are waited for no longer than a missing rank.
        """
        if not self._asks:
            return
        asks, self._asks, now = self._asks, [], time.monotonic()
        settled_up_to = min(self._rounds.fewest_reports(), *(index - 1 for index in self._open.values()), math.inf)
        validating = any(map(self._validations.awaits, self._store.committed))
        for ask, until in asks:
            others = now < until < math.inf and self.reports.get(ask.rank, 0) > settled_up_to
            own = any(rank == ask.rank for rank, _ in self._open)
            if (others or own or (ask.validated and validating)) and not ask.at_once:
                self._asks.append((ask, until if others else math.inf))
            else:
                self._tell(
                    wire.CheckpointList(attempt=ask.attempt, rank=ask.rank, index=ask.index, body=self._listing())
                )

    def _listing(self) -> bytes:
        known = [
            {
                "path": str(saved.path),
                "metrics": saved.metrics,
                "status": saved.validation["status"] if saved.validation else "COMMITTED",
            }
            for saved in self._store.committed
        ]
        return json.dumps(known).encode()

    # -- callbacks ------------------------------------------------------------------------------------------------

    def _call_back(self, complete: Sequence[report_rows.ReportRow]) -> None:
        assert self._callbacks is not None
        for row in complete:
            self._callbacks.after_report(row.metrics, row.checkpoint)

    # -- collectives ----------------------------------------------------------------------------------------------

    def _answer(self, answers: Sequence[barriers.Answer]) -> None:
        for answer in answers:
            self._tell(
                wire.CollectiveDone(
                    attempt=self._attempt,
                    rank=answer.rank,
                    index=answer.index,
                    body=answer.data,
                    refused=answer.refused,
                )
            )
