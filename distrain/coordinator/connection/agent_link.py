"""The coordinator's end of an agent: its command line, its messages, its end. Runs in: coordinator."""

from __future__ import annotations

import os
import platform
import re
import shlex
import signal
import time
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.decisions.host_checks import refusal
from distrain.errors import WireError
from distrain.hosts.claims import CLAIM
from distrain.system import process
from distrain.system.loop import Loop
from distrain.system.stacks import without_noise
from distrain.transfer.program import arrival_argv, parcel
from distrain.wire.child_link import ChildLink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.coordinator.connection.transport import Transport

    _OnMessage = Callable[["AgentLink", wire.Message], None]
    _OnEnd = Callable[["AgentLink", str], None]

PING_INTERVAL_S = 10.0
CLOSE_TIMEOUT_S = 5.0
"""Seconds to wait for agents to empty their hosts before they are killed."""
_END_TIMEOUT_S = 1.0
"""Seconds to wait for the process of an agent, or ssh, to end after its output has ended: how it ends is shown."""
_END_POLL_S = 0.02
FILES_PER_HOST = 3
"""Files that this process opens for a host: stdin, stdout and stderr of its agent."""
_LAST_LINES, _LONGEST_LINE = 15, 300
"""Number and length of the last lines of an agent or of ssh that are shown."""
_NOT_FOUND = 127
"""Exit code of a shell, or of env, that does not find the program."""
_TURNED_AWAY = re.compile(rb"(kex|ssh)_exchange_identification:.*(closed|reset)")
"""Output of ssh if sshd hangs up before the login, as too many others are logging in (MaxStartups)."""
_SSH_CURES = {
    "Host key verification failed": "accept its key, once: ssh -o StrictHostKeyChecking=ask {login}",
    "Permission denied (": "it accepts no key that ssh offers: set IdentityFile to another, or ssh-copy-id {login}",
    "Could not resolve hostname": "correct {host}, or add it to ssh's config file",
    "Connection refused": "check that sshd runs on {host}, and at this port",
    "Connection timed out": "check that {host} is up, and its firewall",
    "No route to host": "check that {host} is up, and its firewall",
}
"""By words of ssh: what to do."""


