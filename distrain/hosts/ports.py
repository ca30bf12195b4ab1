"""TCP ports that nobody else gets before the process group binds them. Runs in: agent, coordinator."""

from __future__ import annotations

import socket


def reserve_port() -> socket.socket:
    """A socket that keeps a free port, as long as it is open: bound without listening and with SO_REUSEADDR, so that
    rank 0's store can still bind it.
    """
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("", 0))
    return keeper
