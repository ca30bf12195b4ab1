"""Where the ranks are: on demand from another terminal, and by itself when nobody makes progress. Runs in: coordinator.

A request is a line in a named pipe of the run directory, answered by a file in it: nothing listens on a network, and
only who may write to the directory can ask.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from typing import TYPE_CHECKING

from distrain.decisions.events import HangDetected
from distrain.decisions.host_checks import Pairs
from distrain.decisions.stack_summary import grouped, mismatched, suspects
from distrain.errors import StorageError
from distrain.hosts.reachability import REACH_S
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from distrain import wire
    from distrain.config import FailureConfig
    from distrain.storage.paths import RunPaths
    from distrain.storage.run_store import RunStore
    from distrain.system.loop import Loop

ANSWER_S = 3.0
"""For all hosts to send the stacks of their workers; after this, whatever came is shown."""
_PAIRS_ANSWER_S = REACH_S + ANSWER_S
"""The same where hosts also try to connect to each other."""
LOOKS_S = (60.0, 90.0, 120.0)
"""Seconds of silence after which to look for ranks that wait for each other in collectives that do not match. They are
reported if every look finds the same; after one that does not, there is no other."""
_ADVICE = (
    "every rank must call the same collectives in the same order, and from one thread: what calls some in a thread of "
    "its own, such as torch.distributed.checkpoint.async_save(), needs a process group of its own"
)
REQUEST_TIMEOUT_S = 10.0
_REQUEST_BYTES = 4096


class HangMonitor:
    """Stacks of one attempt after the other, and which of its hosts cannot connect to each other.

    ask: makes every host take stacks, and returns the hosts' names. addresses: those of hosts that can be asked now to
    connect to each other. send: tells a host something. hung: hears when there was no progress for
    ``FailureConfig.hang_timeout_s``.
    """

    def __init__(
        self,
        loop: Loop,
        store: RunStore,
        config: FailureConfig,
        *,
        ask: Callable[[], list[str]],
        addresses: Callable[[], Mapping[str, str]],
        send: Callable[[str, wire.Message], None],
        hung: Callable[[HangDetected], None],
    ) -> None:
        self._loop = loop
        self._store = store
        self._paths = store.paths
        self._limits = {"report": config.hang_report_s, "timeout": config.hang_timeout_s}
        self._ask = ask
        self._addresses = addresses
        self._send = send
        self._hung = hung
        self._pipe = -1
        self.begin(-1)

    def begin(self, attempt: int) -> None:
        """A new attempt, of which nothing is known yet."""
        self._attempt = attempt
        self._texts: dict[int, str] = {}
        self._silent: set[int] = set()
        self._finished: list[int] = []
        self._waiting_for: set[str] = set()
        self._pairs: Pairs | None = None
        self._then: list[Callable[[tuple[str, ...]], None]] = []
        self._is_look = False
        self.progress()

    def progress(self) -> None:
        """A rank has reported or printed something."""
        self._progress_at = time.monotonic()
        self._due = {purpose for purpose, limit_s in self._limits.items() if limit_s is not None}
        self._looks: tuple[float, ...] = LOOKS_S
        self._found: list[str] = []

    def where(self, ranks: Collection[int]) -> tuple[str, ...]:
        """The places of these ranks, as far as their stacks are known, in lines."""
        known = {rank: text for rank, text in self._texts.items() if rank in ranks}
        return tuple(grouped(known, silent=[rank for rank in self._silent if rank in ranks]))

    # -- when nobody makes progress -------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """When :meth:`tick` should be called while ranks are at work."""
        limits = (*(self._limits[purpose] for purpose in self._due), self._next_look_s())
        return min((self._progress_at + limit_s for limit_s in limits if limit_s is not None), default=None)

    def _next_look_s(self) -> float | None:
        """Return the silence after which to look at the ranks; None if there is no need to."""
        return self._looks[0] if self._looks and "report" in self._due and not self._then else None

    def tick(self) -> None:
        now = time.monotonic()
        for purpose in sorted(self._due):
            limit_s = self._limits[purpose]
            if limit_s is not None and now >= self._progress_at + limit_s:
                self._due.discard(purpose)
                self._take(self._unless_progress(self._report if purpose == "report" else self._time_out, limit_s))
        look_s = self._next_look_s()
        if look_s is not None and now >= self._progress_at + look_s:
            self._take(self._unless_progress(self._look, look_s), is_look=True)

    def _look(self, limit_s: float, where: tuple[str, ...]) -> None:
        """Report ranks that no patience can help, earlier than others."""
        is_first, before = self._looks == LOOKS_S, self._found
        self._found = [] if self._silent else mismatched(self._texts)
        is_stuck = bool(self._found) and (is_first or self._found == before)
        self._looks = self._looks[1:] if is_stuck else ()
        if is_stuck and not self._looks:
            self._due.discard("report")
            self._keep_all()
            self._report(limit_s, (*self._found, _ADVICE))

    def _unless_progress(
        self, then: Callable[[float, tuple[str, ...]], None], limit_s: float
    ) -> Callable[[tuple[str, ...]], None]:
        """Taking stacks takes its time, in which somebody may have woken up."""
        since = self._progress_at
        return lambda where: then(limit_s, where) if self._progress_at == since else None

    def _report(self, limit_s: float, where: tuple[str, ...]) -> None:
        folder = self._paths.stacks(self._attempt, 0).parent
        where_stacks_are = f"stacks are in {folder}" if where else "no rank has been started yet"
        warn("\n    ".join([f"no rank has reported or printed anything for {limit_s:g} s; {where_stacks_are}", *where]))

    def _time_out(self, limit_s: float, where: tuple[str, ...]) -> None:
        self._hung(HangDetected(limit_s, where, tuple(suspects(self._texts, silent=self._silent))))

    # -- taking stacks --------------------------------------------------------------------------------------------

    def _take(self, then: Callable[[tuple[str, ...]], None], *, is_look: bool = False) -> None:
        """``is_look``: keep no files, and do not have the hosts connect to each other."""
        self._then.append(then)
        if len(self._then) > 1:
            if self._is_look and not is_look:
                self._is_look = False
                self._keep_all()
            return
        self._is_look = is_look
        self._texts, self._silent = {}, set()
        self._waiting_for = set(self._ask())
        addresses = self._addresses() if self._waiting_for and not is_look else {}
        self._pairs = Pairs(addresses, uuid.uuid4().hex) if len(addresses) > 1 else None
        if self._pairs is not None:
            self._tell(self._pairs.begin())
        answer_s = _PAIRS_ANSWER_S if self._pairs is not None else ANSWER_S
        self._loop.call_in("stacks", answer_s if self._waiting_for else 0.0, self._complete)

    def came(self, rank: int, body: bytes) -> None:
        """Take the stacks of a rank, whether asked for or taken before it was killed."""
        self._texts[rank] = body.decode(errors="replace")
        self._silent.discard(rank)
        if not self._is_look:
            self._keep(rank, body)

    def _keep_all(self) -> None:
        for rank, text in self._texts.items():
            self._keep(rank, text.encode())

    def _keep(self, rank: int, body: bytes) -> None:
        path = self._paths.stacks(self._attempt, rank)
        self._store.write_optional_file(path, body, f"the stacks of rank {rank} could not be written")

    def taken(self, host: str, silent: Sequence[int], finished: Sequence[int]) -> None:
        """A host has sent all that it got. Where a rank was when it was asked before is better than nothing."""
        self._silent |= set(silent) - self._texts.keys()
        self._finished = list(finished)
        self._waiting_for.discard(host)
        self._complete_if_all_is_known()

    @property
    def tries_pairs(self) -> bool:
        """Whether hosts are asked to connect to each other: then :meth:`met` wants what they say."""
        return self._pairs is not None

    def met(self, host: str, answer: wire.ProbePortOpened | wire.ProbeResult) -> None:
        """Where a host can be connected to, or which others it cannot connect to."""
        assert self._pairs is not None
        self._tell(self._pairs.heard(host, answer))
        self._complete_if_all_is_known()

    def _tell(self, said: Mapping[str, wire.Message]) -> None:
        for host, message in said.items():
            self._send(host, message)

    def _complete_if_all_is_known(self) -> None:
        if not self._waiting_for and (self._pairs is None or self._pairs.is_done):
            self._complete()

    def _complete(self) -> None:
        self._loop.cancel("stacks")
        self._waiting_for, self._is_look = set(), False
        waiting, self._then = self._then, []
        known = self._texts or self._silent
        everybody = grouped(self._texts, silent=self._silent, finished=self._finished) if known else ()
        pairs, self._pairs = self._pairs, None
        blocked = [f"{finding.host}: {finding.text}" for finding in pairs.findings()] if pairs is not None else ()
        for then in waiting:
            then((*everybody, *blocked))

    # -- on demand ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take requests from now on."""
        path = self._paths.requests
        with contextlib.suppress(OSError):  # a file system without named pipes: then nobody can ask
            path.unlink(missing_ok=True)
            os.mkfifo(path, 0o600)
            self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._loop.on_readable(self._pipe, self._on_request)

    def close(self) -> None:
        """Take no more requests."""
        if self._pipe >= 0:
            self._loop.forget(self._pipe)
            os.close(self._pipe)
            self._pipe = -1
            self._store.delete_file(self._paths.requests)

    def _on_request(self) -> None:
        for token in os.read(self._pipe, _REQUEST_BYTES).decode(errors="replace").split():
            if token.isalnum():
                self._take(self._answer(token))

    def _answer(self, token: str) -> Callable[[tuple[str, ...]], None]:
        def answer(where: tuple[str, ...]) -> None:
            text = "\n".join(where or ("no rank is at work: the workers are being started, or have ended",))
            complaint = "a request for stacks could not be answered"
            self._store.write_optional_file(self._paths.answer(token), text.encode(), complaint)

        return answer


def request_stacks(paths: RunPaths) -> str:
    """Ask a run where its ranks are; returns a few lines. Raises StorageError if no run answers in this directory."""
    token = uuid.uuid4().hex
    try:
        pipe = os.open(paths.requests, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        raise StorageError(
            f"no run is at work in {paths.root} on this machine ({error.strerror}); ask where fit() runs"
        ) from None
    try:
        os.write(pipe, f"{token}\n".encode())
    finally:
        os.close(pipe)
    answer: Path = paths.answer(token)
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while not answer.exists():
        if time.monotonic() > deadline:
            raise StorageError(f"the run in {paths.root} did not answer within {REQUEST_TIMEOUT_S:g} s")
        time.sleep(0.02)
    text = answer.read_text()
    answer.unlink()
    return text
