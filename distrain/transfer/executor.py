"""The execution of the coordinator's orders: copy a rank's files, write manifests, delete, mirror the spool.

Runs in: uploader; coordinator, if it has no workers.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.errors import StorageError
from distrain.storage.checkpoint import DELETED, MANIFEST_FILE, METADATA_FILE, PENDING_FILE
from distrain.storage.file_transfer import Files, hash_files, store_files, unchanged
from distrain.storage.files import copy_folders, list_files
from distrain.storage.paths import RunPaths
from distrain.storage.records import complete_manifest, manifest_text
from distrain.storage.run_lock import RemoteLock
from distrain.system.background import in_threads
from distrain.system.log import warn
from distrain.system.remote_path import OPENING_PATIENCE_S, RemotePath, decode_filesystem

if TYPE_CHECKING:
    from collections.abc import Callable


_PAUSE_S = 5.0
"""Seconds since the last check that the run is ours, after which this process may have been suspended."""


class StorageExecutor:
    """Executes the coordinator's orders. It raises nothing: every order has an answer."""

    def __init__(self, run: RemotePath | None = None, notify: Callable[[str], None] = warn) -> None:
        """``run``: the run directory, if it is remote. ``notify``: called with a warning for the user."""
        self._run = run
        self._notify = notify
        self._spool = Path()
        self._lock: RemoteLock | None = None
        self._checked_at = 0.0
        """The time of the last check that the run is ours, in seconds since 1970."""
        self._mirrored: dict[str, tuple[int, int]] = {}

    def do(self, order: wire.Message) -> wire.Message:
        """Execute an order, and return the answer to it."""
        work: Any = {
            wire.OpenStorage: self._open,
            wire.Upload: self._store_files,
            wire.PublishCheckpoint: self._publish,
            wire.UpdateManifest: self._update_manifest,
            wire.DeleteCheckpoints: self._delete,
            wire.MirrorRecords: lambda _: self.mirror(),
        }
        try:
            return work[type(order)](order) or wire.OrderDone()
        except Exception as error:  # the coordinator waits for an answer, whatever a filesystem raises
            return wire.failed_answer(order, error)

    def _open(self, order: wire.OpenStorage) -> None:
        """Write, read and delete a file in the run directory. Raise OSError if that fails."""
        self._run = self._run or RemotePath(order.url, decode_filesystem(order.filesystem))
        self._spool = Path(order.spool)
        if order.lock:
            self._lock = RemoteLock.from_text(self._run, order.lock)
            self._run = replace(self._run, before_retry=self._check_pause)
        run = self._run if order.again else replace(self._run, patience_s=OPENING_PATIENCE_S)
        probe = run / f".probe-{uuid.uuid4().hex}"
        probe.write_bytes(b"distrain")
        if probe.read_bytes() != b"distrain":
            raise OSError(f"{probe} read back different bytes than were written")
        probe.remove()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _store_files(self, order: wire.Upload) -> wire.Message:
        source = Path(order.source)
        with unchanged(source, order.facts):
            if not order.source:
                files = self._hash_in_place(order)
            elif self._run is None:
                copy_folders(source, Path(order.directory))
                files = store_files(source, Path(order.directory), order.files)
            else:
                files = self._put(order)
            skipped = hash_files(source, order.others) if order.source else []
        return wire.files_copied(order, files=files, skipped=skipped)

    def _hash_in_place(self, order: wire.Upload) -> Files:
        """Hash the files of a directory that the ranks have filled themselves."""
        if self._run is None:
            folder = Path(order.directory)
            return store_files(folder, folder, list_files(folder))
        target = self._mark_pending(order)
        return target.hash_all(sorted(target.files().keys() - {MANIFEST_FILE, PENDING_FILE}))

    def _mark_pending(self, order: wire.Upload) -> RemotePath:
        """Mark the remote directory of a checkpoint as incomplete, and return it."""
        assert self._run is not None
        target = self._run / order.directory
        (target / PENDING_FILE).write_bytes(json.dumps({"attempt": order.attempt, "ordinal": order.ordinal}).encode())
        return target

    def _put(self, order: wire.Upload) -> Files:
        """Copy the files to a remote directory, and hash them at the same time."""
        target, source = self._mark_pending(order), Path(order.source)
        works: list[Callable[[Path, list[str]], Files | None]] = [target.put_all, hash_files]
        return in_threads(lambda work: work(source, order.files), works)[1] or []

    def _publish(self, order: wire.PublishCheckpoint) -> None:
        """Check that all files exist, and write the manifest, which makes them a checkpoint."""
        run = self._owned_run()
        target = run / order.directory
        write = (target / METADATA_FILE).write_bytes
        manifest, problem = complete_manifest(target, order.manifest, order.metadata, order.positions, write)
        if problem:
            self._notify(f"{METADATA_FILE} of {target} {problem}")
        present = target.files()
        for name, fact in manifest["files"].items():
            size, version = present.get(name, (None, ""))
            if size != fact["size"]:
                found = "is missing" if size is None else f"has {size} bytes instead of {fact['size']}"
                raise OSError(f"{target / name} {found}, although it was stored")
            if version:
                fact["version"] = version
        (target / MANIFEST_FILE).write_bytes(manifest_text(manifest))
        try:
            self._check_pause()  # else a new owner may have deleted the files
        except StorageError:
            (target / MANIFEST_FILE).remove()
            raise
        with contextlib.suppress(OSError):  # the next run deletes the file
            (target / PENDING_FILE).remove()

    def _update_manifest(self, order: wire.UpdateManifest) -> None:
        manifest = self._owned_run() / order.directory / MANIFEST_FILE
        manifest.write_bytes(manifest_text(json.loads(manifest.read_bytes()), **order.fields))

    def _delete(self, order: wire.DeleteCheckpoints) -> None:
        """Delete checkpoints, each one's manifest first: without one, the other files aren't a checkpoint."""
        run = self._owned_run()
        for name in order.directories:
            (run / name / PENDING_FILE).write_bytes(DELETED)
            (run / name / MANIFEST_FILE).remove()
            for entry in (run / name).names():
                self._check_pause()
                if entry != PENDING_FILE:
                    (run / name / entry).remove()
            (run / name).remove()  # last of all the marker, by which the next run finds the files that a kill leaves

    def _owned_run(self) -> RemotePath:
        """Return the run directory. Raise StorageError if another coordinator has taken it over."""
        assert self._run is not None
        if self._lock is not None:
            self._lock.check()
            self._checked_at = time.time()
        return self._run

    def _check_pause(self) -> None:
        """Raise StorageError if another coordinator has taken over the run while this process was suspended."""
        if abs(time.time() - self._checked_at) > _PAUSE_S:
            self._owned_run()

    # -- the rest of the run directory ----------------------------------------------------------------------------

    def mirror(self) -> None:
        """Copy the files that have changed in the spool since the last time. Raise OSError or StorageError."""
        run = self._owned_run()
        for path in RunPaths(self._spool).files_to_mirror():
            name = str(path.relative_to(self._spool))
            with contextlib.suppress(FileNotFoundError):  # the file was deleted meanwhile
                state = (path.stat().st_mtime_ns, path.stat().st_size)
                if self._mirrored.get(name) != state:
                    self._check_pause()
                    run.put_all(self._spool, [name])
                    self._mirrored[name] = state

    def beat(self) -> None:
        """Renew the heartbeat of the run. Raise OSError or StorageError."""
        assert self._lock is not None
        self._lock.beat()