def agent_argv(transport: Transport, run_ids: str, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the command line that starts an agent on the host.

    It removes variables that name hosts: a fit() inside of a worker uses the worker's own host.
    run_ids: put into the agent's environment, where a sweep finds them.
    """
    gpus = transport.host.gpus
    shown = [f"CUDA_VISIBLE_DEVICES={','.join(gpus)}"] if gpus else []
    hidden = ["-u", "DISTRAIN_HOSTS", "-u", "DISTRAIN_HOSTFILE", "-u", "DISTRAIN_TRANSPORT"]
    program = _program(transport, "agent", *arguments, flags=flags)
    return transport.argv(["env", *hidden, f"{process.RUN_IDS}={run_ids}", *shown, *_settings(transport), *program])


def sweeper_argv(transport: Transport, run_id: str, *, flags: Sequence[str] = ()) -> list[str]:
    """Return the command line that kills all processes of a run on the host."""
    return transport.argv(["env", *_settings(transport), *_program(transport, "agent", run_id, "sweep", flags=flags)])


def side_argv(transport: Transport, label: str) -> list[str]:
    """Return the command line that starts the :mod:`~distrain.jobs.side` of a job on the host."""
    shown = [f"CUDA_VISIBLE_DEVICES={','.join(transport.host.gpus)}"] if transport.host.gpus else []
    return transport.argv(["env", *shown, *_settings(transport), *_program(transport, "side", label, flags=())])


def stream_argv(
    transport: Transport, run_ids: str, hello: Mapping[str, Any], *, flags: Sequence[str] = ()
) -> list[str]:
    """Return the command line that starts a stream server on a host whose agent has sent ``hello``."""
    python, package = hello["executable"], hello["package"]
    program = process.bootstrap_argv("stream-server", python=[python], package=package, flags=flags)
    return transport.argv(["env", f"{process.RUN_IDS}={run_ids}", *_settings(transport), *program])


def _program(transport: Transport, program: str, *arguments: str, flags: Sequence[str]) -> list[str]:
    python = transport.host.python or ""
    if transport.ships:
        return arrival_argv(python, program, *arguments, flags=flags)
    if python:
        return process.bootstrap_argv(program, *arguments, python=[python], package="", flags=flags)
    return process.bootstrap_argv(program, *arguments, flags=flags)


def _settings(transport: Transport) -> list[str]:
    """Return assignments of the hostfile that are about the agent itself: its cache, and the claims of its job."""
    given = {CLAIM: os.environ.get(CLAIM), **transport.host.environment}
    return [f"{name}={value}" for name in ("DISTRAIN_CACHE", CLAIM) if (value := given.get(name))]


def _ignore(*arguments: object) -> None:
    """Do nothing, in place of a callback."""


class AgentLink:
    """The process that carries the messages to and from one agent: ssh, or the agent itself on this machine.

    on_end: the agent has ended, or was refused and dropped; gets the reason.
    run_id: names its processes, even when it serves a later run.
    """

    def __init__(
        self, loop: Loop, transport: Transport, argv: list[str], run_id: str, *, on_message: _OnMessage, on_end: _OnEnd
    ) -> None:
        self.name, self.run_id = transport.host.name, run_id
        self.lease_s = transport.lease_s
        """Seconds of silence after which the agent counts as dead."""
        self.hello: dict[str, Any] = {}
        """Fields of its HELLO. A refused agent may have sent other fields than this version knows."""
        self.greeted = False
        """True once a HELLO was accepted."""
        self.dropped = False
        self.has_rested = False
        """True if the agent has served another run before."""
        self._transport = transport
        self._loop: Loop | None = loop
        self._on_message, self._on_end = on_message, on_end
        self._child = ChildLink(argv, greeting=True)
        self._process, self._channel = self._child.process, self._child.channel
        self._channel.attach(loop, self._receive)

    # -- messages from the agent ----------------------------------------------------------------------------------

    def _receive(self, frames: list[wire.Frame]) -> None:
        for frame in frames:
            if not self.dropped:
                self._take(frame)
        if not frames and not self.dropped:
            self.dropped = True
            self._await_end()

    def _take(self, frame: wire.Frame) -> None:
        if frame.kind == wire.Ping.__name__:  # the channel has noted when it came
            self._child.limit_stray()
            return
        if frame.kind == wire.AskForProgram.__name__:
            self._channel.decoder.await_greeting()
            self._channel.queue(parcel())
            return
        is_hello = frame.kind == wire.Hello.__name__
        if self.has_rested and not self.greeted and not is_hello:
            return  # it belongs to the former run
        if is_hello:
            self.hello = frame.header
            own_python = None if self._transport.makes_environment else platform.python_version()
            if (refused := refusal(self.hello, own_python)) is not None:
                self._refuse(refused)
                return
        try:
            message = frame.message()
        except WireError as error:
            self._refuse(f"it does not speak distrain's protocol: {error}")
            return
        self.greeted = self.greeted or is_hello
        self._on_message(self, message)

    def _refuse(self, why: str) -> None:
        self.drop()
        self._on_end(self, why)

    @property
    def last_heard(self) -> float:
        return self._channel.heard_at

    # -- messages to the agent ------------------------------------------------------------------------------------

    def send(self, message: wire.Message | bytes) -> None:
        """Send a message, or the bytes of one, unless the agent was dropped."""
        if not self.dropped:
            self._channel.queue(message)

    def drop(self) -> None:
        """Close the connection. The agent then empties its host, or its guard does when the lease has expired."""
        if not self.dropped:
            self.dropped = True
            self._channel.close()
            self._process.terminate()

    # -- between two runs -----------------------------------------------------------------------------------------

    def rest(self, idle_s: float, deadline: float) -> bool:
        """Ask the agent to keep its forkserver for a later run. Return False if it does not, and ends."""
        if self.dropped or not self.greeted:
            return False
        self._use(None)
        self.send(wire.Close(rests_s=idle_s))
        while not self._channel.at_end and time.monotonic() < deadline:
            self._channel.flush()
            if any(frame.kind == wire.Close.__name__ for frame in self._channel.wait(0.1)):
                return True
        self.dropped = self._channel.at_end
        return False

    def wake(self, loop: Loop, *, on_message: _OnMessage, on_end: _OnEnd) -> None:
        """Use the agent for another run. It sends another HELLO."""
        self.greeted, self.has_rested = False, True
        self._child.forget_stray()
        self._use(loop, on_message, on_end)
        self._channel.attach(loop, self._receive)
        self.send(wire.Ping())

    def _use(self, loop: Loop | None, on_message: _OnMessage = _ignore, on_end: _OnEnd = _ignore) -> None:
        """Use another loop and other callbacks from now on. Nothing is received until the channel is attached."""
        self._channel.detach()
        self._loop, self._on_message, self._on_end = loop, on_message, on_end

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def abandon(self) -> None:
        """Close the descriptors, in a process that was forked from the one to which the agent belongs."""
        self._child.close()
        self._process.returncode = 0  # it is not a child of this process

    # -- the end of the agent -------------------------------------------------------------------------------------

    def describe_silence(self, silence_s: float) -> str:
        """Explain why the agent was dropped after a silence."""
        why = "stopped (SIGSTOP)" if self._transport.host.is_local else "host or network down, or the host is frozen"
        return f"it has been silent for {silence_s:.0f} s: {why}?{self._last_words()}"

    def _why_it_ended(self) -> str:
        """Explain the end of the connection."""
        if self._channel.broken is not None:
            return f"it does not speak distrain's protocol: {self._channel.broken}"
        code = self._process.returncode
        if code is None:  # a guard may be emptying the host
            how = "its connection was closed"
        else:
            program = os.path.basename(self._transport.program)
            by_whom = f"{program} on this machine was " if program else ""
            how = f"{by_whom}killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            if code == self._transport.failed_code and self.greeted:
                how += f", which is {program}'s when the connection breaks or that process is killed"
            elif code == self._transport.failed_code:
                how += f", which is {program}'s when it cannot connect or log in"
            elif code == _NOT_FOUND and not self.greeted:
                missing, named = "name the host's interpreter with python= in the hostfile", self._transport.host.python
                how += f", there is no such program: {'correct python= in the hostfile' if named else missing}"
            elif code >= 0 and not self.greeted and self._transport.ships:
                how += ": distrain needs only a login shell and a Python there"
        words, host = self._last_words(), self._transport.host
        name = f"{host.user}@{host.address}" if host.user else host.address
        login = shlex.join([*self._transport.ssh_args, name])
        cures = [f"\n{cure.format(login=login, host=name)}" for sign, cure in _SSH_CURES.items() if sign in words]
        return f"distrain's process there has ended: {how}{words}{''.join(cures[:1])}{self._what_must_work()}"

    def _what_must_work(self) -> str:
        """Return a command that the user can try, if the agent could not be started."""
        if self.greeted or self._process.returncode is None or self._process.returncode < 0:
            return ""
        if self._process.returncode == self._transport.failed_code:
            login = process.describe(self._transport.argv(["true"]))
            return f"\nthis must work without asking for anything:\n    {login}"
        version = [self._transport.host.python or "python3", "--version"]
        return f"\nthis must work:\n    {process.describe(self._transport.argv(version))}"

    @property
    def was_turned_away(self) -> bool:
        """True if a sshd that is busy has hung up. It may be a jump host for many hosts."""
        if self.greeted or self._process.returncode != self._transport.failed_code:
            return False
        return bool(_TURNED_AWAY.search(self._child.stray()))

    def _await_end(self) -> None:
        """Wait for the end of the process after that of its output, for a limited time, without blocking the loop."""
        self._process.send_signal(signal.SIGCONT)  # a guard that was stopped continues, and empties the host now
        self._look_for_end(time.monotonic() + _END_TIMEOUT_S)

    def _look_for_end(self, deadline: float) -> None:
        if self.is_alive and time.monotonic() < deadline:
            assert self._loop is not None
            self._loop.call_in(f"end of {self.name}", _END_POLL_S, lambda: self._look_for_end(deadline))
        else:
            self._on_end(self, self._why_it_ended())

    def _last_words(self) -> str:
        """Return the latest text that the agent or ssh has printed outside of the protocol."""
        text = (self._channel.decoder.chatter + self._child.stray()).decode(errors="replace").strip()
        kept = 1 if "Traceback (most recent call last)" in text else _LAST_LINES
        lines = [line[:_LONGEST_LINE] for line in without_noise(text.splitlines())[-kept:]]
        return "; last words:\n" + "\n".join(lines) if lines else ""

    def close(self, loop: Loop, on_closed: Callable[[AgentLink], None]) -> None:
        """Tell the agent to empty its host and to end, and use another loop from now on.

        on_closed: called when it has ended. Nothing else that it sends is handled.
        """
        self._use(loop, on_end=lambda link, why: on_closed(link))
        self._channel.attach(loop, self._receive)
        self.send(wire.Close())
        self._channel.flush()

    def dispose(self) -> None:
        """Kill the process and close its descriptors; harmless when done twice."""
        self.dropped = True
        if self._loop is not None:
            self._loop.cancel(f"end of {self.name}")
        self._child.close()
        if self._transport.host.is_local and "pid" in self.hello and self.is_alive:
            process.kill(self.hello["pid"], signal.SIGCONT)  # an agent that was stopped empties the host now
        self._process.kill()  # not its group: an agent on this machine outlives its guard to empty the host
        process.reap(self._process)


def close_all(links: Sequence[AgentLink]) -> set[AgentLink]:
    """Tell every agent to empty its host and end; kill those that do not. Return those that did.

    This has a loop of its own, so that nothing else happens meanwhile.
    """
    loop, closed = Loop(), set[AgentLink]()
    try:
        open_links = [link for link in links if not link.dropped]
        for link in open_links:
            link.close(loop, closed.add)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        loop.call_at("deadline", deadline, lambda: None)
        while len(closed) < len(open_links) and time.monotonic() < deadline:
            loop.step()
    finally:
        for link in links:
            link.dispose()
        loop.close()
    return closed
