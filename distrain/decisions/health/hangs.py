"""Hangs: who is stuck, who waits, and the stacks of the ranks for that and on demand. Runs in: coordinator.

Pure: no I/O, no clock. Messages of ranks and hosts go in, and moments that come; what has to be done about them comes
out.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from distrain import wire
from distrain.api.observer import HangBegan, HangEnded
from distrain.decisions.checkpoints.actions import Brought
from distrain.decisions.events import AttemptEnded, AttemptStarts, HangDetected, SendMessage, ShowLine
from distrain.decisions.health.collectives import Comparison, compare
from distrain.decisions.health.standstills import Hang, Standstills
from distrain.decisions.hearing import does, hears
from distrain.system.stacks import location, places_of, summarize_stacks, suspects
from distrain.system.text import duration, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from distrain.api.config import FailureConfig

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


class Keep(NamedTuple):
    """Keep a piece of evidence."""

    what: str
    rank: int
    body: bytes


class Reply(NamedTuple):
    """Answer a person who has asked for stacks."""

    reply: Callable[[str], None]
    text: str


if TYPE_CHECKING:
    Action = wire.ToWorker | SendMessage | ShowLine | HangDetected | HangBegan | HangEnded | Keep | Reply


@dataclass(eq=False)
class Hangs:
    """The hangs of each attempt, and the stacks of its ranks.

    Whoever calls a method sets ``now`` before, and does afterwards what is in ``actions``.
    is_serving: files are being stored for ranks, or brought to them; nothing hangs while a rank waits for that.
    is_debugged: a rank waits for a person, and others for it.

    hosts: returns those of the attempt that are not lost; none while no rank is at work. since_1970: turns a moment
    into seconds since 1970. folder: returns where evidence is kept.
    """

    config: FailureConfig
    hosts: Callable[[], list[str]]
    since_1970: Callable[[float], float]
    folder: Callable[[], object]
    now: float = 0.0
    is_serving: bool = False
    is_debugged: bool = False
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = ((self.config.hang_report_s, self._warn_of_silence), (self.config.hang_timeout_s, self._time_out))
        chosen = [(limit_s, action) for limit_s, action in limits if limit_s is not None and limit_s < math.inf]
        self._limits = sorted(chosen, key=itemgetter(0))
        self._begin(-1, 0)

    @does(AttemptStarts)
    def begin(self, starts: AttemptStarts) -> None:
        """Begin with the ranks of an attempt, and forget the last one."""
        self._begin(starts.attempt, len(starts.plan.ranks))

    def _begin(self, attempt: int, ranks: int) -> None:
        self._attempt = attempt
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
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
        self._progress_at = self.now
        self._exceeded = 0
        """The limits that have been exceeded since the last progress."""
        self._hung_since: float | None = None
        """Since when there is no progress (seconds since 1970), once that was reported."""

    @does(AttemptEnded)
    def end_hang(self, _: AttemptEnded | None = None) -> None:
        """Record the hang that has ended, if there was one."""
        hang, self._hang = self._hang, None
        if self._hung_since is not None:
            self.actions.append(HangEnded(self._hung_since, "" if hang is None else hang.headline()))
            self._hung_since = None

    @hears(
        wire.Reported,
        wire.FilesCopied,
        wire.PartWritten,
        wire.CollectiveEntered,
        wire.AskCheckpointList,
        wire.FetchCheckpoint,
        wire.Output,
        Brought,
    )
    def on_sign_of_life(self, _: str, message: wire.Message | Brought) -> None:
        """Note that a rank does something. One that gets files may have waited longer than a rank may stand still."""
        self.progress()

    @hears(wire.Running)
    def on_running(self, _: str, message: wire.Running) -> None:
        """Watch a rank that enters train_func."""
        self.progress()
        self.standstills.ranks.add(message.rank)

    def progress(self) -> None:
        """Note that a rank has reported or printed something. Called for every report, so it has to be cheap."""
        self._progress_at = self.now
        if self._exceeded and self._hang is None:
            self.end_hang()
        self._exceeded = 0

    def locations(self, ranks: Collection[int]) -> _Lines:
        """Return lines that show where these ranks were, as far as their stacks are known."""
        known = {rank: self._stacks[rank] for rank in ranks if rank in self._stacks}
        return tuple(summarize_stacks(known, silent=self._silent.intersection(ranks)))

    # -- hangs, by evidence ---------------------------------------------------------------------------------------

    @does(wire.Outcome, wire.Exited)
    def rank_ended(self, end: wire.Outcome | wire.Exited) -> None:
        """Note that a rank has left train_func."""
        ok = isinstance(end, wire.Outcome) and end.ok
        self.standstills.ended(end.rank, self.now, ok=ok)
        self._judged = False
        if ok:
            self._note_move()

    @hears(wire.Standstill)
    def heard(self, _: str, message: wire.Standstill) -> None:
        """Note that a rank stands still, or moves again."""
        if not self.hosts():
            return
        was_asking = self.standstills.is_asking
        self.standstills.heard(message, self.now)
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
                self._show(f"the ranks move again, after {duration(self.now - self._hang.since)}", is_news=True)
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
            self._ask("flight_recorder", self.standstills.ranks)
            self._later("records", _RECORDS_S, self._show_hang)
        elif not self._looks and (unheard := self.standstills.unheard(now)):
            self._looks = True
            self._ask("standstill", unheard)
            self._later("answers", _ANSWER_S, self._look_at_unheard)

    def _look_at_unheard(self) -> None:
        if self.standstills.unheard(self.now):
            self._take_stacks(self._note_silence, watches=True)
        else:
            self._looks = False

    def _note_silence(self, _: _Lines) -> None:
        self._looks, now = False, self.now
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
        hang = self.standstills.hang(self.now) or self._hang
        hang = self._hang = replace(hang, collectives=self.collectives())
        self.actions.append(HangBegan(hang.headline(), self._note_hang(hang.since), hang.culprits, hang.headline))
        if self._shown < _MOST_SHOWN:
            self._shown += 1
            where = f"stacks and flight recorders: {self.folder()}"
            self._show(*self._evidence_lines(), *[hang.collectives.cure] * (not hang.stuck), where)
        if hang.stranded and self.config.hang_timeout_s is not None:
            self._later("records", _PROOF_S, partial(self._prove, hang))

    def _prove(self, hang: Hang) -> None:
        """Look again at ranks that wait for one that has finished."""
        if self._hang is hang:
            self._ask("flight_recorder", self.standstills.ranks)
            self._later("records", _RECORDS_S, partial(self._take_stacks, partial(self._end_deadlock, hang)))

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
            self._time_out(round(self.now - hang.since), lines, deadlock)

    def _evidence_lines(self) -> list[str]:
        """Return what is known about the hang, beside the stacks."""
        hang = [] if self._hang is None else [self._hang.text(self.now)]
        return [*hang, *self.collectives().sentences]

    # -- no progress ----------------------------------------------------------------------------------------------

    def _ask(self, what: str, ranks: Collection[int]) -> None:
        self.actions += [wire.Ask(attempt=self._attempt, rank=rank, what=what) for rank in ranks]

    def _show(self, *lines: str, is_news: bool = False) -> None:
        self.actions.append(ShowLine("\n    ".join(lines), is_news=is_news))

    def _later(self, name: str, delay_s: float, then: Callable[[], None]) -> None:
        """Call ``then`` when a :meth:`tick` comes after so many seconds. It replaces another one by that name."""
        self._timers[name] = self.now + delay_s, then

    def deadline(self) -> float | None:
        """Return when to call :meth:`tick`, or None."""
        moments = [moment for moment, _ in self._timers.values()]
        if self._may_hang:
            moments += [self._progress_at + limit_s for limit_s, _ in self._limits[self._exceeded :]]
            if not self._judged and (standing := self.standstills.deadline()) is not None:
                moments.append(standing)
        return min(moments, default=None)

    @property
    def _may_hang(self) -> bool:
        is_excused = self.is_debugged or (self.is_serving and self.standstills.is_asking)
        return bool(self.hosts()) and not is_excused

    def tick(self) -> None:
        """Judge the standstills of the ranks. Take stacks if a limit has been exceeded."""
        now = self.now
        for name, timer in list(self._timers.items()):
            if now >= timer[0] and self._timers.get(name) is timer:
                del self._timers[name]
                timer[1]()
        if not self._may_hang:
            return
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
        self._hung_since = self._hung_since or self.since_1970(since)
        return self._hung_since

    def _warn_of_silence(self, after_s: float, lines: _Lines) -> None:
        """Show where all ranks are, without ending the attempt."""
        where_stacks_are = f"stacks are in {self.folder()}" if lines else "no rank has been started yet"
        head = f"no rank has reported or printed anything for {after_s:g} s; {where_stacks_are}"
        self._show(head, *lines)

    def _time_out(self, after_s: float, lines: _Lines, deadlock: str = "") -> None:
        blamed = suspects(self._stacks, silent=self._silent) if self._hang is None else self._hang.culprits
        self.actions.append(HangDetected(after_s, (*self._evidence_lines(), *lines), tuple(blamed), deadlock))

    # -- taking stacks --------------------------------------------------------------------------------------------

    def _take_stacks(self, then: Callable[[_Lines], None], *, watches: bool = False) -> None:
        """Call ``then`` with lines for the user, once all hosts have answered or are late.

        A mere look whether ranks are mute keeps no files: the run may be healthy.
        """
        self._callbacks.append(then)
        if len(self._callbacks) > 1:
            return
        self._stacks, self._silent, self._idle = {}, set(), set()
        hosts = self.hosts()
        self._ask("standstill", sorted(self.standstills.ranks) if hosts else ())
        self.actions += [SendMessage(host, wire.TakeStacks(attempt=self._attempt, watches=watches)) for host in hosts]
        self._awaited_hosts = set(hosts)
        self._later("stacks", STACKS_TIMEOUT_S if self._awaited_hosts else 0.0, self._complete)

    def _add_stacks(self, dump: wire.Dump) -> None:
        """Take the stacks of a rank, whether asked for or taken before it was killed."""
        self._stacks[dump.rank] = dump.body.decode(errors="replace")
        self._silent.discard(dump.rank)
        if not self._callbacks:
            self.actions.append(Keep("stacks", dump.rank, dump.body))

    @hears(wire.StacksDone)
    def host_done(self, host: str, done: wire.StacksDone) -> None:
        """Note that a host has sent all stacks it could take. Older stacks of silent ranks are kept."""
        self._silent |= set(done.silent) - self._stacks.keys()
        self._idle |= set(done.idle)
        self._awaited_hosts.discard(host)
        if self._callbacks and not self._awaited_hosts:
            self._complete()

    def _complete(self) -> None:
        self._timers.pop("stacks", None)
        callbacks, self._callbacks = self._callbacks, []
        for rank, text in self._stacks.items() if callbacks != [self._note_silence] else ():
            self.actions.append(Keep("stacks", rank, text.encode()))
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
                self.actions.append(Reply(reply, json.dumps({"places": places, "notes": notes})))
                return
            shown = lines or ("no rank is running: the workers are being started, or have ended",)
            self.actions.append(Reply(reply, "\n".join([*notes, *shown])))

        self._take_stacks(show)
