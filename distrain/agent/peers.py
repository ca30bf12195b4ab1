"""Files from the memory of one host to that of another, over a TCP connection for each file. Runs in: agent.

The receiver connects, and sends the token of the run and a line with what it wants. The answer is a line with the size
of the file, and its bytes. Lines are JSON. Whoever sends another token gets no answer. An end that is silent for too
long counts as gone.
"""

from __future__ import annotations

import json
import os
import socket
import zlib
from typing import IO, TYPE_CHECKING, Any

from distrain.hosts.reachability import CONNECT_TIMEOUT_S
from distrain.hosts.secret_port import SILENCE_S, SecretPort
from distrain.transfer.stream import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_LONGEST_LINE = 1 << 16
_CHUNK_BYTES = 1 << 20


def connect(address: str, port: int) -> socket.socket:
    """Return a connection to another host. Raise OSError."""
    return socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S)


class FileServer:
    """Hands out files to those who know a token. ``find`` returns a path, or raises OSError."""

    def __init__(self, token: str, find: Callable[..., Path]) -> None:
        self._find = find
        self._door = SecretPort(token, self._answer)
        self.port = self._door.number

    def close(self) -> None:
        """Hand out nothing more."""
        self._door.close()

    def _answer(self, peer: socket.socket, reader: IO[bytes]) -> None:
        wanted = json.loads(reader.readline(_LONGEST_LINE))
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
    with open(target, "wb") as file:
        while size:
            if not (data := reader.read(min(size, _CHUNK_BYTES))):
                raise ConnectionError
            crc, size = zlib.crc32(data, crc), size - len(data)
            file.write(data)
    return crc


def _line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"
