"""The connections to all hosts of a run: who has an agent, who is silent, who has to be swept. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.agent_link import (
    CLOSE_TIMEOUT_S,
    PING_INTERVAL_S,
    AgentLink,
    agent_argv,
    close_all,
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


class Connections:
    """One link to each host that was connected to. ``heard``: what a host says. ``lost``: its name, and why nothing
    more will come from it, unless it is connected to again.
    """

    def __init__(
        self,
        loop: Loop,
        transports: Sequence[Transport],
        request: RunRequest,
        *,
        heard: Callable[[str, wire.Message], None],
        lost: Callable[[str, str], None],
    ) -> None:
        self._loop = loop
        self._transports = {transport.host.name: transport for transport in transports}
        self._request = request
        self._heard = heard
        self._lost = lost
        self._links: dict[str, AgentLink] = {}
        self._contacted: set[str] = set()

    def connect(self, name: str) -> None:
        """Start an agent; in place of another, it ends what that one may have left there before it says HELLO."""
        former, transport = self._links.get(name), self._transports[name]
        if former is not None:
            former.drop()
            former.dispose()
        try:
            link = AgentLink(self._loop, transport, self._agent_argv(transport, again=name in self._contacted))
        except OSError as error:
            why = f"cannot start its agent: {error}"
            self._loop.call_in(f"connect {name}", 0.0, lambda: self._lost(name, why))
            return
        self._contacted.add(name)
        self._links[name] = link
        link.listen(
            self._on_message,
            on_refused=lambda link, about, why: self._lost(name, why),
            on_end=lambda link: self._lost(name, link.why_it_ended()),
        )

    def _agent_argv(self, transport: Transport, *, again: bool) -> list[str]:
        """With the run's id, and the host's within it: two of our hosts may be one machine."""
        run_id, flags = self._request.run_id, self._request.python_flags
        on_host = self._id_on(transport.host.name)
        ids = f"{process.extended_run_ids(run_id)}:{on_host}"
        gpus = "gpus" if self._request.scaling.use_gpu or transport.host.gpus else "no-gpus"
        return agent_argv(transport, ids, run_id, gpus, *([on_host] if again else []), flags=flags)

    def _id_on(self, name: str) -> str:
        return f"{self._request.run_id}.{list(self._transports).index(name)}"

    def _on_message(self, link: AgentLink, message: wire.Message) -> None:
        if isinstance(message, wire.HostFailed) and message.leaves:
            self._drop(link, message.text)
            return
        if isinstance(message, wire.Hello):
            named, found = self._transports[link.name].host.gpus, [Gpu(**gpu) for gpu in message.gpus or ()]
            problem = gpu_problem(named, found)
            if problem and (found or self._request.scaling.use_gpu):
                self._drop(link, problem)
                return
            if problem:  # or they are others than NVIDIA's, which nobody can count
                warn(f"{link.name}: {problem}")
            self.ping()  # by its lease, from now on
        self._heard(link.name, message)

    def _drop(self, link: AgentLink, why: str) -> None:
        link.drop()
        self._lost(link.name, why)

    def send(self, name: str, message: wire.Message) -> None:
        """To a host that is lost: nothing."""
        self._links[name].send(message)

    def ping(self) -> None:
        """Tell all agents that we live, and find those that do not; again when it is time, or when a lease ends."""
        next_in_s = PING_INTERVAL_S
        for link in list(self._links.values()):
            silence_s = self._loop.silence_s(link.last_heard)
            if link.dropped or not link.greeted:
                continue
            if silence_s > link.lease_s:
                self._drop(link, link.why_it_was_dropped(silence_s))
                continue
            link.send(wire.Ping())
            next_in_s = min(next_in_s, link.lease_s / 3, link.lease_s - silence_s + _LEASE_MARGIN_S)
        self._loop.call_in("ping", next_in_s, self.ping)

    def close(self) -> None:
        """Have every agent empty its host and go; whoever does not is killed, and its host swept."""
        self._loop.cancel("ping")
        clean = close_all(list(self._links.values()))
        self._sweep({name: self._id_on(name) for name in self._contacted - clean})

    def sweep(self, run_id: str) -> None:
        """Remove what a run that ended without a word may have left on all hosts."""
        self._sweep(dict.fromkeys(self._transports, run_id))

    def _sweep(self, ids: Mapping[str, str]) -> None:
        """End what has these ids on these hosts, on all at the same time."""
        sweepers = []
        for name, run_id in ids.items():
            with contextlib.suppress(OSError):
                argv = sweeper_argv(self._transports[name], run_id, flags=self._request.python_flags)
                sweepers.append(process.spawn(argv, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for sweeper in sweepers:
            try:
                sweeper.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                sweeper.kill()
                sweeper.communicate()
