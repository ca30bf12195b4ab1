"""The life of every checkpoint of a run, from the first rank that reports it to its deletion. Runs in: coordinator.

Pure: no I/O; ``now`` is an argument, in seconds of a clock that stands still while somebody debugs a rank.

=========== ========================================================= ================= =============================
state       what happens                                              next              in the code
=========== ========================================================= ================= =============================
joining     ranks report their parts; the files are stored, or hashed committing, gone  ``assembly._joining``
            in memory
committing  all parts are there; the manifest is written              in memory, stored ``assembly._committing``
in memory   ranks may go on; other hosts copy it; a restart gathers   storing, gone     ``ledger``, ``is_in_memory``
            it
storing     the same, while its files go to the storage               stored, in        the same; ``rounds._storing``
                                                                      memory, gone
stored      restarts may begin from it                                gone              ``ledger``
gone        dropped, superseded, lost, given up as incomplete or                        in none of them
            suspect, or deleted as surplus
=========== ========================================================= ================= =============================

:mod:`~distrain.decisions.checkpoints.assembly` has those that are joining or being committed, for one attempt;
:mod:`~distrain.decisions.checkpoints.attendance` says for which ranks they wait;
:mod:`~distrain.decisions.checkpoints.ledger` has all others; :mod:`~distrain.decisions.checkpoints.rounds` what the
hosts have in memory. Here, they meet: :class:`Checkpoints` is all that others know.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.api.observer import Committed
from distrain.decisions.checkpoints import actions
from distrain.decisions.checkpoints.assembly import CheckpointAssembly
from distrain.decisions.checkpoints.rounds import Rounds
from distrain.decisions.events import (
    AttemptEnded,
    AttemptStarts,
    HostLost,
    RollBack,
    ShowLine,
)
from distrain.decisions.hearing import handlers_of, hears
from distrain.storage import retention
from distrain.storage.commit import Commit, committed, merged_positions, new_manifest, other_data
from distrain.system.text import advice_on, is_full_disk

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from distrain.decisions.checkpoints.assembly import Joining
    from distrain.decisions.checkpoints.ledger import Ledger
    from distrain.decisions.checkpoints.site import Site
    from distrain.storage.commit import CommittedCheckpoint
    from distrain.system.remote_path import RemotePath

_COMMIT_S = 10.0
"""Seconds more that a rank waits for a checkpoint that is being stored when the time for other ranks is over."""


class Checkpoints:
    """All checkpoints of a run. See the description of the module."""

    def __init__(self, ledger: Ledger, site: Site) -> None:
        self.ledger, self.site, self.config = ledger, site, site.config
        self.rounds = Rounds(ledger, site, self._emit, self._after_change)
        self.assembly = CheckpointAssembly(site, self._emit, self._commit)
        ledger.emit = self._emit
        self.now = 0.0
        self.is_verifying = self.is_gathering = False
        """True until it is known whether the checkpoint to start from is intact, and while hosts gather it."""
        self._foreign = site.checkpoint if ledger.latest is None else None
        """The checkpoint of another run from which this run has started, before it had one itself."""
        self.start = site.checkpoint
        """The checkpoint at which a restart would begin; None if it would begin from scratch."""
        self._is_doubtful = False
        """True if ranks have raised before any report: perhaps the checkpoint that they loaded is damaged."""
        self._has_queued_validations = False
        self._handlers = handlers_of(self.rounds) | handlers_of(self)
        self._actions: list[actions.Action] = []
        self._open_commits = 0
        self._warned_of_score = False
        self._begin(-1, 0)

    def handle(self, event: actions.Event, now: float, host: str = "") -> list[actions.Action]:
        """Note that something has happened, and return what has to be done about it.

        host: the one that a message is from.
        """
        self.now = self.rounds.now = now
        self._handlers[type(event)](host, event)
        if self._requests and self._find_settled() != self._settled:
            self._answer_requests()
        done, self._actions = self._actions, []
        return done

    def _emit(self, action: actions.Action) -> None:
        self._actions.append(action)

    @property
    def kinds(self) -> AbstractSet[type]:
        """The kinds of messages and events that belong to this part."""
        return self._handlers.keys()

    @hears(actions.Answered)
    def _on_answer(self, _: str, event: actions.Answered) -> None:
        event.then(*event.values)

    # -- an attempt -----------------------------------------------------------------------------------------------

    @hears(AttemptStarts)
    def _on_attempt_starts(self, _: str, starts: AttemptStarts) -> None:
        self.site.plan = starts.plan
        self._begin(starts.attempt, len(starts.plan.ranks))
        self._gather()
        if self._is_doubtful and self.ledger.latest is not None and not self.is_gathering:
            self._verify()

    def _begin(self, attempt: int, world_size: int) -> None:
        """Begin an attempt, and forget the unfinished checkpoints of the last one."""
        latest = self.ledger.latest
        self.is_over = False
        self._requests: list[tuple[wire.AskCheckpointList, float]] = []
        """Unanswered requests for lists of checkpoints, and when each came."""
        self._answer_at: float | None = None
        """When the first of these requests stops waiting for other ranks."""
        self._settled: dict[bool, float] = {}
        """The latest answer of :meth:`_find_settled`."""
        similar = [saved for saved in self.ledger.all if saved.world_size == world_size]
        silent = similar[-1].silent if similar else ()
        self.assembly.begin(attempt, world_size, silent=silent, first_step=latest.step if latest else 0)
        self._start = -1 if latest is None else latest.index
        """The index of the checkpoint that the attempt has started from, if that is one of this run."""
        self._start_until = math.inf
        self._unheard = set(range(world_size))
        """The ranks that may still read the checkpoint that the attempt has started from."""

    @hears(AttemptEnded)
    def _on_attempt_ended(self, _: str, ended: AttemptEnded) -> None:
        raised = any(failure.kind == "exception" for failure in ended.failures)
        self._is_doubtful = raised and not self.assembly.attendance.has_reports
        self.assembly.close(self.now)
        self.is_over = True
        self._delete_surplus()

    @hears(HostLost)
    def _on_host_lost(self, _: str, lost: HostLost) -> None:
        self.rounds.lost(lost.host)
        ranks = [rank.rank for rank in self.site.plan.on(lost.host)]
        self.assembly.lost(ranks)

    @hears(wire.Exited)
    def _on_exited(self, _: str, message: wire.Exited) -> None:
        self.assembly.attendance.ended(message.rank)

    @hears(wire.Outcome)
    def _on_outcome(self, _: str, outcome: wire.Outcome) -> None:
        self._unheard.discard(outcome.rank)
        if outcome.ok:
            self.assembly.finished(outcome.rank, self.now)
        else:
            self.assembly.attendance.ended(outcome.rank)

    @hears(wire.Running)
    def _on_running(self, _: str, message: wire.Running) -> None:
        if self.rounds.is_off:
            self.assembly.tell(wire.StoreInstead, message.rank)
        self._start_until = self.now + self.config.missing_rank_s
        self.assembly.running(message.rank, self.now)

    def deadline(self) -> float | None:
        """Return when a :class:`Tick` should come if nothing else happens."""
        moments = self.assembly.deadline(), self._answer_at, self.rounds.deadline()
        return min((moment for moment in moments if moment is not None), default=None)

    @hears(actions.Tick)
    def _on_tick(self, _: str, event: actions.Tick) -> None:
        self.assembly.tick(self.now)
        self._answer_requests()
        self.rounds.store_if_due()

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def is_storing_for_ranks(self) -> bool:
        """True while files are stored for ranks, or gathered for them."""
        return bool(self.assembly.uploads) or self.rounds.is_busy

    @property
    def is_committing(self) -> bool:
        """True while a checkpoint is being committed."""
        return self._open_commits > 0

    # -- the checkpoint to start from -----------------------------------------------------------------------------

    @hears(actions.RunBegins)
    def _verify(self, *_: object) -> None:
        """Have the latest checkpoint verified. Workers start only when it is known to be intact."""
        if self.ledger.latest is None:
            self._start_from(self._foreign)
        else:
            self.is_verifying = True
            self._emit(actions.VerifyLatest(self._on_verified))

    def _on_verified(self, damaged: int) -> None:
        """Continue without so many of the newest checkpoints."""
        self.ledger.set_aside(damaged)
        latest = self.ledger.latest
        if latest is None:
            self._emit(actions.FindOther(self._start_from))
        elif latest.is_in_memory and self.assembly.world_size:
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
                self._emit(actions.Validate(saved))
        if path != self.start:
            where = f"at {path.rpartition('/')[2]}" if path else "from scratch"
            self._emit(ShowLine(f"continuing {where} instead", is_news=True))
            self._start_again()

    def _start_again(self) -> None:
        self._begin(self.assembly.attempt, self.assembly.world_size)  # it looks at the latest checkpoint
        self._note_start()

    def _gather(self) -> None:
        """Have the hosts gather the latest checkpoint, if it is in memory, and let the attempt start from it."""

        def gathered() -> None:
            self.is_gathering = False
            self._start_again()

        self.is_gathering = self.rounds.begin(self.assembly.attempt, list(self.site.plan.hosts), gathered)

    def _note_start(self, new: CommittedCheckpoint | None = None) -> None:
        """Let restarts begin at the latest checkpoint, or one of another run, or from scratch.

        new: the checkpoint that was committed just now, if one was.
        """
        latest = self.ledger.latest
        self.start = self._foreign if latest is None else str(latest.path)
        is_last = bool(new and new.progress and new.progress[0] >= new.progress[1])
        self._emit(actions.NewStart(self.start, is_new=new is not None and new is latest and not is_last))

    @hears(RollBack)
    def _on_roll_back(self, _: str, asked: RollBack) -> None:
        """Choose the checkpoint to go back to, and note for later starts which rows are left out after it."""
        suspect = self.ledger.roll_back(asked.skip_to or {}, reports=asked.reports)
        self.rounds.drop_others()
        self._note_start()
        self._emit(actions.RolledBack(asked, suspect))

    # -- reports --------------------------------------------------------------------------------------------------

    @hears(wire.Reported)
    def _on_reported(self, _: str, report: wire.Reported) -> None:
        self._unheard.discard(report.rank)
        brought = self._first_brought(report.rank)
        self.assembly.reported(report, self.now)
        if self._first_brought(report.rank) != brought:
            self._disown(report.rank)

    def _first_brought(self, rank: int) -> int:
        """Return the number of the first report of a rank that had a checkpoint, or has failed with one; 0 if none."""
        return self.assembly.attendance[rank].first

    def _disown(self, rank: int) -> None:
        """Give up the checkpoints of this attempt that were committed without a rank that is slow, and not silent.

        Those that it had none for are whole. The next attempt starts from the newest of them, or an earlier one.
        """
        first = self.assembly.first_step + self._first_brought(rank)
        if lacking := self.ledger.disown(rank, after=self._start, first_step=first):
            names = ", ".join(saved.path.name for saved in lacking)
            text = f"{names} won't be used for restarts: rank {rank} saves checkpoints too, and its files are missing"
            self._emit(ShowLine(text))
            self.rounds.drop_others()
            self._note_start()

    @hears(wire.FilesCopied)
    def _on_stored(self, _: str, answer: wire.FilesCopied) -> None:
        if answer.storing:
            self.rounds.on_stored(answer)
            return
        if answer.failed is not None and is_full_disk(answer.failed):
            why = f"rank {answer.rank} cannot store a checkpoint in {self.site.location}"
            self._emit(actions.StorageFails(f"{why}: {answer.failed}{advice_on(answer.failed)}"))
        self.assembly.stored(answer, self.now)

    @hears(wire.PartWritten)
    def _on_written(self, _: str, message: wire.PartWritten) -> None:
        rank, ordinal = message.rank, message.ordinal
        if message.failed is None:
            self.assembly.written(message)
            return
        self.rounds.short_of_memory(rank, message.failed)
        for each in range(self.assembly.world_size):
            self.assembly.tell(wire.StoreInstead, each)
        why = "its host cannot keep it in memory"
        self._on_stored("", wire.FilesCopied(attempt=message.attempt, rank=rank, ordinal=ordinal, failed=why))

    # -- commits --------------------------------------------------------------------------------------------------

    def _commit(self, commit: Commit, joining: Joining) -> None:
        """Make the files of all ranks a checkpoint."""
        attempt, first_step = self.assembly.attempt, self.assembly.first_step
        by_rank = {rank: joining.parts[rank].report for rank in commit.ranks}
        first = by_rank[commit.ranks[0]]
        positions = {rank: report.positions or {} for rank, report in by_rank.items()}
        if warning := other_data(positions):
            self._emit(ShowLine(warning, once=True))
        asked = next((report.validation for report in by_rank.values() if report.validation), None)
        manifest = new_manifest(
            commit,
            name=joining.named_by[1],
            index=self.ledger.take_index(),
            attempt=attempt,
            step=first_step + commit.ordinal,
            progress=first.progress,
            time=self.site.wall_time(),
            validation=asked and {**asked, "report": [attempt, commit.ordinal]},
        )
        in_memory = all(report.in_memory for report in by_rank.values())

        def done(path: Path | RemotePath) -> None:
            self._open_commits -= 1
            saved = replace(committed(path, manifest), manifest=manifest if in_memory else None)
            self.ledger.add(saved)
            self._on_committed(saved, attempt, commit, joining.since)

        def failed(why: object) -> None:
            self._open_commits -= 1
            text = f"cannot write a checkpoint in {self.site.location}: {why}{advice_on(str(why))}"
            self._emit(actions.StorageFails(text))

        self._open_commits += 1
        key, folder = f"{attempt}-{commit.ordinal}", first.folder if first.in_place else None
        new = actions.Publish(key, folder, manifest, merged_positions(positions), done, failed)
        if in_memory:
            self.rounds.commit(by_rank, new, keeps_start=self._is_start_read())
        else:
            self._emit(new)

    def _on_committed(self, saved: CommittedCheckpoint, attempt: int, commit: Commit, since: float) -> None:
        """Tell the ranks, and only then delete checkpoints that are no longer kept."""
        latest = self.ledger.all[-1]  # a newer one may have been committed faster
        self._emit(
            Committed(
                attempt=attempt,
                name=saved.path.name,
                index=saved.index,
                step=saved.step,
                bytes=saved.bytes,
                seconds=round(self.now - since, 3),
                ranks=commit.ranks,
                metrics=saved.metrics,
                checkpoint=saved.checkpoint,
                is_in_memory=saved.is_in_memory,
                now=self.now,
            )
        )
        if attempt == self.assembly.attempt:
            self.assembly.committed(commit.ordinal, str(latest.path), saved.checkpoint, self.now)
        if saved.is_pending:
            self._emit(actions.Validate(saved))
        if self.rounds.is_off and not (latest.is_in_memory or self._is_start_read()):
            self.rounds.free_all()
        for rank in filter(self._first_brought, saved.silent):  # it came while this was committed
            self._disown(rank)
        self._after_change(saved)

    # -- which checkpoints are kept -------------------------------------------------------------------------------

    def _after_change(self, new: CommittedCheckpoint | None = None) -> None:
        """Act on a checkpoint that was committed (``new``), stored or lost, or whose validation has ended."""
        self._note_start(new)
        self._warn_of_missing_scores()
        self._delete_surplus()
        self._answer_requests()

    @hears(actions.Validated)
    def _on_validated(self, _: str, event: actions.Validated) -> None:
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
            if retention.look_up(saved.metrics, attribute) is None and not self._awaits_validation(saved):
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
        self.assembly.attendance.fetching(asked.rank)
        answer = partial(self._on_fetched, asked)
        path = self.ledger.path(asked.path)
        if self.rounds.has(asked.path):
            self.rounds.fetch(host, asked.path.rpartition("/")[2], asked.files, answer)
        elif path not in {*(str(saved.path) for saved in self.ledger.all), self.start, self.site.checkpoint}:
            text = (
                f"there is no directory {asked.path} on {host}, and this run has no such checkpoint (was it deleted by "
                "num_to_keep?)"
            )
            answer("", text)
        elif self.site.lacks_storage(host):
            self._emit(actions.BringTo(host, path, answer))
        else:  # it was stored from memory just now, or somebody has deleted it: the rank sees which
            answer(path, None)

    def _on_fetched(self, asked: wire.FetchCheckpoint, folder: str, failed: str | None) -> None:
        if asked.attempt == self.assembly.attempt:
            self.assembly.running(asked.rank, self.now)
            self._answer_question(asked, folder.encode(errors="surrogateescape"), failed)
            self._emit(actions.Brought(asked.rank))

    def _answer_question(self, asked: wire.Question, body: bytes, failed: str | None = None) -> None:
        self.assembly.tell(wire.Answer, asked.rank, question=asked.question, body=body, failed=failed)

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
        now, attendance = self.now, self.assembly.attendance
        self._settled = self._find_settled()
        validating = any(map(self._awaits_validation, self.ledger.all))
        patience_s = self.config.missing_rank_s + _COMMIT_S * (self.is_committing or self.assembly.awaits_uploads())
        body = b""
        for request, since in requests:
            reports, limit = attendance[request.rank].reports, since + patience_s
            is_behind = reports > self._settled[request.synced]
            others = is_behind and now < limit
            own = not request.synced and self.assembly.awaits_parts_of(request.rank)
            if (others or own or (request.validated and validating)) and not request.at_once:
                self._requests.append((request, since))
                if others:
                    due = min([moment for moment in (limit, attendance.head_start_ends) if moment > now])
                    self._answer_at = min(due, self._answer_at or due)
                continue
            body = body or self._checkpoint_list()
            self._answer_question(request, body)
            if request.synced and is_behind and not others:
                self.assembly.give_up_waiting(reports, now)

    def _find_settled(self) -> dict[bool, float]:
        """Return the number of reports up to which checkpoints are settled, for ``synced`` requests and for others."""
        return {synced: self.assembly.settled(self.now, synced=synced) for synced in (True, False)}

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
