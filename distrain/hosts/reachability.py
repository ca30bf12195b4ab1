"""TCP connections between hosts, to try if the network lets them through. Runs in: agent.

Every host opens a port for some seconds and connects to those of other hosts. No input is parsed: a port sends the
first bytes of each connection back, and the other side compares them with those that it has sent.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from distrain import wire
from distrain.hosts.network import address_toward, interface_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.system.background import Background
    from distrain.system.loop import Loop

CONNECT_TIMEOUT_S = 4.0
"""Seconds to wait for the peers: a lost SYN is sent again after one and after three seconds."""
PORT_OPEN_S = 20.0
"""Seconds after which the port is closed: all hosts open theirs, for which they have 15 s, before any connects."""
MAX_ECHOED_BYTES = 64
"""Bytes that each connection gets back at most."""
_MAX_CLIENTS = 1024
"""Connections to the port at the same time. Others wait in the kernel."""
_BACKLOG = 4096
"""Connections that may wait in the kernel, which has a limit of its own (net.core.somaxconn)."""


class ReachabilityProbe:
    """Answers :class:`~distrain.wire.OpenProbePort` and :class:`~distrain.wire.ProbePeers` with ``send``.

    resolver: looks up names and routes, so that a slow name server does not block the loop.
    """

    def __init__(self, loop: Loop, resolver: Background, send: Callable[[wire.Message], None]) -> None:
        self._loop = loop
        self._resolver = resolver
        self._send = send
        self._listener: socket.socket | None = None
        self._clients: dict[socket.socket, int] = {}
        """For each connection to the port, the number of bytes that it may still get back."""
        self._peers: dict[str, socket.socket] = {}
        """Connections to peers that have not answered yet."""
        self._failed: dict[str, str] = {}
        self._nonce = ""

    # -- the port -------------------------------------------------------------------------------------------------

    def open_port(self, asked: wire.OpenProbePort) -> None:
        """Open a port at the one address that the other hosts use, and answer with it."""

        def failed(error: OSError) -> None:
            self._send(wire.ProbeAddress(nonce=asked.nonce, failed=str(error)))

        def find() -> tuple[str, str]:
            address = asked.address or address_toward(asked.peer)
            return address, interface_of(address)

        self._resolver.do(find, lambda found: self._open_port(asked, *found), failed)

    def _open_port(self, asked: wire.OpenProbePort, address: str, interface: str) -> None:
        self.close()
        try:
            self._listener = _bound(address)
        except OSError as error:
            self._send(wire.ProbeAddress(nonce=asked.nonce, failed=str(error)))
            return
        self._loop.on_readable(self._listener.fileno(), self._accept)
        self._loop.call_in("probe port", PORT_OPEN_S, self.close)
        port = self._listener.getsockname()[1]
        self._send(wire.ProbeAddress(nonce=asked.nonce, address=address, port=port, interface=interface))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        client.setblocking(False)
        self._clients[client] = MAX_ECHOED_BYTES
        if len(self._clients) >= _MAX_CLIENTS:
            self._loop.on_readable(self._listener.fileno(), None)
        self._loop.on_readable(client.fileno(), lambda: self._echo(client))

    def _echo(self, client: socket.socket) -> None:
        try:
            data = client.recv(self._clients[client])
            self._clients[client] -= client.send(data)
        except OSError:
            data = b""
        if not data or not self._clients[client]:
            self._loop.forget(client.fileno())
            del self._clients[client]
            client.close()
            if self._listener is not None:
                self._loop.on_readable(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Close the port and all connections to it."""
        for sock in (*self._clients, *([self._listener] if self._listener else [])):
            self._loop.forget(sock.fileno())
            sock.close()
        self._clients, self._listener = {}, None

    # -- the peers ------------------------------------------------------------------------------------------------

    def probe_peers(self, asked: wire.ProbePeers) -> None:
        """Connect to the ports of the peers. Answer when all have echoed, or after :data:`CONNECT_TIMEOUT_S`.

        A new question in the meantime replaces this one, which is then not answered.
        """
        for sock in self._peers.values():
            self._loop.forget(sock.fileno())
            sock.close()
        self._failed, self._peers, self._nonce = {}, {}, asked.nonce
        nonce = asked.nonce.encode()
        for name, (address, port) in asked.peers.items():
            try:
                self._peers[name] = self._connect(name, address, port, nonce)
            except OSError as error:
                self._failed[name] = _why(error)
        self._loop.call_in("peers", CONNECT_TIMEOUT_S, self._give_up)
        self._answer_if_done()

    def _connect(self, name: str, address: str, port: int, nonce: bytes) -> socket.socket:
        family, where = _resolved(address, port)
        sock = socket.socket(family)
        sock.setblocking(False)
        code = sock.connect_ex(where)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(code, os.strerror(code))
        self._loop.on_writable(sock.fileno(), lambda: self._connected(name, nonce))
        return sock

    def _connected(self, name: str, nonce: bytes) -> None:
        sock = self._peers[name]
        self._loop.on_writable(sock.fileno(), None)
        try:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            sock.send(nonce)
        except OSError as error:
            self._end_peer(name, _why(error))
            return
        self._loop.on_readable(sock.fileno(), lambda: self._compare(name, nonce))

    def _compare(self, name: str, nonce: bytes) -> None:
        try:
            answer = self._peers[name].recv(MAX_ECHOED_BYTES)
        except OSError as error:
            self._end_peer(name, _why(error))
            return
        if answer == nonce:
            self._end_peer(name, None)
        elif not answer:
            self._end_peer(name, "the connection was closed without an answer")
        else:
            self._end_peer(name, "another program answers there")

    def _give_up(self) -> None:
        for name in list(self._peers):
            self._end_peer(name, f"no answer within {CONNECT_TIMEOUT_S:g} s")

    def _end_peer(self, name: str, failed: str | None) -> None:
        sock = self._peers.pop(name)
        self._loop.forget(sock.fileno())
        sock.close()
        if failed is not None:
            self._failed[name] = failed
        self._answer_if_done()

    def _answer_if_done(self) -> None:
        if not self._peers:
            self._loop.cancel("peers")
            self._send(wire.ProbeResult(nonce=self._nonce, failed=self._failed))


def _bound(address: str) -> socket.socket:
    family, where = _resolved(address, 0)
    listener = socket.socket(family)
    try:
        listener.bind(where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _resolved(address: str, port: int) -> tuple[int, tuple[str, int]]:
    [(family, _, _, _, where), *_] = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )
    return family, where  # type: ignore[return-value]


def _why(error: OSError) -> str:
    return error.strerror or str(error)
