"""Log a run that has ended, or a part of it that is missing, to a tracker. Runs in: anywhere."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.api.tracker import check_packages, name_of, trackers_of
from distrain.errors import StorageError
from distrain.storage.files import write_atomically
from distrain.storage.paths import RunPaths, read_manifest
from distrain.storage.run_lock import is_in_use
from distrain.system.remote_path import RemotePath, locate
from distrain.system.scratch import temporary_directory
from distrain.trackers.follower import Follower
from distrain.trackers.tensorboard import TensorBoard
from distrain.trackers.wandb import Wandb

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

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
            raise StorageError(f"{found} is not a run directory: it has no {RunPaths(Path()).manifest.name}")
        was_running = manifest["status"] == "running"
        if was_running and is_in_use(found):
            raise StorageError(f"the run {found} has not ended, and its own trackers log it; export it after its end")
        with _local(found, chosen) as paths:
            if again:
                _forget(paths, chosen)
            follower = Follower(chosen, paths, str(found), storage_filesystem)
            follower.start()
            while follower.advance(is_over=True):
                pass
            follower.finish("failed" if was_running else manifest["status"])
    except OSError as error:
        raise StorageError(f"cannot export the run {run}: {error}") from error
    return follower.url


def _forget(paths: RunPaths, tracker: Tracker) -> None:
    """Let the tracker begin anew, as another run."""
    state = '{"metrics": 0, "events": 0, "marks": {}, "state": {"id": "%s"}}' % uuid.uuid4().hex[:16]  # noqa: UP031
    write_atomically(paths.tracker_state(name_of(tracker)), state.encode())


@contextlib.contextmanager
def _local(run: Path | RemotePath, tracker: Tracker) -> Iterator[RunPaths]:
    """Provide a local directory with the records of a run, and bring back the progress of the tracker."""
    if isinstance(run, Path):
        yield RunPaths(run)
        return
    if isinstance(tracker, (TensorBoard, Wandb)) and tracker.directory is None:
        raise ValueError(f"{run} is remote: name a local directory for files, {name_of(tracker)}:directory=...")
    with temporary_directory("distrain-export-") as folder:
        paths = RunPaths(Path(folder) / run.name)
        state = paths.tracker_state(name_of(tracker))
        for path in (paths.manifest, paths.metrics, paths.events, state):
            with contextlib.suppress(FileNotFoundError):
                run.get(str(path.relative_to(paths.root)), path)
        try:
            yield paths
        finally:
            if state.exists():
                (run / str(state.relative_to(paths.root))).write_bytes(state.read_bytes())
