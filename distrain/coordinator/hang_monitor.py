"""Detection of hangs, and the stacks of the ranks for it and on demand. Runs in: coordinator."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

from distrain.api.observer import HangBegan, HangEnded
from distrain.decisions.events import HangDetected
from distrain.decisions.health.collectives import compare
from distrain.decisions.health.standstills import Hang, Standstills
from distrain.decisions.host_checks import Finding, HostChecks, Question
from distrain.hosts.reachability import CONNECT_TIMEOUT_S
from distrain.system.log import say, warn
from distrain.system.stacks import summarize_stacks, suspects
from distrain.system.text import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from distrain import wire
    from distrain.api.config import FailureConfig
    from distrain.api.observer import Fact
    from distrain.coordinator.evidence import Evidence
    from distrain.system.loop import Loop

STACKS_TIMEOUT_S = 3.0
"""Seconds to wait for the stacks of all hosts before those that have arrived are shown."""
_CONNECTIONS_TIMEOUT_S = CONNECT_TIMEOUT_S + STACKS_TIMEOUT_S
"""Seconds to wait for the stacks if hosts also try to connect to each other."""
_RECORDS_S = 1.0
"""Seconds to wait for the flight recorders of all ranks before a hang is shown."""
_MOST_SHOWN = 3
"""Hangs of one attempt that are shown. A run may stand still in each epoch, and go on."""


class HangMonitor:
    """Observe the progress of each attempt. Take stacks of its ranks, and try the connections between its hosts.

    ask_for_stacks: makes every host take stacks, and returns the names of the hosts. ask_for_records: makes every rank
    send what its flight recorder has.
    addresses: returns the addresses of the hosts that can be asked now to connect to each other.
    send: sends a message to a host.
    on_hang: is called when there was no progress for ``FailureConfig.hang_timeout_s``. tell: tells a fact.
    """

    def __init__(
        self,
        loop: Loop,
        evidence: Evidence,
        config: FailureConfig,
        *,
        ask_for_stacks: Callable[[], list[str]],
        ask_for_records: Callable[[], None],
        addresses: Callable[[], Mapping[str, str]],
        send: Callable[[str, wire.Message], None],
        on_hang: Callable[[HangDetected], None],
        tell: Callable[[Fact], None],
    ) -> None:
        self._loop = loop
        self._tell = tell
        self._evidence = evidence
        self._limits = {"report": config.hang_report_s, "timeout": config.hang_timeout_s}
        self._actions = {"report": self._warn_of_silence, "timeout": self._time_out}
        self._ask_for_stacks = ask_for_stacks
        self._ask_for_records = ask_for_records
        self._addresses = addresses
        self._send = send
        self._on_hang = on_hang
        self.begin()

    def begin(self, ranks: int = 0) -> None:
        """Forget the last attempt. ``ranks``: the number of those of the next one."""
        self._standstills = Standstills(expected=ranks)
        self._records: dict[int, dict[str, Any]] = {}
        """By rank that stands still: its flight recorder."""
        self._hang: Hang | None = None
        self._shown, self._is_shown = 0, True
        self._judged = True
        """True once the standstills of the ranks as they are now were looked at."""
        self._stacks: dict[int, str] = {}
        self._silent: set[int] = set()
        self._finished: Collection[int] = ()
        self._awaited_hosts: set[str] = set()
        self._connections = HostChecks({}, {}, nonce="")
        self._callbacks: list[Callable[[tuple[str, ...]], None]] = []
        self._is_look = False
        self._progress_at = time.monotonic()
        self._hung_since: float | None = None
        """Since when there is no progress (seconds since 1970), once that was reported."""
        self._watch_all()

    def end_hang(self) -> None:
        """Record the hang that has ended, if there was one."""
        hang, self._hang = self._hang, None
        if self._hung_since is not None:
            self._tell(HangEnded(self._hung_since, "" if hang is None else hang.text()))
            self._hung_since = None

    def progress(self) -> None:
        """Note that a rank has reported or printed something. Called for every report, so it has to be cheap."""
        self._progress_at = time.monotonic()
        if self._has_acted:
            if self._hang is None:
                self.end_hang()
            self._watch_all()

    def _watch_all(self) -> None:
        """Begin to wait for the end of all limits."""
        self._has_acted = False
        self._due = {purpose: limit_s for purpose, limit_s in self._limits.items() if limit_s is not None}

    def locations(self, ranks: Collection[int]) -> tuple[str, ...]:
        """Return lines that show where these ranks were, as far as their stacks are known."""
        chosen = set(ranks)
        known = {rank: text for rank, text in self._stacks.items() if rank in chosen}
        return tuple(summarize_stacks(known, silent=self._silent & chosen))

    # -- hangs, by evidence ---------------------------------------------------------------------------------------

    def rank_begins(self, rank: int) -> None:
        """Note that a rank has entered train_func."""
        self._standstills.ranks.add(rank)

    def rank_ended(self, rank: int, *, ok: bool) -> None:
        """Note that a rank has left train_func."""
        self._standstills.ended(rank, time.monotonic(), ok=ok)
        self._judged = False

    def heard(self, message: wire.Standstill) -> None:
        """Note that a rank stands still, or moves again."""
        self._standstills.heard(message, time.monotonic())
        if not message.state:
            self._records.pop(message.rank, None)
        self._judged = False
        if self._hang is not None and self._standstills.hang(time.monotonic()) is None:
            say(f"the ranks move again, after {duration(time.monotonic() - self._hang.since)}")
            self.end_hang()

    def add_record(self, rank: int, body: bytes) -> None:
        """Take the flight recorder of a rank that stands still, or has failed."""
        self._records[rank] = json.loads(body)
        if len(self._records) >= len(self._standstills.ranks):
            self._show_hang()

    def collectives(self) -> list[str]:
        """Return sentences about the collectives that ranks lack, or that do not match."""
        return compare(self._records, finished=self._standstills.finished)

    def _judge(self, now: float) -> None:
        """Call it a hang if every rank stands still. Ask ranks for their stacks that say nothing."""
        self._judged = True
        hang = self._standstills.hang(now)
        if hang is not None and self._hang is None:
            self._hang = hang
            self._hung_since = self._hung_since or time.time() - (now - hang.since)
            self._is_shown = False
            self._tell(HangBegan(hang.text(), self._hung_since, hang.culprits, hang.text))
            self._take_stacks(lambda lines: None)
            self._ask_for_records()
            self._loop.call_in("records", _RECORDS_S, self._show_hang)
        elif self._standstills.unheard(now):
            self._take_stacks(lambda lines: self._note_mute(), is_look=True)

    def _note_mute(self) -> None:
        if mute := self._silent & self._standstills.unheard(time.monotonic()):
            self._standstills.mute |= mute
            self._judge(time.monotonic())

    def _show_hang(self) -> None:
        """Show a new hang, as soon as the flight recorders are there."""
        if self._hang is None or self._is_shown:
            return
        self._is_shown = True
        self._shown += 1
        if self._shown <= _MOST_SHOWN:
            text = self._hang.text(time.monotonic())
            warn("\n    ".join([text, *self.collectives(), f"stacks and flight recorders: {self._evidence.folder}"]))

    # -- no progress ----------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """Return when to call :meth:`tick` while ranks are at work (time.monotonic), or None."""
        limits = [self._progress_at + limit_s for limit_s in self._due.values()]
        standing = None if self._judged else self._standstills.deadline()
        return min([*limits, *([standing] if standing is not None else [])], default=None)

    def tick(self) -> None:
        """Judge the standstills of the ranks. Take stacks if a limit has been exceeded."""
        now = time.monotonic()
        standing = None if self._judged else self._standstills.deadline()
        if standing is not None and now >= standing:
            self._judge(now)
        for purpose, limit_s in sorted(self._due.items()):
            if now >= self._progress_at + limit_s:
                self._has_acted = True
                del self._due[purpose]
                self._take_stacks(self._unless_progress(self._actions[purpose], limit_s))

    def _unless_progress(
        self, then: Callable[[float, tuple[str, ...]], None], after_s: float
    ) -> Callable[[tuple[str, ...]], None]:
        """Return a callback that does nothing if a rank has made progress while stacks were taken."""
        since = self._progress_at
        return lambda lines: then(after_s, lines) if self._progress_at == since else None

    def _warn_of_silence(self, after_s: float, lines: tuple[str, ...]) -> None:
        """Show where all ranks are, without ending the attempt."""
        self._note_hang()
        folder = self._evidence.folder
        where_stacks_are = f"stacks are in {folder}" if lines else "no rank has been started yet"
        head = f"no rank has reported or printed anything for {after_s:g} s; {where_stacks_are}"
        warn("\n    ".join([head, *lines]))

    def _note_hang(self) -> None:
        if self._hung_since is None:
            self._hung_since = time.time() - (time.monotonic() - self._progress_at)

    def _time_out(self, after_s: float, lines: tuple[str, ...]) -> None:
        self._note_hang()
        blamed = suspects(self._stacks, silent=self._silent) if self._hang is None else self._hang.culprits
        self._on_hang(HangDetected(after_s, (*self._evidence_lines(), *lines), tuple(blamed)))

    def _evidence_lines(self) -> list[str]:
        """Return what is known about the hang, beside the stacks."""
        return [*([self._hang.text(time.monotonic())] if self._hang is not None else []), *self.collectives()]

    # -- taking stacks --------------------------------------------------------------------------------------------

    def _take_stacks(self, then: Callable[[tuple[str, ...]], None], *, is_look: bool = False) -> None:
        """Call ``then`` with lines for the user, once all hosts have answered or are late.

        is_look: keep no files, and try no connections.
        """
        self._callbacks.append(then)
        if len(self._callbacks) > 1:
            if self._is_look and not is_look:
                self._is_look = False
                self._keep_all()
            return
        self._is_look = is_look
        self._stacks, self._silent = {}, set()
        self._awaited_hosts = set(self._ask_for_stacks())
        addresses = self._addresses() if self._awaited_hosts and not is_look else {}
        self._connections = HostChecks({}, addresses, nonce=uuid.uuid4().hex)
        timeout_s = STACKS_TIMEOUT_S if self._connections.is_done else _CONNECTIONS_TIMEOUT_S
        self._ask(self._connections.begin())
        self._loop.call_in("stacks", timeout_s if self._awaited_hosts else 0.0, self._complete)

    def add_stacks(self, rank: int, body: bytes) -> None:
        """Take the stacks of a rank, whether asked for or taken before it was killed."""
        self._stacks[rank] = body.decode(errors="replace")
        self._silent.discard(rank)
        if not self._is_look:
            self._keep(rank, body)

    def _keep_all(self) -> None:
        for rank, text in self._stacks.items():
            self._keep(rank, text.encode())

    def _keep(self, rank: int, body: bytes) -> None:
        self._evidence.keep("stacks", rank, body)

    def host_done(self, host: str, done: wire.StacksDone, finished: Collection[int]) -> None:
        """Note that a host has sent all stacks it could take. Older stacks of silent ranks are kept.

        finished: the ranks that have finished so far; more may be added later.
        """
        self._silent |= set(done.silent) - self._stacks.keys()
        self._finished = finished
        self._awaited_hosts.discard(host)
        self._complete_if_all_answered()

    def handle(self, host: str, answer: wire.HostProbed) -> None:
        """Take the answer of a host to a question about its connections."""
        if not self._connections.is_done:
            self._ask(self._connections.handle(host, answer))
            self._complete_if_all_answered()

    def _ask(self, steps: Iterable[Question | Finding]) -> None:
        for step in steps:
            if isinstance(step, Question):
                self._send(step.host, step.message)

    def _complete_if_all_answered(self) -> None:
        if not self._awaited_hosts and self._connections.is_done:
            self._complete()

    def _complete(self) -> None:
        self._loop.cancel("stacks")
        self._awaited_hosts, self._is_look = set(), False
        callbacks, self._callbacks = self._callbacks, []
        any_known = self._stacks or self._silent
        lines: Sequence[str] = ()
        if any_known:
            lines = summarize_stacks(self._stacks, silent=self._silent, finished=self._finished)
        blocked = [f"{finding.host}: {finding.text}" for finding in self._connections.connection_findings()]
        self._connections = HostChecks({}, {}, nonce="")
        for callback in callbacks:
            callback((*lines, *blocked))

    def answer(self, reply: Callable[[str], None]) -> None:
        """Take stacks, and reply with lines that summarize them."""

        def show(lines: tuple[str, ...]) -> None:
            shown = lines or ("no rank is running: the workers are being started, or have ended",)
            reply("\n".join([*self._evidence_lines(), *shown]))

        self._take_stacks(show)
