"""Deletion of runs that have ended. Runs in: anywhere.

The lock of a run is held while it is deleted, so no coordinator can use it. A local run directory is renamed first. If
this process is killed, the rest has a name by which the next :func:`delete_rests` finds it. A remote run keeps its
run.json until the end, so that it is still a run.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.errors import StorageError
from distrain.storage import names
from distrain.storage.run_lock import LocalLock, RemoteLock
from distrain.storage.runs.listing import ENDED, Run, local_run, remote_run

if TYPE_CHECKING:
    from distrain.system.remote_path import RemotePath

_DELETED = ".deleted-run-"
"""The beginning of the name of a run directory that is being deleted."""


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
        _check(local_run(str(folder)), before)
        target = folder.with_name(f"{_DELETED}{folder.name}")
        if target.exists():  # an earlier run of that name was not deleted to its end
            _delete_tree(target)
        folder.rename(target)
        _delete_tree(target)
    finally:
        lock.release()


def _check(run: Run, before: float) -> None:
    """Raise StorageError for a run that is not as it was listed: somebody has continued it meanwhile."""
    if not run.is_run or run.ended > before:
        raise StorageError("it has changed meanwhile")


def _delete_remote(folder: RemotePath, before: float) -> None:
    run = remote_run(folder)
    if run.state not in ENDED:
        raise StorageError(f"it is {run.state}")
    lock = RemoteLock.take(folder)
    try:
        _check(remote_run(folder), before)
    except StorageError:
        lock.release()
        raise
    for name in folder.names():
        if name not in (names.MANIFEST, names.LOCK):
            (folder / name).remove()
    (folder / names.MANIFEST).remove()
    folder.remove()


def delete_rests(storage: Path | RemotePath, *, dry_run: bool = False) -> int:
    """Delete what killed processes have left of runs in a storage path. Return the number of these runs."""
    if not isinstance(storage, Path) or not storage.is_dir():
        return 0
    rests = [path for path in storage.iterdir() if path.name.startswith(_DELETED) and path.is_dir()]
    if not dry_run:
        for path in rests:
            _delete_tree(path)
    return len(rests)


def _delete_tree(folder: Path) -> None:
    """Delete a directory. Another process may be deleting it, too. Raise OSError."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        if os.path.lexists(folder):
            _delete_tree(folder)
