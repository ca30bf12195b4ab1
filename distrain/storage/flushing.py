"""Flushes of files to disk. Runs in: coordinator, worker, uploader, mover, stream server.

No large module is imported here, as each stream waits for the imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2


def begin_flush(fd: int, start: int, count: int) -> None:
    """Let the kernel write bytes of a file to disk in the background. Only :func:`flush` makes them durable.

    count: their number, 0 for all up to the end.
    """
    _LIBC.sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def flush(path: str | Path) -> None:
    """Flush a file to disk, or a directory, so that renames in it survive a power cut. Raise OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the path to an OSError of a read or a write, which has no file name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # one without a number comes from a signal handler
            error.filename = str(path)
        raise
