"""Unix sockets whose paths may be long. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Return another name of a path. An address takes about 100 bytes, and run directories have long names."""
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen_at(path: Path) -> socket.socket:
    """Return a socket that listens at ``path``, which only this user can connect to. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        with _short(path) as address:
            listener.bind(address)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def connect_to(path: Path) -> socket.socket:
    """Return a socket that is connected to the one that listens at ``path``. It does not block. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        with _short(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection
