"""A TCP port of this host that answers only those who know a secret. Runs in: coordinator, agent."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SILENCE_S = 15.0
"""Seconds without a byte after which the other end counts as gone: as the coordinator waits for a host."""
_ROOM = 4096
"""Connections that may wait in the kernel, which has a limit of its own (net.core.somaxconn)."""
_PAUSE_S = 0.5
_MOST_STRANGERS = 64
"""Connections that have not sent the secret yet. Further ones wait."""


def listen(address: str = "") -> socket.socket:
    """Return a socket that listens on a free port, by default on all addresses of this host. Raise OSError."""
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_ROOM, dualstack_ipv6=dual)


class SecretPort:
    """A port that reads nothing but the secret, and hangs up unless it is right.

    serve: called in a thread for each connection that is let in, with it and a reader of what follows the secret. The
    connection is closed afterwards, unless it was detached. OSError, ValueError and TypeError end it, too: whoever
    connects has sent something else than it should.
    address: where to listen; by default on all addresses. Raises OSError if that fails.
    """

    def __init__(self, secret: str, serve: Callable[[socket.socket, IO[bytes]], None], address: str = "") -> None:
        self._secret, self._serve = secret.encode(), serve
        self._socket = listen(address)
        self.number: int = self._socket.getsockname()[1]
        self._lobby = threading.BoundedSemaphore(_MOST_STRANGERS)
        threading.Thread(target=self._accept, name="distrain-port", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept() in the thread
        self._socket.close()

    def _accept(self) -> None:
        while self._socket.fileno() >= 0:
            self._lobby.acquire()
            peer = None
            try:
                peer, _ = self._socket.accept()
                threading.Thread(target=self._let_in, args=(peer,), name="distrain-peer", daemon=True).start()
            except (OSError, RuntimeError):  # too many files are open, or there are too many threads
                self._lobby.release()
                if peer is not None:
                    peer.close()
                time.sleep(_PAUSE_S)

    def _let_in(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, ValueError, TypeError):
            try:
                knows = self._knows_secret(peer)
            finally:
                self._lobby.release()
            if knows:
                peer.settimeout(SILENCE_S)
                with peer.makefile("rb") as reader:
                    self._serve(peer, reader)

    def _knows_secret(self, peer: socket.socket) -> bool:
        """Return whether the secret comes, and nothing else, before the time is up. Raise OSError."""
        said, until = b"", time.monotonic() + SILENCE_S
        while len(said) < len(self._secret):
            peer.settimeout(max(until - time.monotonic(), 0.001))
            if not (data := peer.recv(len(self._secret) - len(said))):
                return False
            said += data
        return hmac.compare_digest(said, self._secret)
