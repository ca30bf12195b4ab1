"""Whether hosts can connect to each other: a listener that echoes for some seconds, and calls to those of others.

Runs in: agent. Nothing that comes in is parsed: a listener sends back the first bytes it gets, whoever sends them, and
a caller only compares.
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

REACH_S = 4.0
"""A lost SYN is sent again after one and after three seconds."""
LISTEN_S = 8.0
MOST_ECHOED = 64
"""Bytes that a connection gets back."""
_MOST_CALLERS = 1024
_BACKLOG = 128


class ReachabilityProbe:
    """The agent's side: answers :class:`~distrain.wire.OpenProbePort` and :class:`~distrain.wire.ProbePeers`."""

    def __init__(self, loop: Loop, resolver: Background, say: Callable[[wire.Message], None]) -> None:
        self._loop = loop
        self._resolver = resolver
        self._say = say
        self._listener: socket.socket | None = None
        self._callers: dict[socket.socket, int] = {}
        self._calls: dict[str, socket.socket] = {}
        self._failed: dict[str, str] = {}
        self._nonce = ""

    # -- being called ---------------------------------------------------------------------------------------------

    def listen(self, asked: wire.OpenProbePort) -> None:
        """Listen on this host's own address only."""

        def failed(error: OSError) -> None:
            self._say(wire.ProbePortOpened(nonce=asked.nonce, failed=str(error)))

        def find() -> tuple[str, str]:
            address = asked.address or address_toward(asked.peer)
            return address, interface_of(address)

        self._resolver.do(find, lambda found: self._listen(asked, *found), failed)

    def _listen(self, asked: wire.OpenProbePort, address: str, interface: str) -> None:
        self.close()
        try:
            self._listener = _bound(address)
        except OSError as error:
            self._say(wire.ProbePortOpened(nonce=asked.nonce, failed=str(error)))
            return
        self._loop.on_readable(self._listener.fileno(), self._accept)
        self._loop.call_in("listen", LISTEN_S, self.close)
        port = self._listener.getsockname()[1]
        self._say(wire.ProbePortOpened(nonce=asked.nonce, address=address, port=port, interface=interface))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            caller, _ = self._listener.accept()
        except OSError:
            return
        caller.setblocking(False)
        if len(self._callers) == _MOST_CALLERS:
            caller.close()
            return
        self._callers[caller] = MOST_ECHOED
        self._loop.on_readable(caller.fileno(), lambda: self._echo(caller))

    def _echo(self, caller: socket.socket) -> None:
        try:
            data = caller.recv(self._callers[caller])
            self._callers[caller] -= caller.send(data)
        except OSError:
            data = b""
        if not data or not self._callers[caller]:
            self._loop.forget(caller.fileno())
            del self._callers[caller]
            caller.close()

    def close(self) -> None:
        """Listen no longer."""
        for sock in (*self._callers, *([self._listener] if self._listener else [])):
            self._loop.forget(sock.fileno())
            sock.close()
        self._callers, self._listener = {}, None

    # -- calling --------------------------------------------------------------------------------------------------

    def reach(self, asked: wire.ProbePeers) -> None:
        """Answers when every peer has, or after :data:`REACH_S`; not if it is asked anew before."""
        for sock in self._calls.values():
            self._loop.forget(sock.fileno())
            sock.close()
        self._failed, self._calls, self._nonce = {}, {}, asked.nonce
        nonce = asked.nonce.encode()
        for name, (address, port) in asked.peers.items():
            try:
                self._calls[name] = self._call(name, address, port, nonce)
            except OSError as error:
                self._failed[name] = _why(error)
        self._loop.call_in("reach", REACH_S, self._give_up)
        self._answer_if_done()

    def _call(self, name: str, address: str, port: int, nonce: bytes) -> socket.socket:
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
        sock = self._calls[name]
        self._loop.on_writable(sock.fileno(), None)
        try:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            sock.send(nonce)
        except OSError as error:
            self._end_call(name, _why(error))
            return
        self._loop.on_readable(sock.fileno(), lambda: self._heard(name, nonce))

    def _heard(self, name: str, nonce: bytes) -> None:
        try:
            answer = self._calls[name].recv(MOST_ECHOED)
        except OSError as error:
            self._end_call(name, _why(error))
            return
        self._end_call(name, None if answer == nonce else "somebody else answers there")

    def _give_up(self) -> None:
        for name in list(self._calls):
            self._end_call(name, f"no answer within {REACH_S:g} s")

    def _end_call(self, name: str, failed: str | None) -> None:
        sock = self._calls.pop(name)
        self._loop.forget(sock.fileno())
        sock.close()
        if failed is not None:
            self._failed[name] = failed
        self._answer_if_done()

    def _answer_if_done(self) -> None:
        if not self._calls:
            self._loop.cancel("reach")
            self._say(wire.ProbeResult(nonce=self._nonce, failed=self._failed))


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
