"""TCP connections between hosts, to try if the network lets them through. Runs in: agent.

Every host opens a port for some seconds and connects to those of other hosts. A port sends a nonce to whoever connects
and hangs up. It reads nothing.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from distrain.system.background import in_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distrain.system.loop import Loop

CONNECT_TIMEOUT_S = 4.0
"""Seconds to wait for each peer: a lost SYN is sent again after one and after three seconds."""
PORT_OPEN_S = 20.0
"""Seconds after which the port is closed: all hosts open theirs, for which they have 15 s, before any connects."""
_BACKLOG = 4096
"""Connections that may wait in the kernel, which has a limit of its own (net.core.somaxconn)."""
_MOST_BYTES = 64


class ProbePort:
    """The port of this host to which others connect; one at a time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._listener: socket.socket | None = None

    def open(self, address: str, nonce: str) -> int:
        """Send ``nonce`` to everyone who connects at ``address`` within :data:`PORT_OPEN_S`. Raises OSError."""
        self.close()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        listener.setblocking(False)
        self._listener = listener

        def accept() -> None:
            with contextlib.suppress(OSError):
                client, _ = listener.accept()
                with client:
                    client.send(nonce.encode())  # it fits into the buffer of a new connection

        self._loop.on_readable(listener.fileno(), accept)
        self._loop.call_in("probe port", PORT_OPEN_S, self.close)
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Close the port."""
        if self._listener is not None:
            self._loop.forget(self._listener.fileno())
            self._listener.close()
            self._listener = None


def failed_peers(peers: Mapping[str, tuple[str, int]], nonce: str) -> dict[str, str]:
    """Connect to the ports of the peers, to all at once. Return why it failed, by name."""
    names = list(peers)
    problems = in_threads(lambda name: _problem_with(*peers[name], nonce.encode()), names, threads=len(names))
    return {name: problem for name, problem in zip(names, problems, strict=True) if problem is not None}


def _problem_with(address: str, port: int, nonce: bytes) -> str | None:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as sock:
            answer = sock.recv(_MOST_BYTES)
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None if answer == nonce else "another program answers there"
