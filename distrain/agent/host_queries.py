"""Answers to the coordinator's questions about this host and its network. Runs in: agent."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from distrain import wire
from distrain.hosts.inspection import inspect
from distrain.hosts.network import address_toward
from distrain.hosts.ports import reserve_port
from distrain.hosts.reachability import ReachabilityProbe
from distrain.system.background import Background
from distrain.system.process import own_package

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from distrain.hosts.host import Gpu
    from distrain.system.loop import Loop

_T = TypeVar("_T")


class HostQueries:
    """Reserve ports, look up addresses, inspect the host and probe its connections; answer with ``send``.

    Threads do what may take long, so that neither a slow name server nor a dead file system stops the heartbeats.
    """

    def __init__(self, loop: Loop, send: Callable[[wire.Message], None]) -> None:
        self._loop = loop
        self._send = send
        self.gpus: Sequence[Gpu] = ()
        """Those that CUDA shows here, as far as the agent was asked to look for them."""
        self._reserved: list[socket.socket] = []
        self._resolver = Background(loop, "resolver")
        self._probe = ReachabilityProbe(loop, self._resolver, send)

    def answer(self, question: wire.Message) -> None:
        """Answer a question, now or later."""
        match question:
            case wire.ReservePorts():
                self._reserve(question)
            case wire.InspectHost():
                self._in_thread(partial(_inspect, question, self.gpus))
            case wire.EmptyCache():
                self._in_thread(_empty_cache)
            case wire.OpenProbePort():
                self._probe.open_port(question)
            case wire.ProbePeers():
                self._probe.probe_peers(question)

    def _in_thread(self, find: Callable[[], wire.Message]) -> None:
        """Send what a function returns. It gets a thread of its own, as an earlier one may hang."""
        background = Background(self._loop, "inspection")

        def done(result: wire.Message) -> None:
            background.close()
            self._send(result)

        background.do(find, done)

    def look_up(self, find: Callable[[str], _T], peer: str, then: Callable[[_T | None], None]) -> None:
        """Call ``then`` with what ``find`` returns for a peer, or at once with None if ``peer`` is empty."""

        def failed(error: OSError) -> None:
            self._send(wire.HostFailed(text=f"finds no way to the other hosts ({peer}): {error}"))

        if peer:
            self._resolver.do(lambda: find(peer), then, failed)
        else:
            then(None)

    def _reserve(self, asked: wire.ReservePorts) -> None:
        self.release_ports()
        try:
            self._reserved = [reserve_port() for _ in range(asked.ports)]
        except OSError as error:
            self._send(wire.HostFailed(text=f"cannot reserve {asked.ports} ports: {error}"))
            return
        ports = [sock.getsockname()[1] for sock in self._reserved]

        def answer(address: str | None) -> None:
            self._send(wire.RendezvousPorts(attempt=asked.attempt, ports=ports, address=address or ""))

        self.look_up(address_toward, asked.peer, answer)

    def release_ports(self) -> None:
        """Give up the ports that were reserved."""
        for sock in self._reserved:
            sock.close()
        self._reserved = []


def _inspect(asked: wire.InspectHost, gpus: Sequence[Gpu]) -> wire.InspectionResult:
    result = inspect(asked)
    return _with_details(result, asked, gpus) if asked.is_thorough else result


def _with_details(result: wire.InspectionResult, asked: wire.InspectHost, gpus: Sequence[Gpu]) -> wire.InspectionResult:
    from distrain.agent.rank_cpus import rank_cpus
    from distrain.hosts.gpu_health import gpu_health
    from distrain.transfer.host_side.cache_cleaning import size_of
    from distrain.transfer.host_side.host_cache import existing_cache

    cache, cpu_problem = existing_cache(), None
    try:
        rank_cpus(asked.numa_binding, asked.workers, asked.gpus_per_worker, gpus)
    except ValueError as error:
        cpu_problem = str(error)
    return replace(
        result,
        cache_bytes=size_of(cache) if cache is not None else 0,
        gpus=[asdict(gpu) for gpu in gpu_health({gpu.board for gpu in gpus})] if gpus else [],
        cpu_problem=cpu_problem,
        sent=time.time(),  # after all that takes long: the clocks of the two machines are compared by it
    )


def _empty_cache() -> wire.CacheEmptied:
    from distrain.transfer.host_side.cache_cleaning import trim
    from distrain.transfer.host_side.host_cache import existing_cache

    try:
        cache = existing_cache()
        freed_bytes, in_use = trim(cache, 0, wait=True) if cache is not None else (0, [])
    except OSError as error:
        return wire.CacheEmptied(freed_bytes=0, in_use=[], failed=str(error))
    own = f"programs/{own_package().parent.name}"  # that of this process
    return wire.CacheEmptied(freed_bytes=freed_bytes, in_use=[name for name in in_use if name != own])
