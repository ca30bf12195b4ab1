"""Deletion of runs that have ended. Runs in: anywhere.

The lock of a run is held while it is deleted, so no coordinator can use it. run.json is deleted at the end: what a
killed process has left is still a run, which the next deletion finds.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.errors import StorageError
from distrain.storage import names
from distrain.storage.run_lock import LocalLock, RemoteLock
from distrain.storage.runs.listing import ENDED, Run, run_at

if TYPE_CHECKING:
    from distrain.system.remote_path import RemotePath


def delete_run(run: Run, before: float) -> None:
    """Delete a run that has ended before a time (seconds since 1970).

    Raise StorageError if it is in use or has changed since it was listed, OSError if it cannot be deleted.
    """
    folder, is_deleted = run.location, False
    if isinstance(folder, Path) and folder.is_symlink():
        raise StorageError(f"{folder} is a link; delete the link, or name the directory that it leads to")
    if not isinstance(folder, Path) and (state := run_at(folder).state) not in ENDED:
        raise StorageError(f"it is {state}")
    lock = LocalLock(folder / names.LOCK, folder) if isinstance(folder, Path) else RemoteLock.take(folder)
    try:
        # This process holds the lock, so a run that says that it is running counts as in use here.
        now = run_at(folder)
        if not now.manifest or now.ended > before:
            raise StorageError("it has changed meanwhile: somebody has continued it")
        listed = os.listdir(folder) if isinstance(folder, Path) else folder.names()
        for name in sorted({*listed} - {names.LOCK}, key=lambda name: name == names.MANIFEST):
            _remove(folder / name)
        _remove(folder)
        is_deleted = True
    finally:
        if isinstance(folder, Path) or not is_deleted:  # a remote lock was a file in it
            lock.release()


def _remove(path: Path | RemotePath) -> None:
    if not isinstance(path, Path):
        path.remove()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
