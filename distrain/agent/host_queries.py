"""Answers to the coordinator's questions about this host and its network. Runs in: agent."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, TypeVar

from distrain import wire
from distrain.hosts.inspection import disk_free_bytes, memory_free_bytes, package_versions
from distrain.hosts.network import address_toward, interface_of, reserve_port
from distrain.hosts.reachability import ProbePort, failed_peers
from distrain.system.background import Background

if TYPE_CHECKING:
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
        self._reserved = contextlib.ExitStack()
        self._resolver = Background(loop, "resolver")
        self._port = ProbePort(loop)

    def probe(self, question: wire.ProbeHost) -> None:
        """Answer a question. It gets a thread of its own, as an earlier one may hang."""
        background = Background(self._loop, "probe")

        def done(answer: wire.HostProbed) -> None:
            background.close()
            if answer.address:
                try:
                    answer = replace(answer, port=self._port.open(answer.address, answer.nonce))
                except OSError as error:
                    answer = replace(answer, failed=str(error))
            self._send(answer)

        background.do(lambda: _probed(question, self.gpus), done)

    def look_up(self, find: Callable[[str], _T], peer: str, then: Callable[[_T | None], None]) -> None:
        """Call ``then`` with what ``find`` returns for a peer, or at once with None if ``peer`` is empty."""

        def failed(error: OSError) -> None:
            self._send(wire.HostFailed(text=f"has no route to the other hosts ({peer}): {error}"))

        if peer:
            self._resolver.do(lambda: find(peer), then, failed)
        else:
            then(None)

    def reserve(self, asked: wire.ReservePort) -> None:
        """Keep a port for an attempt, and send its number."""
        self.release_port()
        try:
            port = self._reserved.enter_context(reserve_port()).getsockname()[1]
        except OSError as error:
            self._send(wire.HostFailed(text=f"cannot reserve a port: {error}; `ss -s` counts them"))
            return

        def answer(address: str | None) -> None:
            self._send(wire.RendezvousPort(attempt=asked.attempt, port=port, address=address or ""))

        self.look_up(address_toward, asked.peer, answer)

    def release_port(self) -> None:
        """Give up the ports that were reserved."""
        self._reserved.close()


def _probed(asked: wire.ProbeHost, gpus: Sequence[Gpu]) -> wire.HostProbed:
    received, address, interface, failed = time.time(), "", "", None
    if asked.is_reached:
        try:
            found = asked.address or address_toward(asked.peer)
            interface, address = interface_of(found), found
        except OSError as error:
            failed = str(error)
    answer = wire.HostProbed(
        nonce=asked.nonce,
        versions=package_versions(asked.packages, asked.sys_path),
        executable=asked.executable or sys.executable,
        address=address,
        interface=interface,
        failed=failed,
        failed_peers=failed_peers(asked.peers, asked.nonce),
    )
    if asked.is_thorough:
        from distrain.hosts.gpu_health import gpu_health

        answer = replace(
            answer,
            memory_free_bytes=memory_free_bytes(),
            disk_free_bytes=disk_free_bytes(asked.folder),
            shared_memory_free_bytes=disk_free_bytes("/dev/shm"),  # noqa: S108
            gpus=[asdict(gpu) for gpu in gpu_health({gpu.uuid for gpu in gpus})] if gpus else [],
        )
    return replace(answer, received=received, sent=time.time())  # the clocks of the two machines are compared by these
