"""The other end of an agent: how it is started, what it says, how it ends. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.decisions.host_checks import refusal
from distrain.errors import WireError
from distrain.system import process
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.coordinator.transport import Transport
    from distrain.system.loop import Loop

PING_INTERVAL_S = 5.0
CLOSE_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 1.0
"""Between the end of what an agent says and the end of its process, or of ssh."""
_CHATTER_KEPT = 4 << 10
_HINTS = {
    127: ", there is no such program: python= in the hostfile names the interpreter of a host",
    255: ", which is ssh's when it cannot connect or log in",
}
"""What an exit code means before a HELLO."""
_ENDS = {255: ", which is ssh's when the connection breaks or the agent is killed"}
"""The same after it."""


def agent_argv(transport: Transport, run_ids: str, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
    """The command line of an agent for this host. ``env`` puts ``run_ids`` where a sweep can find them. A fit() in a
    worker is for its own host.
    """
    gpus = transport.host.gpus
    shown = [f"CUDA_VISIBLE_DEVICES={','.join(gpus)}"] if gpus else []
    hidden = ["-u", "DISTRAIN_HOSTS", "-u", "DISTRAIN_HOSTFILE"]
    program = _program(transport, *arguments, flags=flags)
    return transport.argv(["env", *hidden, f"{process.RUN_IDS}={run_ids}", *shown, *program])


def sweeper_argv(transport: Transport, run_id: str, *, flags: Sequence[str] = ()) -> list[str]:
    """The command line of what ends all that a run has left on this host."""
    return transport.argv(_program(transport, run_id, "sweep", flags=flags))


def _program(transport: Transport, *arguments: str, flags: Sequence[str]) -> list[str]:
    return process.bootstrap_argv("agent", *arguments, python=transport.host.python or "", flags=flags)


class AgentLink:
    """The process that carries the wire to one host, and what comes over it."""

    def __init__(self, loop: Loop, transport: Transport, argv: list[str]) -> None:
        self.name = transport.host.name
        self.lease_s = transport.lease_s
        """So long it may be silent."""
        self.hello: dict[str, Any] = {}
        """What its HELLO says, which may have other fields than ours if it is refused."""
        self.greeted_in_s: float | None = None
        """How long its HELLO took, if it has come."""
        self.greeted = False
        """Whether it was welcome, too."""
        self.dropped = False
        self._is_local = transport.host.is_local
        self._ours = "" if transport.host.is_local else f"{os.path.basename(argv[0])} on this machine was "
        self._argv = argv
        self._loop = loop
        self._chatter = b""
        self._began = time.monotonic()
        self._process = process.spawn(argv, stderr=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._channel = Channel(
            os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()), greeting=True
        )
        self._process.stdin.close()
        self._process.stdout.close()
        self._stderr = self._process.stderr
        os.set_blocking(self._stderr.fileno(), False)

    # -- what it says ---------------------------------------------------------------------------------------------

    def listen(
        self,
        on_message: Callable[[AgentLink, wire.Message], None],
        *,
        on_refused: Callable[[AgentLink, str, str], None],
        on_end: Callable[[AgentLink], None],
    ) -> None:
        """Hear the host until it is dropped; it is dropped before either of the last two is called.

        on_refused: gets the topic of the refusal (see :class:`~distrain.decisions.host_checks.Finding`) and the reason.
        on_end: the agent has ended by itself, see :meth:`why_it_ended`.
        """
        self._on_message, self._on_refused, self._on_end = on_message, on_refused, on_end
        self._channel.attach(self._loop, self._receive)
        self._loop.on_readable(self._stderr.fileno(), self._read_stderr)

    def _receive(self, frames: list[wire.Frame]) -> None:
        for frame in frames:
            if not self.dropped:
                self._take(frame)
        if not frames and not self.dropped:
            self.dropped = True
            self._on_end(self)

    def _take(self, frame: wire.Frame) -> None:
        is_hello = frame.kind == wire.Hello.__name__
        if is_hello and (refused := self._greet(frame.header)) is not None:
            self._refuse(*refused)
            return
        try:
            message = frame.message()
        except WireError as error:
            self._refuse("ssh", f"it does not speak our protocol: {error}")
            return
        self.greeted = self.greeted or is_hello
        self._on_message(self, message)

    def _greet(self, hello: dict[str, Any]) -> tuple[str, str] | None:
        """Why an agent is refused, if it is: we may not understand its messages or pickles."""
        self.hello = hello
        self.greeted_in_s = time.monotonic() - self._began
        return refusal(hello, platform.python_version())

    def _refuse(self, about: str, why: str) -> None:
        self.drop()
        self._on_refused(self, about, why)

    def _read_stderr(self) -> None:
        """What the agent or ssh has to say; shown only when it is the explanation of an end."""
        try:
            data = os.read(self._stderr.fileno(), 64 << 10)
        except BlockingIOError:
            return
        if not data:
            self._loop.forget(self._stderr.fileno())
        self._chatter = (self._chatter + data)[-_CHATTER_KEPT:]

    @property
    def last_heard(self) -> float:
        return self._channel.heard_at

    # -- what it is told ------------------------------------------------------------------------------------------

    def send(self, message: wire.Message) -> None:
        if not self.dropped:
            self._channel.queue(message)

    def drop(self) -> None:
        """Stop talking to this host; its agent then empties it by itself, or its guard does when the lease is over."""
        if not self.dropped:
            self.dropped = True
            self._channel.close()
            self._process.terminate()

    # -- its end --------------------------------------------------------------------------------------------------

    def why_it_was_dropped(self, silence_s: float) -> str:
        """After a silence for too long; ssh may have something to say about it."""
        why = "stopped (SIGSTOP)" if self._is_local else "host or network down, or the host is frozen"
        return f"its agent has been silent for {silence_s:.0f} s: {why}?{self._last_words()}"

    def why_it_ended(self) -> str:
        """The connection is at its end: how, and what was said before."""
        if self._channel.broken is not None:
            return f"it does not speak our protocol: {self._channel.broken}"
        try:
            code = self._await_end()
            how = f"{self._ours}killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            how += (_ENDS if self.greeted else _HINTS).get(code, "")
        except subprocess.TimeoutExpired:
            how = "its connection was closed"
        command = "" if self.greeted else f" (started as: {process.describe(self._argv)})"
        return f"its agent has ended: {how}{command}{self._last_words()}"

    def _await_end(self) -> int:
        """Wait for the process, whose channel is at its end: its guard may still be emptying the host. Raises
        TimeoutExpired.
        """
        self._process.send_signal(signal.SIGCONT)  # if the guard was stopped, it does so now
        return self._process.wait(timeout=_END_TIMEOUT_S)

    def _last_words(self) -> str:
        said = self.chatter()
        return f"; last words:\n{said}" if said else ""

    def chatter(self) -> str:
        """What came beside the wire, as far as it may explain an end."""
        self._read_stderr()
        return (self._channel.decoder.chatter + self._chatter).decode(errors="replace").strip()

    @property
    def exit_code(self) -> int | None:
        """After :meth:`why_it_ended`; None if the process goes on."""
        return self._process.returncode

    def wait_for_end(self, deadline: float) -> bool:
        """Let the agent finish. False if it was lost before, or had to be killed: the host may need a sweep."""
        clean = not self.dropped and self._drain(deadline)
        self.dispose()
        return clean

    def _drain(self, deadline: float) -> bool:
        self._loop.forget(self._channel.read_fd)
        self._channel.flush()
        while not self._channel.at_end:
            left = deadline - time.monotonic()
            self._channel.flush()
            self._channel.wait(max(0.0, min(left, 0.1)))  # who has ended while others were waited for is in time
            if left <= 0 and not self._channel.at_end:
                return False
        return True

    def dispose(self) -> None:
        """Release all that this machine has of it; harmless when done twice."""
        if self._stderr.closed:
            return
        self.dropped = True
        ended = self._channel.at_end and self._channel.read_fd >= 0  # by itself: we have not closed it
        self._channel.close()
        self._loop.forget(self._stderr.fileno())
        self._stderr.close()
        if ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._await_end()
        self._process.kill()
        self._process.wait()


def close_all(links: Sequence[AgentLink]) -> set[str]:
    """Have every agent empty its host and go, and end those that do not. Returns the names of those that did."""
    for link in links:
        link.send(wire.Close())
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    return {link.name for link in links if link.wait_for_end(deadline)}
