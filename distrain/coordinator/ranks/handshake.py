"""The proof that both ends of a connection between ranks know a secret, before anything else is read.

Each sends a nonce, and a HMAC-SHA256 of both nonces. Runs in: coordinator.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

_NONCE_BYTES, _PROOF_BYTES = 32, 32
_HANDSHAKE_S = 10.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
"""With these, a reader notices within 14 s that the other host has no power or no network."""


class HandshakeError(Exception):
    """The other end does not know the secret, or is gone."""


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and notice that the kernel of the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def welcome(connection: socket.socket, secret: str) -> None:
    """Let the other side prove that it knows the secret, then prove it to that. Raise HandshakeError or OSError."""
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
        raise HandshakeError("it does not know the secret")


def receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return exactly so many bytes. Raise HandshakeError if it sends fewer, OSError after the deadline."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise HandshakeError("it does not know the secret, or has too many connections")
        data += more
    return data
