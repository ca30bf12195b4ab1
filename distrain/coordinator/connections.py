"""The connections of a run to its hosts: agents, leases, and the clean-up after lost agents. Runs in: coordinator."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.agent_link import (
    CLOSE_TIMEOUT_S,
    PING_INTERVAL_S,
    AgentLink,
    agent_argv,
    close_all,
    run_all,
    sweeper_argv,
)
from distrain.hosts.host import Gpu, gpu_problem
from distrain.system import process
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.coordinator.transport import Transport
    from distrain.decisions.events import RunRequest
    from distrain.system.loop import Loop

_LEASE_MARGIN_S = 0.01
_SWEEPS_AT_ONCE = 64
_SWEEP_LIMIT_S = 15.0
"""Seconds after which no further host is swept. Its guard kills what is left there when the lease has expired."""
_PING = wire.encode(wire.Ping())


class Connections:
    """One link to each host that was connected to.

    on_message: gets the name of a host and its message.
    on_lost: gets the name of a host and why it is lost. Nothing more comes from it until :meth:`connect`.
    """

    def __init__(
        self,
        loop: Loop,
        transports: Sequence[Transport],
        request: RunRequest,
        *,
        on_message: Callable[[str, wire.Message], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._loop = loop
        self._transports = {transport.host.name: transport for transport in transports}
        self._position = {name: position for position, name in enumerate(self._transports)}
        self._ping_interval_s = min([PING_INTERVAL_S, *(transport.lease_s / 3 for transport in transports)])
        self._request = request
        self._on_message = on_message
        self._on_lost = on_lost
        self._links: dict[str, AgentLink] = {}
        self._contacted: set[str] = set()
        self._latest: wire.Message | None = None
        """The latest message that was sent, which often goes to all hosts, and its bytes."""
        self._latest_bytes = b""

    def connect(self, name: str) -> None:
        """Start an agent. One that replaces another kills what that one left behind before it sends its HELLO."""
        former, transport = self._links.get(name), self._transports[name]
        if former is not None:
            former.drop()
            former.dispose()
        try:
            self._links[name] = AgentLink(
                self._loop,
                transport,
                self._agent_argv(transport, again=name in self._contacted),
                on_message=self._receive,
                on_refused=lambda link, about, why: self._on_lost(name, why),
                on_end=lambda link: self._on_lost(name, link.why_it_ended()),
            )
        except OSError as error:
            why = f"cannot start its agent: {error}"
            self._loop.call_in(f"connect {name}", 0.0, lambda: self._on_lost(name, why))
            return
        self._contacted.add(name)

    def _agent_argv(self, transport: Transport, *, again: bool) -> list[str]:
        """Return the command line of an agent. It carries an id for the host, as two hosts may be one machine."""
        run_id, flags = self._request.run_id, self._request.python_flags
        on_host = self._id_on(transport.host.name)
        ids = f"{process.extended_run_ids(run_id)}:{on_host}"
        gpus = "gpus" if self._request.scaling.use_gpu or transport.host.gpus else "no-gpus"
        return agent_argv(transport, ids, run_id, gpus, *([on_host] if again else []), flags=flags)

    def _id_on(self, name: str) -> str:
        return f"{self._request.run_id}.{self._position[name]}"

    def _receive(self, link: AgentLink, message: wire.Message) -> None:
        if isinstance(message, wire.HostFailed) and message.leaves:
            self._drop(link, message.text)
            return
        if isinstance(message, wire.Hello):
            named, found = self._transports[link.name].host.gpus, [Gpu(**gpu) for gpu in message.gpus or ()]
            problem = gpu_problem(named, found)
            if problem and (found or self._request.scaling.use_gpu):
                self._drop(link, problem)
                return
            if problem:  # perhaps GPUs of another vendor, which NVML does not list
                warn(f"{link.name}: {problem}")
            link.send(_PING)  # its lease begins
        self._on_message(link.name, message)

    def _drop(self, link: AgentLink, why: str) -> None:
        link.drop()
        self._on_lost(link.name, why)

    def send(self, name: str, message: wire.Message) -> None:
        """Send a message to a host, unless it is lost."""
        if message is not self._latest:
            self._latest, self._latest_bytes = message, wire.encode(message)
        self._links[name].send(self._latest_bytes)

    def ping(self) -> None:
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
        self._loop.call_in("ping", next_in_s, self.ping)

    def close(self) -> None:
        """End every agent, and sweep the hosts of those that had to be killed or were lost."""
        self._loop.cancel("ping")
        clean = close_all(list(self._links.values()))
        self._sweep({name: self._id_on(name) for name in self._contacted - clean})

    def sweep(self, run_id: str) -> None:
        """Kill what a run whose coordinator died may have left on the hosts."""
        self._sweep(dict.fromkeys(self._transports, run_id))

    def _sweep(self, ids: Mapping[str, str]) -> None:
        """Kill the processes with these ids, by host; on many hosts at the same time."""
        flags = self._request.python_flags
        commands = (sweeper_argv(self._transports[name], run_id, flags=flags) for name, run_id in ids.items())
        until = time.monotonic() + _SWEEP_LIMIT_S
        left = run_all(commands, timeout_s=CLOSE_TIMEOUT_S, at_once=_SWEEPS_AT_ONCE, until=until)
        if left:
            warn(f"{left:,} of {len(ids):,} hosts were not cleaned up: too many others did not answer")
