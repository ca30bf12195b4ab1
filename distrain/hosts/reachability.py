"""TCP connections between hosts, to try if the network lets them through. Runs in: agent.

Every host opens a port for some seconds and connects to those of other hosts. Whoever sends it the nonce of the check
gets the same back.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from distrain.hosts.secret_port import SecretPort
from distrain.system.background import in_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distrain.system.loop import Loop

CONNECT_TIMEOUT_S = 4.0
"""Seconds to wait for each peer: a lost SYN is sent again after one and after three seconds."""
PORT_OPEN_S = 20.0
"""Seconds after which the port is closed: all hosts open theirs, for which they have 15 s, before any connects."""
_MOST_BYTES = 64


class ProbePort:
    """The port of this host to which others connect."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._port: SecretPort | None = None

    def open(self, address: str, nonce: str) -> int:
        """Return the nonce to everyone who sends it to ``address`` within :data:`PORT_OPEN_S`. Raises OSError."""
        self.close()
        self._port = SecretPort(nonce, lambda peer, _: peer.sendall(nonce.encode()), address)
        self._loop.call_in("probe port", PORT_OPEN_S, self.close)
        return self._port.number

    def close(self) -> None:
        """Close the port."""
        if self._port is not None:
            self._port.close()
            self._port = None


def failed_peers(peers: Mapping[str, tuple[str, int]], nonce: str) -> dict[str, str]:
    """Connect to the ports of the peers, to all at once. Return why it failed, by name."""
    names = list(peers)
    problems = in_threads(lambda name: _problem_with(*peers[name], nonce.encode()), names, threads=len(names))
    return {name: problem for name, problem in zip(names, problems, strict=True) if problem is not None}


def _problem_with(address: str, port: int, nonce: bytes) -> str | None:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as sock:
            sock.sendall(nonce)
            answer = sock.recv(_MOST_BYTES)
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None if answer == nonce else "another program answers there"
