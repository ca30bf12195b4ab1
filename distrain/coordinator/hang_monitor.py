"""Detection of hangs, and the stacks of the ranks for it and on demand. Runs in: coordinator."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from distrain.api.observer import HangEnded
from distrain.decisions.events import HangDetected
from distrain.decisions.host_checks import Finding, HostChecks, Question
from distrain.hosts.reachability import CONNECT_TIMEOUT_S
from distrain.system.log import warn
from distrain.system.stacks import mismatched_collectives, summarize_stacks, suspects

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
LOOKS_S = {"first look": 60.0, "second look": 120.0}
"""Seconds without progress after which to look for collectives that do not match; shown if both find the same."""
_ADVICE = (
    "every rank must call the same collectives in the same order, from one thread. Code that calls them in another "
    "thread, such as torch.distributed.checkpoint.async_save(), needs its own process group"
)


class HangMonitor:
    """Observe the progress of each attempt. Take stacks of its ranks, and try the connections between its hosts.

    ask_for_stacks: makes every host take stacks, and returns the names of the hosts.
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
        addresses: Callable[[], Mapping[str, str]],
        send: Callable[[str, wire.Message], None],
        on_hang: Callable[[HangDetected], None],
        tell: Callable[[Fact], None],
    ) -> None:
        self._loop = loop
        self._tell = tell
        self._evidence = evidence
        self._limits = {"report": config.hang_report_s, "timeout": config.hang_timeout_s}
        if config.hang_report_s is not None:
            self._limits |= LOOKS_S
        self._actions = {"report": self._warn_of_hang, "timeout": self._time_out}
        self._ask_for_stacks = ask_for_stacks
        self._addresses = addresses
        self._send = send
        self._on_hang = on_hang
        self.begin()

    def begin(self) -> None:
        """Forget the last attempt."""
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
        if self._hung_since is not None:
            self._tell(HangEnded(self._hung_since))
            self._hung_since = None

    def progress(self) -> None:
        """Note that a rank has reported or printed something. Called for every report, so it has to be cheap."""
        self._progress_at = time.monotonic()
        if self._has_acted:
            self.end_hang()
            self._watch_all()

    def _watch_all(self) -> None:
        """Begin to wait for the end of all limits."""
        self._has_acted = False
        self._due = {purpose: limit_s for purpose, limit_s in self._limits.items() if limit_s is not None}
        self._mismatch: list[str] = []

    def locations(self, ranks: Collection[int]) -> tuple[str, ...]:
        """Return lines that show where these ranks were, as far as their stacks are known."""
        chosen = set(ranks)
        known = {rank: text for rank, text in self._stacks.items() if rank in chosen}
        return tuple(summarize_stacks(known, silent=self._silent & chosen))

    # -- no progress ----------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """Return when to call :meth:`tick` while ranks are at work (time.monotonic), or None."""
        return min((self._progress_at + limit_s for limit_s in self._due.values()), default=None)

    def tick(self) -> None:
        """Take stacks if a limit has been exceeded."""
        self._has_acted = True
        now = time.monotonic()
        for purpose, limit_s in sorted(self._due.items()):
            if now >= self._progress_at + limit_s:
                del self._due[purpose]
                then = self._actions.get(purpose, self._look)
                self._take_stacks(self._unless_progress(then, limit_s), is_look=purpose in LOOKS_S)

    def _look(self, after_s: float, lines: tuple[str, ...]) -> None:
        """Show collectives that do not match, without waiting for the limit of the user."""
        before, self._mismatch = self._mismatch, [] if self._silent else mismatched_collectives(self._stacks)
        if self._mismatch and self._mismatch == before and "report" in self._due:
            del self._due["report"]
            self._keep_all()
            self._warn_of_hang(after_s, (*self._mismatch, _ADVICE))

    def _unless_progress(
        self, then: Callable[[float, tuple[str, ...]], None], after_s: float
    ) -> Callable[[tuple[str, ...]], None]:
        """Return a callback that does nothing if a rank has made progress while stacks were taken."""
        since = self._progress_at
        return lambda lines: then(after_s, lines) if self._progress_at == since else None

    def _warn_of_hang(self, after_s: float, lines: tuple[str, ...]) -> None:
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
        self._on_hang(HangDetected(after_s, lines, tuple(suspects(self._stacks, silent=self._silent))))

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
            reply("\n".join(lines or ("no rank is running: the workers are being started, or have ended",)))

        self._take_stacks(show)
