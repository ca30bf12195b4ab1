"""A stranger on the network: list the open sockets of a host, connect to them, and send what no part of distrain would.

On another host this runs as a program. It imports nothing of distrain, which the host may lack:

    python -m tests.strangers listeners
    python -m tests.strangers visit BOMB '[["10.77.0.11", 4711], ...]'

``visit`` prints the answers. It also keeps a silent connection to each address open until its stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ANY_ADDRESS = ("::", "0.0.0.0")
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 0.2


class Bomb:
    """An object that makes a directory when somebody unpickles it."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._folder,)


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket, and the process that owns it."""

    address: str
    port: int
    pid: int
    command: list[str]


@dataclass(frozen=True)
class Visit:
    """The answers of a listener, one for each message; empty if it could not be reached."""

    address: str
    port: int
    answers: list[str]


def messages(bomb: Path) -> list[bytes]:
    """Return a pickle, the same framed as by multiprocessing, an HTTP request, and the start of distrain's protocol."""
    data = pickle.dumps(Bomb(bomb))
    return [data, struct.pack("!i", len(data)) + data, b"GET / HTTP/1.1\r\n\r\n", b"\0distrain\0" + bytes(64)]


def listeners() -> list[Listener]:
    """Return all listeners of this network namespace, IPv4 and IPv6. Without root, those of other users have pid 0."""
    found = []
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            pid = connection.pid or 0
            found.append(Listener(connection.laddr.ip, connection.laddr.port, pid, _command(pid)))
    return found


def _command(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline()) if pid else []
    except psutil.Error:
        return []


def visit(address: str, port: int, bomb: Path) -> Visit:
    answers = []
    for message in messages(bomb):
        try:
            stranger = socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S)
        except OSError:
            return Visit(address, port, [])
        with stranger:
            answers.append(_answer(stranger, message))
    return Visit(address, port, answers)


def _answer(stranger: socket.socket, message: bytes) -> str:
    got = b""
    with contextlib.suppress(OSError):
        stranger.sendall(message)
        stranger.settimeout(ANSWER_TIMEOUT_S)
        while data := stranger.recv(1 << 16):
            got += data
    return got.hex()


def main(command: str, *arguments: str) -> None:
    if command == "listeners":
        print(json.dumps([asdict(listener) for listener in listeners()]))
        return
    bomb, where = Path(arguments[0]), json.loads(arguments[1])
    silent = []
    for address, port in where:
        with contextlib.suppress(OSError):
            silent.append(socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S))
    with ThreadPoolExecutor(16) as pool:
        visits = list(pool.map(lambda place: visit(*place, bomb), where))
    print(json.dumps([asdict(answered) for answered in visits]), flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
