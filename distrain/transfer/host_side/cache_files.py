"""Directories of the cache: locked and deleted. Runs in: agent, guard.

A process locks a directory as long as it uses it: together with others (``LOCK_SH``) or alone (``LOCK_EX``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

from distrain.system.locks import lock_path

if TYPE_CHECKING:
    from pathlib import Path


def lock_folder(path: Path, how: int) -> int | None:
    """Lock a directory, and note the time of its use. Return its descriptor, which keeps the lock until it is closed.

    Return None if there is no such directory, or if another process has locked it or just deleted it. Raise OSError.
    """
    fd = lock_path(path, how | fcntl.LOCK_NB)
    if fd is not None:
        with contextlib.suppress(OSError):  # it may be read-only
            os.utime(fd)
    return fd


def delete(path: str | Path) -> None:
    """Delete whatever is there, as far as possible. Follow no links."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
        return
    for parent, _, _ in os.walk(path):
        with contextlib.suppress(OSError):  # directories in it may be read-only
            os.chmod(parent, 0o700)
    shutil.rmtree(path, ignore_errors=True)
