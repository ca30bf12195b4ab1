"""Deletion of runs that have ended. Runs in: anywhere.

The lock of a run is held while it is deleted, so no coordinator can use it. run.json is deleted at the end: what a
killed process has left is still a run, which the next deletion finds.
"""

from __future__ import annotations

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
    folder = run.location
    if isinstance(folder, Path):
        _delete_local(folder, before)
    else:
        _delete_remote(folder, before)


def _delete_local(folder: Path, before: float) -> None:
    if folder.is_symlink():
        raise StorageError(f"{folder} is a link; delete the link, or name the directory that it leads to")
    lock = LocalLock(folder / names.LOCK, folder)
    try:
        # This process holds the lock, so a run that says that it is running counts as in use here.
        _check(run_at(folder), before)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == names.MANIFEST):
            if path.name == names.LOCK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        shutil.rmtree(folder)
    finally:
        lock.release()


def _delete_remote(folder: RemotePath, before: float) -> None:
    run = run_at(folder)
    if run.state not in ENDED:
        raise StorageError(f"it is {run.state}")
    lock = RemoteLock.take(folder)
    try:
        _check(run_at(folder), before)
    except StorageError:
        lock.release()
        raise
    for name in folder.names():
        if name not in (names.MANIFEST, names.LOCK):
            (folder / name).remove()
    (folder / names.MANIFEST).remove()
    folder.remove()


def _check(run: Run, before: float) -> None:
    """Raise StorageError for a run that is not as it was listed: somebody has continued it meanwhile."""
    if not run.manifest or run.ended > before:
        raise StorageError("it has changed meanwhile")
