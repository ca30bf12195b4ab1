"""Copies of files from one host to another: the host that has them listens, and the others connect over TCP.

Both sides prove that they know a secret before any name is read: each sends a nonce, and a HMAC-SHA256 of both nonces.
Then the connection is a stream on which only ``read`` is answered, see :mod:`distrain.transfer.streams.streams`, and
only with files of one folder. The bytes are not encrypted, like those that the ranks exchange.

Runs in: stream server.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.transfer.streams.streams import (
    PartSender,
    Reader,
    RefusedError,
    StreamEndedError,
    check_name,
    send_header,
)

if TYPE_CHECKING:
    from distrain.transfer.streams.streams import Item

Peer = tuple[str, int, str]
"""Address, port and secret of a host that listens."""

_NONCE_BYTES, _PROOF_BYTES = 32, 32
_CONNECT_S = _HANDSHAKE_S = 10.0
_SILENCE_S = 120
"""Seconds for which the other side may neither send nor take anything before the connection is given up."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
"""With these, who waits for data notices after 14 s that the other host has no power or no network."""
_MOST_CONNECTIONS = 64
_MOST_WAITING = 64
_LARGEST_REQUEST = 1 << 20


# -- the host that has the files --------------------------------------------------------------------------------------


class PeerServer:
    """A socket at which other hosts may read the files of a folder, as long as this process lives.

    Raises OSError if it cannot listen at the address.
    """

    def __init__(self, folder: str, address: str) -> None:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._folder = os.path.realpath(folder)
        self._secret = secrets.token_hex(_NONCE_BYTES)
        self._socket = socket.create_server(place[:2], family=family, backlog=_MOST_WAITING)
        self._free = threading.Semaphore(_MOST_CONNECTIONS)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """The port at which the socket listens."""
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def secret(self) -> str:
        """The secret that other hosts have to know."""
        return self._secret

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # such as too many open files
                time.sleep(0.1)
                continue
            if self._free.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                welcome(connection, self._secret)
                self._answer(connection)
        except (OSError, StreamEndedError, KeyError, TypeError, ValueError):
            pass  # a stranger, or the end; who connects learns it from the closed connection
        finally:
            self._free.release()

    def _answer(self, connection: socket.socket) -> None:
        """Answer requests until there are no more."""
        _prepare_for_parts(connection)
        reader, sender = Reader(connection.fileno(), _LARGEST_REQUEST), PartSender(connection.fileno())
        while True:
            for name, start, count in reader.header()["items"]:
                try:
                    path = self._path_of(name)
                except RefusedError as error:
                    sender.send_problem(str(error))
                else:
                    sender.send(path, start, count)
            sender.flush()

    def _path_of(self, name: str) -> str:
        """Return the path of a file. Raise RefusedError if it is outside of the folder."""
        path = os.path.realpath(os.path.join(self._folder, check_name(name)))
        if not Path(path).is_relative_to(self._folder):
            raise RefusedError(f"{name!r} is no file below the folder")
        return path


# -- the host that wants them -----------------------------------------------------------------------------------------


class PeerConnections:
    """The connection to the peer from which files are copied for an order."""

    def __init__(self) -> None:
        self._key: tuple[Peer, str] | None = None
        self._socket: socket.socket | None = None

    def request(self, peer: Peer, staging: str, items: list[Item]) -> Reader:
        """Ask for parts of files, and return where they arrive. Raise OSError or StreamEndedError.

        staging: the directory that the order has for itself. Each order has a connection of its own, too.
        """
        if self._socket is None or self._key != (peer, staging):
            self.close()
            self._key, self._socket = (peer, staging), connect(peer)
            self._reader = Reader(self._socket.fileno())
        send_header(self._socket.fileno(), {"do": "read", "items": items})
        return self._reader

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def connect(peer: Peer) -> socket.socket:
    """Connect to a host that listens. Raise OSError or StreamEndedError."""
    address, port, secret = peer
    connection = socket.create_connection((address, port), timeout=_CONNECT_S)
    try:
        introduce(connection, secret)
        _prepare_for_parts(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare_for_parts(connection: socket.socket) -> None:
    """Let reads and writes of the descriptor fail if nothing moves, or if the kernel of the other host is gone."""
    connection.settimeout(None)
    limit = _SILENCE_S.to_bytes(8, sys.byteorder) + bytes(8)  # a struct timeval
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)
    keep_alive(connection)


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and notice that the kernel of the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# -- the handshake ----------------------------------------------------------------------------------------------------


def welcome(connection: socket.socket, secret: str) -> None:
    """Let the other side prove that it knows the secret, then prove it to that. Raise StreamEndedError or OSError."""
    deadline = time.monotonic() + _HANDSHAKE_S
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(_HANDSHAKE_S)
    connection.sendall(own)
    other = receive(connection, _NONCE_BYTES, deadline)
    _check(receive(connection, _PROOF_BYTES, deadline), _proof(secret, b"reads", own, other))
    connection.sendall(_proof(secret, b"serves", own, other))


def introduce(connection: socket.socket, secret: str) -> None:
    """Be the other side of :func:`welcome`."""
    deadline = time.monotonic() + _HANDSHAKE_S
    own = secrets.token_bytes(_NONCE_BYTES)
    other = receive(connection, _NONCE_BYTES, deadline)
    connection.sendall(own + _proof(secret, b"reads", other, own))
    _check(receive(connection, _PROOF_BYTES, deadline), _proof(secret, b"serves", other, own))


def _proof(secret: str, role: bytes, servers_nonce: bytes, readers_nonce: bytes) -> bytes:
    """Return what only a side in this role can send that knows the secret. A copy of the other's proof is none."""
    return hmac.digest(secret.encode(), role + servers_nonce + readers_nonce, "sha256")


def _check(found: bytes, wanted: bytes) -> None:
    if not hmac.compare_digest(found, wanted):
        raise StreamEndedError("it does not know the secret")


def receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return exactly so many bytes. Raise StreamEndedError if it sends fewer, OSError after the deadline."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise StreamEndedError("it does not know the secret, or has too many connections")
        data += more
    return data
