"""Detection of hangs, and the stacks of the ranks for it and on demand. Runs in: coordinator."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from distrain import wire
from distrain.api.observer import HangBegan, HangEnded
from distrain.decisions.events import AttemptEnded, AttemptStarts, HangDetected
from distrain.decisions.health.collectives import Comparison, compare
from distrain.decisions.health.standstills import Hang, Standstills
from distrain.decisions.hearing import hears
from distrain.system.log import say, warn
from distrain.system.stacks import location, places_of, summarize_stacks, suspects
from distrain.system.text import duration, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from distrain.api.config import FailureConfig
    from distrain.api.observer import Fact
    from distrain.coordinator.store.evidence import Evidence
    from distrain.system.loop import Loop

STACKS_TIMEOUT_S = 3.0
"""Seconds to wait for the stacks of all hosts before those that have arrived are shown."""
_RECORDS_S = 1.0
"""Seconds to wait for the flight recorders of all ranks before a hang is shown."""
_MOST_SHOWN = 3
"""Hangs of one attempt that are shown. A run may stand still in each epoch, and go on."""
_ANSWER_S = 0.5
"""Seconds to wait for ranks that were asked where they are, before their stacks show it."""
_PROOF_S = 8.0
"""Seconds until distrain looks again at a rank that waits for one that has finished; then the attempt ends."""
_Lines: TypeAlias = "tuple[str, ...]"


@dataclass(eq=False)
class HangMonitor:
    """Observe the progress of each attempt, and take stacks of its ranks.

    ask_for_stacks: makes every host take stacks, and returns the names of the hosts; if its argument is true, the hosts
    also watch which ranks make progress. ask_ranks: asks ranks something, see :class:`~distrain.wire.Ask`.
    is_training: tells whether ranks are at work.
    on_hang: called when there was no progress for ``FailureConfig.hang_timeout_s``, or when there can be none.
    tell: tells observers a fact.
    """

    loop: Loop
    evidence: Evidence
    config: FailureConfig
    ask_for_stacks: Callable[[bool], list[str]]
    ask_ranks: Callable[[str, Collection[int]], None]
    is_training: Callable[[], bool]
    on_hang: Callable[[HangDetected], None]
    tell: Callable[[Fact], None]

    def __post_init__(self) -> None:
        limits = ((self.config.hang_report_s, self._warn_of_silence), (self.config.hang_timeout_s, self._time_out))
        chosen = [(limit_s, action) for limit_s, action in limits if limit_s is not None and limit_s < math.inf]
        self._limits = sorted(chosen, key=itemgetter(0))
        self.begin()

    def begin(self, ranks: int = 0) -> None:
        """Forget the last attempt. ``ranks``: the number of those of the next one."""
        self.standstills = Standstills(expected=ranks)
        """Read it. The engine adds the ranks that enter train_func."""
        self._records: dict[int, dict[str, Any]] = {}
        """By rank that stands still: its flight recorder."""
        self._hang: Hang | None = None
        self._shown = 0
        self._judged = True
        """True once the standstills of the ranks as they are now were looked at."""
        self._stacks: dict[int, str] = {}
        self._silent: set[int] = set()
        self._idle: set[int] = set()
        self._looks = False
        """True while distrain finds out where the ranks are that say nothing."""
        self._have_started = False
        """True once a worker was seen, even outside train_func."""
        self._awaited_hosts: set[str] = set()
        self._callbacks: list[Callable[[_Lines], None]] = []
        self._progress_at = time.monotonic()
        self._exceeded = 0
        """The limits that have been exceeded since the last progress."""
        self._hung_since: float | None = None
        """Since when there is no progress (seconds since 1970), once that was reported."""

    @hears(AttemptStarts)
    def on_attempt(self, _: str, starts: AttemptStarts) -> None:
        """Begin with the ranks of an attempt."""
        self.begin(len(starts.plan.ranks))

    @hears(AttemptEnded)
    def on_attempt_end(self, _: str, ended: AttemptEnded) -> None:
        """End the hang of the attempt, if there is one."""
        self.end_hang()

    def end_hang(self) -> None:
        """Record the hang that has ended, if there was one."""
        hang, self._hang = self._hang, None
        if self._hung_since is not None:
            self.tell(HangEnded(self._hung_since, "" if hang is None else hang.headline()))
            self._hung_since = None

    @hears(
        wire.Reported,
        wire.FilesCopied,
        wire.PartWritten,
        wire.CollectiveEntered,
        wire.AskCheckpointList,
        wire.FetchCheckpoint,
        wire.Output,
    )
    def on_sign_of_life(self, _: str, message: wire.Message) -> None:
        """Note that a rank does something."""
        self.progress()

    @hears(wire.Running)
    def on_running(self, _: str, message: wire.Running) -> None:
        """Watch a rank that enters train_func."""
        self.progress()
        self.standstills.ranks.add(message.rank)

    def progress(self) -> None:
        """Note that a rank has reported or printed something. Called for every report, so it has to be cheap."""
        self._progress_at = time.monotonic()
        if self._exceeded and self._hang is None:
            self.end_hang()
        self._exceeded = 0

    def locations(self, ranks: Collection[int]) -> _Lines:
        """Return lines that show where these ranks were, as far as their stacks are known."""
        known = {rank: self._stacks[rank] for rank in ranks if rank in self._stacks}
        return tuple(summarize_stacks(known, silent=self._silent.intersection(ranks)))

    # -- hangs, by evidence ---------------------------------------------------------------------------------------

    @hears(wire.Outcome)
    def on_outcome(self, _: str, outcome: wire.Outcome) -> None:
        """Note that a rank has left train_func."""
        self.rank_ended(outcome.rank, ok=outcome.ok)

    @hears(wire.Exited)
    def on_exited(self, _: str, message: wire.Exited) -> None:
        """Note that the process of a rank has ended."""
        self.rank_ended(message.rank, ok=False)

    def rank_ended(self, rank: int, *, ok: bool) -> None:
        """Note that a rank has left train_func."""
        self.standstills.ended(rank, time.monotonic(), ok=ok)
        self._judged = False
        if ok:
            self._note_move()

    @hears(wire.Standstill)
    def heard(self, _: str, message: wire.Standstill) -> None:
        """Note that a rank stands still, or moves again."""
        if not self.is_training():
            return
        was_asking = self.standstills.is_asking
        self.standstills.heard(message, time.monotonic())
        if was_asking and not self.standstills.is_asking:
            self.progress()  # it has its answer, and trains
        if not message.state:
            self._records.pop(message.rank, None)
        self._judged = False
        if not self.standstills.all_stand:
            self._note_move()

    def _note_move(self) -> None:
        """End the hang, if there is one: a rank has moved, or finished."""
        if self._hang is not None:
            if self._hung_since is not None:
                say(f"the ranks move again, after {duration(time.monotonic() - self._hang.since)}")
            self.end_hang()

    @hears(wire.Dump)
    def add_record(self, _: str, dump: wire.Dump) -> None:
        """Take the stacks of a rank, or the flight recorder of one that stands still, or has failed."""
        if dump.what == "stacks":
            self._add_stacks(dump)
        elif dump.what in ("flight_recorder", "last_collectives"):
            self._records[dump.rank] = json.loads(dump.body)

    def collectives(self) -> Comparison:
        """Return what is known about collectives that ranks lack, or that do not match."""
        return compare(self._records, finished=self.standstills.finished)

    def _judge(self, now: float) -> None:
        """Call it a hang if every rank stands still. Ask ranks for their stacks that say nothing."""
        self._judged = self.standstills.is_due(now)
        hang = self.standstills.hang(now)
        if hang is not None and self._hang is None:
            self._hang = hang
            self._take_stacks(lambda lines: None)
            self.ask_ranks("flight_recorder", self.standstills.ranks)
            self.loop.call_in("records", _RECORDS_S, self._show_hang)
        elif not self._looks and (unheard := self.standstills.unheard(now)):
            self._looks = True
            self.ask_ranks("standstill", unheard)
            self.loop.call_in("answers", _ANSWER_S, self._look_at_unheard)

    def _look_at_unheard(self) -> None:
        if self.standstills.unheard(time.monotonic()):
            self._take_stacks(self._note_silence, watches=True)
        else:
            self._looks = False

    def _note_silence(self, _: _Lines) -> None:
        self._looks, now = False, time.monotonic()
        unheard = self.standstills.unheard(now)
        self.standstills.note_busy(unheard - self._silent - self._idle, now)
        self.standstills.note_mute(unheard & self._silent)
        for rank in unheard & self._idle & self._stacks.keys():
            self.standstills.note_held(rank, location(self._stacks[rank]))
        self._judge(now)

    def _show_hang(self, _: _Lines = ()) -> None:
        """Show a new hang, once the flight recorders and the stacks are there."""
        if self._hang is None:
            return
        if self._callbacks:
            self._callbacks.append(self._show_hang)
            return
        if self._awaited_hosts:  # their ranks may have moved since, or the hosts are lost: look again
            self._hang, self._judged = None, False
            return
        self.standstills.note_mute(self._silent & self._hang.waiting.keys())  # stopped while they waited
        hang = self.standstills.hang(time.monotonic()) or self._hang
        hang = self._hang = replace(hang, collectives=self.collectives())
        self.tell(HangBegan(hang.headline(), self._note_hang(hang.since), hang.culprits, hang.headline))
        if self._shown < _MOST_SHOWN:
            self._shown += 1
            where = f"stacks and flight recorders: {self.evidence.folder}"
            warn("\n    ".join([*self._evidence_lines(), *[hang.collectives.cure] * (not hang.stuck), where]))
        if hang.stranded and self.config.hang_timeout_s is not None:
            self.loop.call_in("records", _PROOF_S, partial(self._prove, hang))

    def _prove(self, hang: Hang) -> None:
        """Look again at ranks that wait for one that has finished."""
        if self._hang is hang:
            self.ask_ranks("flight_recorder", self.standstills.ranks)
            self.loop.call_in("records", _RECORDS_S, partial(self._take_stacks, partial(self._end_deadlock, hang)))

    def _end_deadlock(self, hang: Hang, lines: _Lines) -> None:
        """End the attempt if nothing has changed."""
        stranded = replace(hang, collectives=self.collectives()).stranded & hang.stranded
        if stranded and self._hang is hang:
            waiting = name_ranks(sorted({rank for rank, _, _ in stranded}))
            gone = name_ranks(sorted(self.standstills.finished))
            deadlock = (
                f"{waiting} can only wait for {gone}, which finished train_func, so the attempt ends; "
                "FailureConfig(hang_timeout_s=None) would let it wait"
            )
            self._time_out(round(time.monotonic() - hang.since), lines, deadlock)

    def _evidence_lines(self) -> list[str]:
        """Return what is known about the hang, beside the stacks."""
        hang = [] if self._hang is None else [self._hang.text(time.monotonic())]
        return [*hang, *self.collectives().sentences]

    # -- no progress ----------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """Return when to call :meth:`tick` while ranks are at work (time.monotonic), or None."""
        moments = [self._progress_at + limit_s for limit_s, _ in self._limits[self._exceeded :]]
        if not self._judged and (standing := self.standstills.deadline()) is not None:
            moments.append(standing)
        return min(moments, default=None)

    def tick(self) -> None:
        """Judge the standstills of the ranks. Take stacks if a limit has been exceeded."""
        now = time.monotonic()
        if not self._judged:
            self._judge(now)
        for limit_s, action in self._limits[self._exceeded :]:
            if now >= self._progress_at + limit_s:
                self._exceeded += 1
                self._take_stacks(partial(self._act, action, limit_s))

    def _act(self, action: Callable[[float, _Lines], None], limit_s: float, lines: _Lines) -> None:
        """Do what a limit asks for, unless a rank has made progress while stacks were taken.

        Until the first worker is seen, hosts are still importing, and nothing can hang.
        """
        have_begun = self.standstills.ranks or self.standstills.finished
        if action == self._time_out and not (self._have_started or have_begun):
            self._have_started = bool(lines)
            self.progress()
        if self._exceeded:
            self._note_hang(self._progress_at)
            action(limit_s, lines)

    def _note_hang(self, since: float) -> float:
        self._hung_since = self._hung_since or time.time() - (time.monotonic() - since)
        return self._hung_since

    def _warn_of_silence(self, after_s: float, lines: _Lines) -> None:
        """Show where all ranks are, without ending the attempt."""
        folder = self.evidence.folder
        where_stacks_are = f"stacks are in {folder}" if lines else "no rank has been started yet"
        head = f"no rank has reported or printed anything for {after_s:g} s; {where_stacks_are}"
        warn("\n    ".join([head, *lines]))

    def _time_out(self, after_s: float, lines: _Lines, deadlock: str = "") -> None:
        blamed = suspects(self._stacks, silent=self._silent) if self._hang is None else self._hang.culprits
        self.on_hang(HangDetected(after_s, (*self._evidence_lines(), *lines), tuple(blamed), deadlock))

    # -- taking stacks --------------------------------------------------------------------------------------------

    def _take_stacks(self, then: Callable[[_Lines], None], *, watches: bool = False) -> None:
        """Call ``then`` with lines for the user, once all hosts have answered or are late.

        A mere look whether ranks are mute keeps no files: the run may be healthy.
        """
        self._callbacks.append(then)
        if len(self._callbacks) > 1:
            return
        self._stacks, self._silent, self._idle = {}, set(), set()
        self._awaited_hosts = set(self.ask_for_stacks(watches))
        self.loop.call_in("stacks", STACKS_TIMEOUT_S if self._awaited_hosts else 0.0, self._complete)

    def _add_stacks(self, dump: wire.Dump) -> None:
        """Take the stacks of a rank, whether asked for or taken before it was killed."""
        self._stacks[dump.rank] = dump.body.decode(errors="replace")
        self._silent.discard(dump.rank)
        if not self._callbacks:
            self.evidence.keep("stacks", dump.rank, dump.body)

    @hears(wire.StacksDone)
    def host_done(self, host: str, done: wire.StacksDone) -> None:
        """Note that a host has sent all stacks it could take. Older stacks of silent ranks are kept."""
        self._silent |= set(done.silent) - self._stacks.keys()
        self._idle |= set(done.idle)
        self._awaited_hosts.discard(host)
        if self._callbacks and not self._awaited_hosts:
            self._complete()

    def _complete(self) -> None:
        self.loop.cancel("stacks")
        callbacks, self._callbacks = self._callbacks, []
        for rank, text in self._stacks.items() if callbacks != [self._note_silence] else ():
            self.evidence.keep("stacks", rank, text.encode())
        lines = tuple(summarize_stacks(self._stacks, silent=self._silent, finished=self.standstills.finished))
        for callback in callbacks:
            callback(lines)

    def answer(self, reply: Callable[[str], None], form: str = "") -> None:
        """Take stacks, and reply with lines that summarize them or, for the form ``json``, with an object."""

        def show(lines: _Lines) -> None:
            notes = self._evidence_lines()
            if form == "json":
                found = places_of(self._stacks, silent=self._silent, finished=self.standstills.finished)
                places = [{"ranks": ranks, "where": where} for ranks, where in found]
                reply(json.dumps({"places": places, "notes": notes}))
                return
            shown = lines or ("no rank is running: the workers are being started, or have ended",)
            reply("\n".join([*notes, *shown]))

        self._take_stacks(show)
