"""Reservation of TCP ports until a process group binds them. Runs in: agent, coordinator, worker."""

from __future__ import annotations

import socket


def reserve_port() -> socket.socket:
    """Return a socket that reserves a free port as long as it is open.

    The socket has SO_REUSEADDR and does not listen, so that the store of rank 0 can bind the same port.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved
