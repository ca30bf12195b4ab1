"""Files from the memory of one host to that of another, over a TCP connection for each file. Runs in: agent.

The receiver connects, and sends the token of the run and what it wants. The answer is a header with the size of the
file, its bytes, and a header with its crc32; all as in :mod:`distrain.transfer.stream`. Whoever sends another token
gets no answer. An end that is silent for too long counts as gone.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from distrain.errors import DistrainError
from distrain.hosts.reachability import CONNECT_TIMEOUT_S
from distrain.transfer import stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SILENCE_S = 15.0
"""Seconds without a byte after which the other end counts as gone: as the coordinator waits for a host."""
_TIMEVAL = int(SILENCE_S).to_bytes(8, sys.byteorder) + bytes(8)
"""The same for the kernel: seconds and microseconds."""

_PAUSE_S = 0.5


def listen() -> socket.socket:
    """Return a socket that listens on a free port, on all addresses of this host. Raise OSError."""
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)


def connect(address: str, port: int) -> socket.socket:
    """Return a connection to another host. Raise OSError."""
    return socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S)


def limit_silence(connection: socket.socket) -> None:
    """Let reads and writes fail after a while in which the other end does nothing."""
    connection.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL)


class FileServer:
    """Hands out files to those who know a token. ``find`` returns a path, or raises OSError or RefusedError."""

    def __init__(self, token: str, find: Callable[..., Path]) -> None:
        self._token, self._find = token.encode(), find
        self._socket = listen()
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="distrain-files", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(peer,), name="distrain-file", daemon=True).start()
            except (OSError, RuntimeError):  # too many files are open, or there are too many threads
                time.sleep(_PAUSE_S)

    def _serve(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, DistrainError):
            limit_silence(peer)
            reader = stream.Reader(peer.fileno())
            if hmac.compare_digest(reader.exactly(len(self._token)), self._token):
                self._answer(peer.fileno(), reader.header())

    def _answer(self, fd: int, wanted: dict[str, Any]) -> None:
        try:
            path = self._find(**wanted)
            size = os.stat(path).st_size
        except (OSError, stream.RefusedError) as error:
            stream.send_header(fd, {"failed": getattr(error, "strerror", None) or str(error)})
            return
        stream.send_header(fd, {"size": size})
        stream.send_header(fd, {"crcs": stream.send_contents(fd, [(str(path), size)])})


def fetch(address: str, port: int, token: str, wanted: dict[str, Any], folder: str, size: int) -> tuple[int, int]:
    """Store a file of another host as ``file`` in a folder. Return its size and crc32.

    size: what it should have. One that has another is not stored. Raise OSError or DistrainError.
    """
    with connect(address, port) as peer:
        limit_silence(peer)
        fd, reader = peer.fileno(), stream.Reader(peer.fileno())
        try:
            stream.write_all(fd, token.encode())
            stream.send_header(fd, wanted)
            found = reader.header()["size"]
            return found, stream.receive_contents(reader, folder, {"file": size})["crcs"][0] if found == size else 0
        except stream.StreamEndedError as error:
            raise OSError(f"the connection has ended, or nothing came for {SILENCE_S:g} s") from error
        except (ValueError, LookupError, TypeError) as error:
            raise OSError("another program answers there") from error
