"""Log a run that has ended, or a part of it that is missing, to a tracker. Runs in: anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distrain.api.tracker import check_packages, name_of, trackers_of
from distrain.errors import StorageError
from distrain.storage.names import MANIFEST
from distrain.storage.paths import read_manifest
from distrain.storage.run_lock import is_in_use
from distrain.system.remote_path import locate
from distrain.trackers.logging import TrackerLog
from distrain.trackers.tensorboard import TensorBoard
from distrain.trackers.wandb import Wandb

if TYPE_CHECKING:
    import os

    from fsspec import AbstractFileSystem

    from distrain.api.tracker import Tracker


def export(
    run: str | os.PathLike[str],
    tracker: Tracker | str,
    *,
    again: bool = False,
    storage_filesystem: AbstractFileSystem | None = None,
) -> str | None:
    """Log the reports of a run to a tracker, without those that it has had already. Return the URL, if it has one.

    run: the run directory, a path or URL; with ``storage_filesystem`` a path on that filesystem.
    tracker: an object such as ``Wandb(project="mnist")``, or a text such as ``"wandb:project=mnist"``.
    again: log all reports once more, as another run of the tracker.

    Raises TypeError or ValueError for a bad tracker, LaunchError if its package is not installed, StorageError if there
    is no run or it has not ended, and what the tracker raises.

    ::

        from distrain.trackers import export

        export(trainer.fit().path, "tensorboard")
    """
    [chosen] = trackers_of([tracker], {}, "export()")
    check_packages([chosen])
    try:
        found = locate(run, storage_filesystem)
        manifest = read_manifest(found)
        if not manifest:
            raise StorageError(f"{found} is not a run directory: it has no {MANIFEST}")
        was_running = manifest["status"] == "running"
        if was_running and is_in_use(found):
            raise StorageError(f"the run {found} has not ended, and its own trackers log it; export it after its end")
        if not isinstance(found, Path) and isinstance(chosen, (TensorBoard, Wandb)) and chosen.directory is None:
            raise ValueError(f"{found} is remote: name a local directory for files, {name_of(chosen)}:directory=...")
        log = TrackerLog(chosen, found, str(found))
        log.start(again=again)
        log.finish("failed" if was_running else manifest["status"])
    except OSError as error:
        raise StorageError(f"cannot export the run {run}: {error}") from error
    return log.url
