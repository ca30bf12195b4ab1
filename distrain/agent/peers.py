"""Files from the memory of one host to that of another, over a TCP connection for each file. Runs in: agent.

The receiver connects, and sends the token of the run and a line with what it wants. The answer is a line with the size
of the file, and its bytes. Lines are JSON. Whoever sends another token gets no answer. An end that is silent for too
long counts as gone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

from distrain.hosts.reachability import CONNECT_TIMEOUT_S
from distrain.transfer.stream import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SILENCE_S = 15.0
"""Seconds without a byte after which the other end counts as gone: as the coordinator waits for a host."""

_PAUSE_S = 0.5
_LONGEST_LINE = 1 << 16
_CHUNK_BYTES = 1 << 20


def listen() -> socket.socket:
    """Return a socket that listens on a free port, on all addresses of this host. Raise OSError."""
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)


def connect(address: str, port: int) -> socket.socket:
    """Return a connection to another host. Raise OSError."""
    return socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S)


class FileServer:
    """Hands out files to those who know a token. ``find`` returns a path, or raises OSError."""

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
        with peer, contextlib.suppress(OSError, ValueError, TypeError):
            peer.settimeout(SILENCE_S)
            with peer.makefile("rb") as reader:
                if hmac.compare_digest(reader.read(len(self._token)), self._token):
                    self._answer(peer, json.loads(reader.readline(_LONGEST_LINE)))

    def _answer(self, peer: socket.socket, wanted: dict[str, Any]) -> None:
        try:
            file = self._find(**wanted).open("rb")
        except OSError as error:
            peer.sendall(_line(failed=error.strerror or str(error)))
            return
        with file:
            peer.sendall(_line(size=os.fstat(file.fileno()).st_size))
            peer.sendfile(file)


def fetch(address: str, port: int, token: str, wanted: dict[str, Any], target: str, size: int) -> tuple[int, int]:
    """Store a file of another host as ``target``. Return its size and crc32.

    size: what it should have. One that has another is not stored. Raise OSError.
    """
    with connect(address, port) as peer:
        peer.settimeout(SILENCE_S)
        try:
            peer.sendall(token.encode() + _line(**wanted))
            with peer.makefile("rb", buffering=_CHUNK_BYTES) as reader:
                if not (line := reader.readline(_LONGEST_LINE)):
                    raise ConnectionError
                answer = json.loads(line)
                if "failed" in answer:
                    raise RefusedError(answer["failed"])
                return answer["size"], _receive(reader, target, size) if answer["size"] == size else 0
        except (TimeoutError, ConnectionError) as error:
            raise OSError(f"the connection has ended, or nothing came for {SILENCE_S:g} s") from error
        except (ValueError, LookupError, TypeError) as error:
            raise OSError("another program answers there") from error


def _receive(reader: Any, target: str, size: int) -> int:
    """Store the bytes that come, and return their crc32."""
    crc = 0
    with open(target, "wb", buffering=0) as file:
        while size:
            if not (data := reader.read(min(size, _CHUNK_BYTES))):
                raise ConnectionError
            crc, size = zlib.crc32(data, crc), size - len(data)
            file.write(data)
    return crc


def _line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"
