"""The connections of a run to its hosts: agents, leases, and the clean-up after lost agents. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.connection import resting_agents
from distrain.coordinator.connection.agent_link import (
    CLOSE_TIMEOUT_S,
    PING_INTERVAL_S,
    AgentLink,
    agent_argv,
    close_all,
    stream_argv,
    sweeper_argv,
)
from distrain.decisions.events import HostLost
from distrain.hosts.host import HostInfo, gpu_problem, interface_problem
from distrain.system import process
from distrain.system.background import in_threads
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.coordinator.connection.transport import Transport
    from distrain.decisions.events import RunRequest
    from distrain.system.loop import Loop

_PING_AFTER = 0.4
"""A sign of life is sent after this part of the lease. With its answer, it wakes this process every 3 s by default."""
_LEASE_MARGIN_S = 0.01
_SWEEPS_AT_ONCE = 64
_PING = wire.encode(wire.Ping())
_WAKE_TIMEOUT_S = 10.0
"""Seconds to wait for an agent that has rested, before another one is started."""


class Connections:
    """One link to each host that was connected to. See :class:`~distrain.coordinator.ranks.port.Ranks`.

    stale_id: id of processes that an earlier part of the run may have left on the hosts when it died.
    """

    def __init__(self, transports: Sequence[Transport], request: RunRequest, *, stale_id: str | None = None) -> None:
        self.errors: Mapping[int, BaseException] = {}
        self._stale_id = stale_id
        self._transports = {transport.host.name: transport for transport in transports}
        self._position = {name: position for position, name in enumerate(self._transports)}
        self._ping_interval_s = min([PING_INTERVAL_S, *(_PING_AFTER * one.lease_s for one in transports)])
        self._request = request
        self._loop: Loop
        self._on_message: Callable[[str, wire.Message], None]
        self._on_lost: Callable[[HostLost], None]
        self._links: dict[str, AgentLink] = {}
        self._greeted: set[str] = set()
        """The hosts that have had an agent."""
        self._latest: wire.Message | None = None
        """The latest message that was sent, which often goes to all hosts, and its bytes."""
        self._latest_bytes = b""
        self._inherited: resting_agents.InheritedState = (object(),)
        self._has_lost = False
        """True once an agent was replaced. None rests then."""

    def drive(self, run: Callable[[], None]) -> None:
        run()

    def open(
        self, loop: Loop, on_message: Callable[[str, wire.Message], None], on_lost: Callable[[HostLost], None]
    ) -> None:
        self._loop, self._on_message, self._on_lost = loop, on_message, on_lost
        if self._stale_id:
            self._sweep(dict.fromkeys(self._transports, self._stale_id))
        self._ping()

    def connect(self, name: str) -> None:
        """Wake up an agent that has served an earlier run of this process, or start one."""
        if not (self._is_alone and name not in self._links and self._wake(name)):
            self._start(name)

    @property
    def _is_alone(self) -> bool:
        """True if this machine is the only host. Only then agents rest: nothing of others can be left on it."""
        return len(self._transports) == 1 and not any(one.template for one in self._transports.values())

    def _wake(self, name: str) -> bool:
        """Take over an agent that rests. If it does not answer, start another one."""
        transport = self._transports[name]
        argv = agent_argv(transport, "", "", self._gpus(transport), flags=self._request.python_flags)
        self._inherited = resting_agents.inherited_state(argv)
        agent = resting_agents.take(self._inherited)
        if agent is None:
            return False
        self._links[name] = agent
        self._greeted.add(name)  # in its earlier run

        def give_up() -> None:
            if not agent.greeted and self._links[name] is agent:
                self._start(name)

        def ended(link: AgentLink, why: str) -> None:
            self._on_end(link, why) if link.greeted else give_up()

        agent.wake(self._loop, on_message=self._receive, on_end=ended)
        self._loop.call_in("wake", _WAKE_TIMEOUT_S, give_up)
        return True

    def _start(self, name: str) -> None:
        """Start an agent. One that replaces another kills what that one left behind before it sends its HELLO."""
        former, transport = self._links.get(name), self._transports[name]
        if former is not None:
            self._has_lost = True
            former.drop()
            former.dispose()
        run_id = self._request.run_id
        own_id = f"{run_id}.{self._position[name]}"
        lost = [] if former is None else [former.run_id]
        ids = f"{process.extended_run_ids(run_id)}:{own_id}"  # two hosts may be one machine
        argv = agent_argv(transport, ids, run_id, self._gpus(transport), *lost, flags=self._request.python_flags)
        try:
            self._links[name] = AgentLink(
                self._loop, transport, argv, own_id, on_message=self._receive, on_end=self._on_end
            )
        except OSError as error:
            why = f"cannot start distrain there: {error}"
            self._loop.call_in(f"connect {name}", 0.0, lambda: self._on_lost(HostLost(name, why)))

    def _on_end(self, link: AgentLink, why: str) -> None:
        self._on_lost(HostLost(link.name, why, turned_away=link.was_turned_away))

    def _gpus(self, transport: Transport) -> str:
        scaling, checks = self._request.scaling, self._request.checks_hosts
        return "gpus" if checks or scaling.use_gpu or transport.host.gpus else "no-gpus"

    def _receive(self, link: AgentLink, message: wire.Message) -> None:
        if isinstance(message, wire.HostFailed) and message.leaves:
            self._drop(link, message.text)
            return
        if isinstance(message, wire.Hello):
            if problem := self._problem_of(link.name, message):
                self._drop(link, problem)
                return
            self._greeted.add(link.name)
            link.send(_PING)  # its lease begins
        self._on_message(link.name, message)

    def _problem_of(self, name: str, hello: wire.Hello) -> str | None:
        """Return why the ranks cannot use the GPUs and the interface that the user has named, or None."""
        found = HostInfo.of(hello.host).gpus or ()
        problem = gpu_problem(self._transports[name].host.gpus, found)
        if problem and not found and not self._request.scaling.use_gpu:
            warn(f"{name}: {problem}")  # perhaps GPUs of another vendor, which NVML does not list
            problem = None
        return problem or interface_problem(self._request.hosts[name].interface, hello.interfaces)

    def _drop(self, link: AgentLink, why: str) -> None:
        link.drop()
        self._on_lost(HostLost(link.name, why))

    def send(self, name: str, message: wire.Message) -> None:
        """Send a message to a host, unless it is lost."""
        if message is not self._latest:
            self._latest, self._latest_bytes = message, wire.encode(message)
        self._links[name].send(self._latest_bytes)

    def stream_argv(self, name: str) -> list[str]:
        """Return the command line that starts a stream server on a host, which has an agent."""
        ids = f"{process.extended_run_ids(self._request.run_id)}:{self._links[name].run_id}"
        return stream_argv(self._transports[name], ids, self._links[name].hello, flags=self._request.python_flags)

    def _ping(self) -> None:
        """Send every agent a sign of life, drop those whose lease has expired, and set the timer for the next time."""
        next_in_s = self._ping_interval_s
        for link in list(self._links.values()):
            silence_s = self._loop.silence_s(link.last_heard)
            if link.dropped or not link.greeted:
                continue
            if silence_s > link.lease_s:
                self._drop(link, link.describe_silence(silence_s))
                continue
            link.send(_PING)
            next_in_s = min(next_in_s, link.lease_s - silence_s + _LEASE_MARGIN_S)
        self._loop.call_in("ping", next_in_s, self._ping)

    def close(self, *, keep: bool) -> None:
        """End every agent, and sweep the hosts of those that had to be killed or were lost.

        An agent that has never greeted has started nothing, and ends with its connection.
        keep: an agent of this machine may rest until this process starts another run.
        """
        for timer in ("ping", "wake"):
            self._loop.cancel(timer)
        for link in self._links.values():
            if not link.greeted:
                link.drop()
        may_rest = keep and self._is_alone and not self._has_lost
        resting = {one for one in self._links.values() if may_rest and resting_agents.keep(one, self._inherited)}
        clean = resting | close_all([link for link in self._links.values() if link not in resting])
        self._sweep({name: self._links[name].run_id for name in self._greeted if self._links[name] not in clean})

    def _sweep(self, ids: Mapping[str, str]) -> None:
        """Kill the processes with these ids, by host; on many hosts at the same time."""
        flags = self._request.python_flags
        commands = [sweeper_argv(self._transports[name], run_id, flags=flags) for name, run_id in ids.items()]
        in_threads(lambda argv: process.output_of(argv, ".", CLOSE_TIMEOUT_S), commands, threads=_SWEEPS_AT_ONCE)
