"""The life of every checkpoint of a run, from the first rank that reports it to its deletion. Runs in: coordinator.

Pure: no I/O; ``now`` is an argument, in seconds of a clock that stands still while somebody debugs a rank.

=========== =================================================================== ==========================
state       what happens                                                        next
=========== =================================================================== ==========================
joining     ranks report their parts; the files are stored, or hashed in memory committing, gone (dropped)
committing  all parts are there; the manifest is written                        in memory, stored
in memory   ranks may go on; other hosts copy it; a restart gathers it          storing, gone
storing     the same, while its files go to the storage                         stored, in memory, gone
stored      restarts may begin from it                                          gone
gone        dropped, superseded, lost, given up as incomplete or suspect, or deleted as surplus
=========== =================================================================== ==========================

:mod:`~distrain.decisions.checkpoints.assembly` has those that are joining, for one attempt;
:mod:`~distrain.decisions.checkpoints.ledger` all others; :mod:`~distrain.decisions.checkpoints.rounds` what the hosts
have in memory. Here, they meet: :class:`Checkpoints` is all that others know.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.api.observer import Committed
from distrain.decisions.checkpoints.actions import (
    Answered,
    BringTo,
    FindOther,
    MakeDirectory,
    NewStart,
    Publish,
    RolledBack,
    RunBegins,
    RunEnds,
    Settled,
    StorageFails,
    Store,
    StoreLast,
    Tick,
    Validate,
    Validated,
    VerifyLatest,
)
from distrain.decisions.checkpoints.assembly import CheckpointAssembly, Drop, Proceed, Refuse, RequestFiles
from distrain.decisions.checkpoints.rounds import Rounds
from distrain.decisions.events import (
    AttemptEnded,
    AttemptStarts,
    CheckpointsInProgress,
    HostLost,
    RollBack,
    SendMessage,
    ShowLine,
)
from distrain.decisions.hearing import handlers_of, hears
from distrain.storage import retention
from distrain.storage.commit import Commit, committed, merged_positions, new_manifest, other_data
from distrain.storage.names import DICT_FILE
from distrain.system.text import advice_on, is_full_disk

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from distrain.decisions.checkpoints import assembly
    from distrain.decisions.checkpoints.actions import Action, Event
    from distrain.decisions.checkpoints.ledger import Ledger
    from distrain.decisions.checkpoints.site import Site
    from distrain.storage.commit import CommittedCheckpoint
    from distrain.system.remote_path import RemotePath

_COMMIT_S = 10.0
"""Seconds more that a rank waits for a checkpoint that is being stored when the time for other ranks is over."""
_INCOMPARABLE = (DICT_FILE, ".keras")
"""Equal tensors pickle to different bytes, and a ``.keras`` file holds the time at which it was written."""


@dataclass(slots=True)
class _Joining:
    """The n-th reports that have a checkpoint, until it is committed or dropped.

    since: when the first report came.
    """

    since: float
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


class Checkpoints:
    """All checkpoints of a run. See the description of the module."""

    def __init__(self, ledger: Ledger, site: Site) -> None:
        self.ledger, self.site, self.config = ledger, site, site.config
        self.rounds = Rounds(ledger, site, self._emit, self._on_round_change)
        ledger.emit = self._emit
        self.now = 0.0
        self.is_verifying = self.is_gathering = False
        """True until it is known whether the checkpoint to start from is intact, and while hosts gather it."""
        self._foreign = site.checkpoint if ledger.latest is None else None
        """The checkpoint of another run from which this run has started, before it had one itself."""
        self.start = site.checkpoint
        """Where a restart would begin."""
        self._is_doubtful = False
        """True if ranks have raised before any report: perhaps the checkpoint that they loaded is damaged."""
        self._has_queued_validations = False
        self._handlers = handlers_of(self.rounds) | handlers_of(self)
        self._actions: list[Action] = []
        self._open_commits = 0
        self._warned_of_score = False
        self._begin(-1, 0)

    def handle(self, event: Event, now: float, host: str = "") -> list[Action]:
        """Note that something has happened, and return what has to be done about it.

        host: the one that a message is from.
        """
        self.now = self.rounds.now = now
        self._handlers[type(event)](host, event)
        if self._requests and self._find_settled() != self._settled_up_to:
            self._answer_requests()
        actions, self._actions = self._actions, []
        return actions

    def _emit(self, action: Action) -> None:
        self._actions.append(action)

    def _tell(self, message: wire.ToWorker) -> None:
        self._emit(SendMessage(self.site.host_of(message.rank), message))

    def _tell_all(self, kind: type[wire.ToWorker], **fields: Any) -> None:
        for rank in range(self._world_size):
            self._tell(kind(attempt=self._attempt, rank=rank, **fields))

    @property
    def kinds(self) -> AbstractSet[type]:
        """The kinds of messages and events that belong to this part."""
        return self._handlers.keys()

    @hears(Answered)
    def _on_answer(self, _: str, event: Answered) -> None:
        event.then(*event.values)

    # -- an attempt -----------------------------------------------------------------------------------------------

    @hears(AttemptStarts)
    def _on_attempt_starts(self, _: str, starts: AttemptStarts) -> None:
        self._begin(starts.attempt, len(starts.plan.ranks))
        self._gather()
        if self._is_doubtful and self.ledger.latest is not None and not self.is_gathering:
            self._verify()

    def _begin(self, attempt: int, world_size: int) -> None:
        """Begin an attempt, and forget the unfinished checkpoints of the last one."""
        latest = self.ledger.latest
        self._attempt, self._world_size, self.is_over = attempt, world_size, False
        self.first_step = 0 if latest is None else latest.step
        """The reports of a rank before those of this attempt, without those that the attempt repeats."""
        self._joining: dict[int, _Joining] = {}
        """By number of the report: the checkpoints that are neither committed nor dropped."""
        self._requests: list[tuple[wire.AskCheckpointList, float]] = []
        """Unanswered requests for lists of checkpoints, and when each came."""
        self._answer_at: float | None = None
        """When the first of these requests stops waiting for other ranks."""
        self._settled_up_to = (0.0, 0.0, 0.0, math.inf)
        """See :meth:`_find_settled`."""
        self._uploads: set[tuple[int, int]] = set()
        """Rank and ordinal of the files that uploaders are storing."""
        self._lost: set[int] = set()
        """The ranks whose hosts are lost."""
        self._unwritten: dict[tuple[int, int], RequestFiles] = {}
        """By rank and ordinal: orders for files in memory that are still being written."""
        similar = [saved for saved in self.ledger.all if saved.world_size == world_size]
        self._assembly = CheckpointAssembly(
            world_size,
            self.config,
            incomparable=_INCOMPARABLE,
            silent=similar[-1].silent if similar else (),
            before=self.first_step,
        )
        self._start = -1 if latest is None else latest.index
        """The index of the checkpoint that the attempt has started from, if that is one of this run."""
        self._start_until = math.inf
        self._unheard = set(range(world_size))
        """The ranks that may still read the checkpoint that the attempt has started from."""
        self._bringing: dict[int, int] = {}
        """By rank that has reported a checkpoint, or has tried to: the number of the first such report."""

    @hears(AttemptEnded)
    def _on_attempt_ended(self, _: str, ended: AttemptEnded) -> None:
        raised = any(failure.kind == "exception" for failure in ended.failures)
        self._is_doubtful = raised and not self._assembly.has_reports
        self._do(self._assembly.close(self.now))
        self.is_over = True
        self._delete_surplus()

    @hears(HostLost)
    def _on_host_lost(self, _: str, lost: HostLost) -> None:
        self.rounds.lost(lost.host)
        ranks = [rank.rank for rank in self.site.plan.on(lost.host)] if self._world_size else []
        self._lost.update(ranks)
        self._uploads = {(rank, ordinal) for rank, ordinal in self._uploads if rank not in ranks}
        for rank in ranks:
            self._assembly.ended(rank)

    @hears(wire.Exited)
    def _on_exited(self, _: str, message: wire.Exited) -> None:
        self._assembly.ended(message.rank)

    @hears(wire.Outcome)
    def _on_outcome(self, _: str, outcome: wire.Outcome) -> None:
        self._unheard.discard(outcome.rank)
        if outcome.ok:
            self._do(self._assembly.finished(outcome.rank, self.now))
        else:
            self._assembly.ended(outcome.rank)

    @hears(wire.Running)
    def _on_running(self, _: str, message: wire.Running) -> None:
        if self.rounds.is_off:
            self._tell(wire.StoreInstead(attempt=message.attempt, rank=message.rank))
        self._start_until = self.now + self.config.missing_rank_s
        self._do(self._assembly.running(message.rank, self.now))

    @hears(StoreLast)
    def _on_store_last(self, _: str, event: StoreLast) -> None:
        self.rounds.store_last()

    @hears(RunEnds)
    def _on_run_ends(self, _: str, event: RunEnds) -> None:
        self.rounds.close()

    def deadline(self) -> float | None:
        """Return when a :class:`Tick` should come if nothing else happens."""
        moments = self._assembly.deadline(), self._answer_at, self.rounds.deadline()
        return min((moment for moment in moments if moment is not None), default=None)

    @hears(Tick)
    def _on_tick(self, _: str, event: Tick) -> None:
        self._do(self._assembly.tick(self.now))
        self._answer_requests()
        self.rounds.store_if_due()

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def is_storing_for_ranks(self) -> bool:
        """True while files are stored for ranks, or gathered for them."""
        return bool(self._uploads) or self.rounds.is_busy

    @property
    def is_committing(self) -> bool:
        """True while a checkpoint is being committed."""
        return self._open_commits > 0

    def awaits_uploads(self) -> bool:
        """Return whether uploads are all that the next checkpoint waits for."""
        return self._assembly.awaits_only(self._uploads)

    def in_progress(self, failed: Collection[int], standing: Collection[int]) -> CheckpointsInProgress:
        """Return what other ranks store, or may still report, for checkpoints that don't need the ``failed`` ones.

        standing: the ranks that stand still, and so will not report.
        """
        parts = self._assembly.storing(failed, self._uploads)
        expected = self._assembly.expected(failed, self._uploads, self.now)
        for rank in standing:
            expected.pop(rank, None)
        return CheckpointsInProgress(parts, expected, self._assembly.time_for(expected))

    def awaits(self, ranks: Collection[int]) -> bool:
        """Return whether a checkpoint waits for files of these ranks."""
        return self._assembly.awaits(ranks)

    def has_part(self, index: int) -> bool:
        """Return whether a rank's report of this number has a checkpoint."""
        return index in self._joining

    # -- the checkpoint to start from -----------------------------------------------------------------------------

    @hears(RunBegins)
    def _on_run_begins(self, _: str, event: RunBegins) -> None:
        self._verify()

    def _verify(self) -> None:
        """Have the latest checkpoint verified. Workers start only when it is known to be intact."""
        if self.ledger.latest is None:
            self._start_from(self._foreign)
        else:
            self.is_verifying = True
            self._emit(VerifyLatest(self._on_verified))

    def _on_verified(self, damaged: int) -> None:
        """Continue without so many of the newest checkpoints."""
        self.ledger.set_aside(damaged)
        latest = self.ledger.latest
        if latest is None:
            self._emit(FindOther(self._start_from))
        elif latest.is_in_memory and self._world_size:
            self.is_verifying = False
            self._gather()
        else:
            self._start_from(str(latest.path))

    def _start_from(self, path: str | None) -> None:
        self.is_verifying = False
        if self.ledger.latest is None:
            self._foreign = path
        if not self._has_queued_validations:
            self._has_queued_validations = True
            for saved in filter(self._awaits_validation, self.ledger.all):
                self._emit(Validate(saved))
        if path != self.start:
            where = f"at {path.rpartition('/')[2]}" if path else "from scratch"
            self._emit(ShowLine(f"continuing {where} instead", is_news=True))
            self._start_again()

    def _start_again(self) -> None:
        self._begin(self._attempt, self._world_size)  # it looks at the latest checkpoint
        self._note_start()

    def _gather(self) -> None:
        """Have the hosts gather the latest checkpoint, if it is in memory, and let the attempt start from it."""

        def gathered() -> None:
            self.is_gathering = False
            self._start_again()

        self.is_gathering = self.rounds.begin(self._attempt, list(self.site.plan.hosts), gathered)

    def _choose_start(self) -> None:
        """Let restarts begin at the latest checkpoint, or one of another run, or from scratch."""
        latest = self.ledger.latest
        self.start = self._foreign if latest is None else str(latest.path)

    def _note_start(self) -> None:
        self._choose_start()
        self._emit(NewStart(self.start))

    @hears(RollBack)
    def _on_roll_back(self, _: str, asked: RollBack) -> None:
        """Choose the checkpoint to go back to, and note for later starts which rows are left out after it."""
        suspect = self.ledger.roll_back(asked.skip_to or {}, reports=asked.reports)
        self.rounds.drop_others()
        self._choose_start()
        self._emit(RolledBack(asked, suspect))

    # -- reports --------------------------------------------------------------------------------------------------

    @hears(wire.Reported)
    def _on_reported(self, _: str, report: wire.Reported) -> None:
        rank, index = report.rank, report.index
        self._unheard.discard(rank)
        if report.has_checkpoint:
            self._note_bringing(rank, index)
        if report.failed is not None:
            self._do(self._assembly.failed(rank, index, report.failed, self.now, has_checkpoint=report.has_checkpoint))
            return
        if report.has_checkpoint:
            self._joining.setdefault(index, _Joining(self.now)).add(report)
        self._do(self._assembly.reported(report, self.now))

    def _note_bringing(self, rank: int, index: int) -> None:
        if rank not in self._bringing:
            self._bringing[rank] = index
            self._disown(rank)

    def _disown(self, rank: int) -> None:
        """Give up the checkpoints of this attempt that were committed without a rank that is slow, and not silent.

        Those that it had none for are whole. The next attempt starts from the newest of them, or an earlier one.
        """
        first = self.first_step + self._bringing[rank]
        whole = [saved.index for saved in self.ledger.all if saved.step < first]
        if lacking := self.ledger.disown(rank, after=max([self._start, *whole])):
            names = ", ".join(saved.path.name for saved in lacking)
            text = f"{names} won't be used for restarts: rank {rank} saves checkpoints too, and its files are missing"
            self._emit(ShowLine(text))
            self.rounds.drop_others()
            self._note_start()

    @hears(wire.FilesCopied)
    def _on_stored(self, _: str, answer: wire.FilesCopied) -> None:
        rank, ordinal, failed = answer.rank, answer.ordinal, answer.failed
        if ordinal < 0:
            self.rounds.on_stored(answer)
            return
        self._uploads.discard((rank, ordinal))
        if failed is not None and is_full_disk(failed):
            why = f"rank {rank} cannot store a checkpoint in {self.site.location}"
            self._emit(StorageFails(f"{why}: {failed}{advice_on(failed)}"))
        report = self._report(rank, ordinal)
        if report is not None and self.site.needs_uploader(report) and (failed is not None or not report.in_memory):
            self._tell(wire.FilesStored(attempt=self._attempt, rank=rank, ordinal=ordinal, failed=failed))
        self._do(self._assembly.stored(answer, self.now))

    @hears(wire.PartWritten)
    def _on_written(self, _: str, message: wire.PartWritten) -> None:
        """Continue with a part that was still being written to memory when it was reported."""
        rank, ordinal = message.rank, message.ordinal
        report = self._report(rank, ordinal)
        if message.failed is None and report is not None:
            self._joining[ordinal].reports[rank] = replace(report, is_written=True, facts=message.facts)
            if (order := self._unwritten.pop((rank, ordinal), None)) is not None:
                self._store_files(order)
        elif message.failed is not None:
            self.rounds.short_of_memory(rank, message.failed)
            self._tell_all(wire.StoreInstead)
            why = "its host cannot keep it in memory"
            self._on_stored("", wire.FilesCopied(attempt=message.attempt, rank=rank, ordinal=ordinal, failed=why))

    def _report(self, rank: int, ordinal: int) -> wire.Reported | None:
        """Return the report that this part of a checkpoint came with, unless it was refused."""
        joining = self._joining.get(ordinal)
        return None if joining is None else joining.reports.get(rank)

    def _do(self, actions: Sequence[assembly.Action]) -> None:
        """Carry out what the assembly of the attempt has decided."""
        for action in actions:
            match action:
                case RequestFiles():
                    self._store_files(action)
                case Refuse(rank, ordinal, why):
                    del self._joining[ordinal].reports[rank]
                    if not self._joining[ordinal].reports:
                        del self._joining[ordinal]
                    self._tell(wire.FilesStored(attempt=self._attempt, rank=rank, ordinal=ordinal, failed=why))
                case Commit():
                    self._commit(action)
                case Drop(ordinal):
                    for rank in self._joining[ordinal].reports if ordinal in self._joining else ():
                        self._tell_done(rank, ordinal)
                    self._settle(ordinal, None)
                case Proceed(rank, ordinal):
                    self._tell(wire.FilesStored(attempt=self._attempt, rank=rank, ordinal=ordinal))
                case ShowLine():
                    self._emit(action)

    def _store_files(self, wanted: RequestFiles) -> None:
        """Have files of a rank stored, once there is a directory for them."""
        rank, ordinal = wanted.rank, wanted.ordinal
        report = self._joining[ordinal].reports[rank]
        if report.in_memory and not report.is_written:
            self._unwritten[rank, ordinal] = wanted
            return
        if self.site.needs_uploader(report):
            if rank in self._lost:
                return
            self._uploads.add((rank, ordinal))
        order = partial(self._order_copy, self._attempt, wanted)
        if report.in_memory and not wanted.from_memory:
            self.rounds.hash(report, wanted.files)
        elif report.in_place:
            order(report.folder)
        else:
            self._emit(MakeDirectory(self._attempt, ordinal, self._joining[ordinal].name, order))

    def _order_copy(self, attempt: int, wanted: RequestFiles, directory: str) -> None:
        """Tell the worker or the uploader of its host to copy the files into ``directory``."""
        rank, ordinal, files = wanted.rank, wanted.ordinal, list(wanted.files)
        report, ordered = self._report(rank, ordinal), frozenset(files)
        if attempt != self._attempt or report is None:
            return
        if not self.site.needs_uploader(report):
            self._tell(wire.CopyFiles(attempt=attempt, rank=rank, ordinal=ordinal, directory=directory, files=files))
            return
        order = wire.Upload(
            attempt=attempt,
            rank=rank,
            ordinal=ordinal,
            source="" if report.in_place else report.folder,
            files=files,
            others=[path for path in report.files if path not in ordered],
            directory=directory,
            facts={} if report.in_memory else report.facts or {},
        )
        self._emit(Store(self.site.host_of(rank), order))

    # -- commits --------------------------------------------------------------------------------------------------

    def _commit(self, commit: Commit) -> None:
        """Make the files of all ranks a checkpoint."""
        joining = self._joining[commit.ordinal]
        reports = [joining.reports[rank] for rank in commit.ranks]
        positions = {report.rank: report.positions or {} for report in reports}
        if warning := other_data(positions):
            self._emit(ShowLine(warning, once=True))
        manifest = self._manifest_of(commit, reports, joining.name)
        in_memory = all(report.in_memory for report in reports)

        def done(path: Path | RemotePath) -> None:
            self._open_commits -= 1
            saved = replace(committed(path, manifest), manifest=manifest if in_memory else None)
            self.ledger.add(saved)
            self._on_committed(manifest["attempt"], commit, saved)

        def failed(why: object) -> None:
            self._open_commits -= 1
            text = f"cannot write a checkpoint in {self.site.location}: {why}{advice_on(str(why))}"
            self._emit(StorageFails(text))

        self._open_commits += 1
        folder = reports[0].folder if reports[0].in_place else None
        new = Publish(commit.ordinal, folder, manifest, merged_positions(positions), done, failed)
        if in_memory:
            self.rounds.commit(joining.reports, new, keeps_start=self._is_start_read())
        else:
            self._emit(new)

    def _manifest_of(self, commit: Commit, reports: Sequence[wire.Reported], name: str | None) -> dict[str, Any]:
        """Return the manifest of a new checkpoint. name: the wanted one of its directory; the default is a number."""
        first = reports[0]
        asked = next((report.validation for report in reports if report.validation), None)
        of = [self._attempt, first.index]
        return new_manifest(
            commit,
            name=name,
            index=self.ledger.take_index(),
            attempt=self._attempt,
            step=self.first_step + first.index,
            progress=first.progress,
            time=self.site.wall_time(),
            validation=asked and {**asked, "report": of},
        )

    def _on_committed(self, attempt: int, commit: Commit, saved: CommittedCheckpoint) -> None:
        """Tell the ranks, and only then delete checkpoints that are no longer kept."""
        latest = self.ledger.all[-1]  # a newer one may have been committed faster
        joining = self._joining[commit.ordinal] if attempt == self._attempt else None
        self._note_start()
        self._emit(
            Committed(
                attempt=attempt,
                name=saved.path.name,
                index=saved.index,
                step=saved.step,
                bytes=sum(file.size for file in commit.files),
                seconds=round(self.now - (joining.since if joining else self.now), 3),
                ranks=commit.ranks,
                metrics=saved.metrics,
                checkpoint=saved.checkpoint,
                is_in_memory=saved.is_in_memory,
                now=self.now,
            )
        )
        if joining is not None:
            ranks = frozenset(commit.ranks)
            for rank in range(self._world_size):
                self._tell_done(rank, commit.ordinal, str(latest.path), has_files=rank in ranks)
            self._settle(commit.ordinal, saved)
            self._do(self._assembly.committed(commit.ordinal, self.now))
        if saved.is_pending:
            self._emit(Validate(saved))
        if self.rounds.is_off and not (latest.is_in_memory or self._is_start_read()):
            self.rounds.free_all()
        for rank in self._bringing.keys() & saved.silent:  # it came while this was committed
            self._disown(rank)
        self._after_change()

    def _tell_done(self, rank: int, ordinal: int, path: str = "", *, has_files: bool = False) -> None:
        done = wire.CommitDone(attempt=self._attempt, rank=rank, ordinal=ordinal, path=path, has_files=has_files)
        self._tell(done)

    def _settle(self, ordinal: int, saved: CommittedCheckpoint | None) -> None:
        """Note that a checkpoint is committed, or (None) dropped."""
        self._joining.pop(ordinal, None)  # it has none if report() has failed on all ranks
        self._emit(Settled(ordinal, saved.checkpoint if saved else None))

    # -- which checkpoints are kept -------------------------------------------------------------------------------

    def _after_change(self) -> None:
        """Act on a checkpoint that was committed or stored, or whose validation has ended."""
        self._warn_of_missing_scores()
        self._delete_surplus()
        self._answer_requests()

    def _on_round_change(self) -> None:
        self._after_change()
        self._note_start()

    @hears(Validated)
    def _on_validated(self, _: str, event: Validated) -> None:
        self.ledger.validated(event.saved, event.status, event.metrics)
        self._after_change()

    def _delete_surplus(self) -> None:
        self.ledger.delete_surplus(self.config, self._is_needed)

    def _is_needed(self, saved: CommittedCheckpoint) -> bool:
        return self._awaits_validation(saved) or (saved.index == self._start and self._is_start_read())

    def _awaits_validation(self, saved: CommittedCheckpoint) -> bool:
        """Return whether the checkpoint is still to be validated.

        It is not if an earlier part of the run asked for its validation, and this one has no function.
        """
        return self.site.validates and saved.is_pending

    def _is_start_read(self) -> bool:
        """Return whether a rank that has not reported yet may read the checkpoint that the attempt has started from."""
        return bool(self._unheard) and not self.is_over and self.now < self._start_until

    def _warn_of_missing_scores(self) -> None:
        """Warn once, of the first checkpoint without a score whose validation can no longer add one."""
        attribute = self.config.checkpoint_score_attribute
        if attribute is None or self._warned_of_score:
            return
        for saved in self.ledger.all:
            if not (self._awaits_validation(saved) or retention.has_metric(saved.metrics, attribute)):
                self._warned_of_score = True
                known = ", ".join(sorted(retention.flatten(saved.metrics))) or "no metrics at all"
                text = (
                    f"{saved.path.name} has no metric {attribute!r} (CheckpointConfig.checkpoint_score_attribute), so "
                    f"it counts as the worst; its metrics: {known}"
                )
                self._emit(ShowLine(text))
                return

    # -- what ranks that wait are told ----------------------------------------------------------------------------

    @hears(wire.FetchCheckpoint)
    def _on_fetch(self, host: str, asked: wire.FetchCheckpoint) -> None:
        """Bring a checkpoint to a rank. A host gets no other directory of this machine."""
        self._assembly.fetching(asked.rank)
        answer = partial(self._on_fetched, asked)
        path = self.ledger.path(asked.path)
        if self.ledger.is_in_memory(asked.path):
            self.rounds.fetch(host, asked.path.rpartition("/")[2], asked.files, answer)
        elif path not in {*(str(saved.path) for saved in self.ledger.all), self.start, self.site.checkpoint}:
            text = (
                f"there is no directory {asked.path} on {host}, and this run has no such checkpoint (was it deleted by "
                "num_to_keep?)"
            )
            answer("", text)
        elif self.site.lacks_storage(host):
            self._emit(BringTo(host, path, answer))
        else:  # it was stored from memory just now, or somebody has deleted it: the rank sees which
            answer(path, None)

    def _on_fetched(self, asked: wire.FetchCheckpoint, folder: str, failed: str | None) -> None:
        if asked.attempt == self._attempt:
            self._do(self._assembly.running(asked.rank, self.now))
            rank, path = asked.rank, asked.path
            self._tell(
                wire.CheckpointFetched(attempt=asked.attempt, rank=rank, path=path, folder=folder, failed=failed)
            )

    @hears(wire.AskCheckpointList)
    def _on_ask(self, _: str, request: wire.AskCheckpointList) -> None:
        self._answer([(request, self.now)])

    def _answer_requests(self) -> None:
        """Answer the ranks that have waited long enough."""
        if self._requests:
            requests, self._requests, self._answer_at = self._requests, [], None
            self._answer(requests)

    def _answer(self, requests: Sequence[tuple[wire.AskCheckpointList, float]]) -> None:
        """Answer these requests, or have them wait.

        A rank waits for its own checkpoints, and for those of other ranks up to the report that it has made itself.
        It waits for ranks with fewer reports no longer than ``missing_rank_s``, and with ``synced`` for nothing longer.
        """
        now = self.now
        self._settled_up_to = self._find_settled()
        validating = any(map(self._awaits_validation, self.ledger.all))
        patience_s = self.config.missing_rank_s + _COMMIT_S * (self.is_committing or self.awaits_uploads())
        body = b""
        for request, since in requests:
            reports = self._assembly.reports_of(request.rank)
            settled, settled_synced, settled_soon, head_start_ends = self._settled_up_to
            if request.synced:
                settled = settled_soon if now >= head_start_ends else settled_synced
            limit = since + patience_s
            others = now < limit and reports > settled
            own = not request.synced and any(request.rank in joining.reports for joining in self._joining.values())
            if (others or own or (request.validated and validating)) and not request.at_once:
                self._requests.append((request, since if others else -math.inf))
                if others:
                    due = min(limit, head_start_ends if now < head_start_ends else limit)
                    self._answer_at = min(due, self._answer_at or due)
                continue
            body = body or self._checkpoint_list()
            self._tell(wire.CheckpointList(attempt=request.attempt, rank=request.rank, index=request.index, body=body))
            if request.synced and now >= limit and reports > settled:
                self._do(self._assembly.write_off_laggards(reports))

    def _find_settled(self) -> tuple[float, float, float, float]:
        """Return the number of reports up to which the checkpoints of all ranks are committed or dropped.

        The second number leaves out checkpoints that ASYNC stores. The third one also leaves out ranks that have made
        no report; it counts when the head start of the others, the last number, is over.
        """
        first = min(self._joining, default=math.inf)
        first_synced = min((n for n, joining in self._joining.items() if joining.is_synced), default=math.inf)
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
            for saved in self.ledger.all
        ]
        return json.dumps(checkpoints).encode()
