"""A run directory that is reached through fsspec: a local spool of its small files, and an uploader.

Runs in: coordinator. :func:`open_run` opens local runs, too: it is here because it needs both stores.

Metrics, logs and run.json are written to the spool, a local directory that an uploader process mirrors every few
seconds. Checkpoints go directly from the host that has them to the run directory. The coordinator itself reads the
storage only while it opens the run; later it gives the uploader orders, which it answers in their order.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.coordinator.store.local_store import LocalStore
from distrain.coordinator.store.run_store import RunStore
from distrain.decisions.checkpoints.ledger import Ledger
from distrain.errors import StorageError
from distrain.storage.checkpoint import MANIFEST_FILE, PENDING_FILE
from distrain.storage.commit import committed
from distrain.storage.names import TRACKERS, numbered
from distrain.storage.paths import DAMAGED_FILE, choose_run, is_copy, number_of, read_manifest
from distrain.storage.records import remote_damage
from distrain.storage.run_lock import Heartbeats, RemoteLock
from distrain.system import process
from distrain.system.log import warn
from distrain.system.remote_path import RemotePath, encode_filesystem, locate, own_temporary_directory
from distrain.transfer.order_link import OrderLink

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from distrain.decisions.checkpoints.actions import Delete, MakeDirectory, Publish, UpdateManifest
    from distrain.system.background import Background
    from distrain.system.loop import Loop

_FilesOf = dict[str, dict[str, tuple[int, str]]]
"""By directory and relative path: size in bytes and version of a file."""
_SKIPPED = 10
"""Checkpoint numbers to skip after an owner that may wake up: it may still use them, and no name is used twice."""


def open_run(
    storage_path: str | os.PathLike[str] | None, name: str | None, filesystem: Any = None, *, stem: str = "distrain"
) -> RunStore:
    """Lock the run that :func:`choose_run` chooses, and return its store. Raise StorageError."""
    while True:
        root = choose_run(storage_path, name, filesystem, stem=stem)
        store = RemoteStore(root) if isinstance(root, RemotePath) else LocalStore(root)
        if read_manifest(root).get("status") != "finished":
            return store
        store.close()  # another process finished the run just before this one had the lock


class RemoteStore(RunStore):
    """The store of a remote run directory. Raises StorageError if it cannot be used or is in use."""

    is_remote = True
    location: RemotePath

    def __init__(self, run: RemotePath) -> None:
        try:
            spool = _spool_of(run)
            self.filesystem = encode_filesystem(run.given)
        except OSError as error:
            raise StorageError(f"cannot use the storage: {error}") from error
        super().__init__(run, spool)
        self._link: OrderLink | None = None
        self._used: set[str] = set()
        """Directory names that no new checkpoint may have, as files of an earlier one may still arrive."""
        self._next_number = 0
        """The lowest number for the name of a new checkpoint: no other one has had it, on storage or in memory."""
        self._directories: dict[str, str] = {}
        """Directory names by key of the checkpoint."""
        self._problem: str | None = None
        self._is_abandoned = False
        with self._opening() as undo:
            if list(spool.iterdir()) == [self.paths.lock]:  # no earlier run has left files
                undo.callback(_delete_spool, spool)
            self._run_lock = RemoteLock.take(run)
            self._heartbeats = Heartbeats(self._run_lock.beat)
            undo.callback(self._release_run_lock)
            self._fill_spool()
            self.directory.open()
            self.ledger = self._find_intact()
        self.location = RemotePath(run.url, run.given)  # with the usual patience from now on

    def _fill_spool(self) -> None:
        """Copy run.json and what is continued into the spool, unless a run that was killed has left newer files."""
        remote, local = read_manifest(self.location), read_manifest(self.paths.root)
        if local and local.get("run_id") == remote.get("run_id"):
            return
        for path in self.paths.root.iterdir():
            if path != self.paths.lock:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        names = (self.location / TRACKERS).names() if TRACKERS in self.location.names() else []
        states = [f"{TRACKERS}/{name}" for name in names if name.endswith(".json")]
        growing = (self.paths.metrics, self.paths.events)
        for name in (self.paths.manifest.name, *(path.name for path in growing), *states):
            with contextlib.suppress(FileNotFoundError):
                self.location.get_all([name], self.paths.root)

    def _find_intact(self) -> Ledger:
        """Return the checkpoints of an earlier part of the run, and delete those that were never finished."""
        files: _FilesOf = {}
        for path, fact in self.location.files().items():
            folder, _, name = path.partition("/")
            files.setdefault(folder, {})[name] = fact
        for folder, found in files.items():
            if PENDING_FILE in found:
                checkpoint = self.location / folder
                (checkpoint / PENDING_FILE if MANIFEST_FILE in found else checkpoint).remove()
        self._used = set(files)
        manifests = self._intact_manifests(files)
        numbers = [manifest.get("index", -1) for _, manifest in manifests] + [number_of(name) for name in self._used]
        intact = [committed(self.location / folder, manifest) for folder, manifest in manifests]
        self._next_number = max(numbers, default=-1) + 1 + (_SKIPPED if self._run_lock.is_contested else 0)
        return Ledger(intact, self._next_number)

    def _intact_manifests(self, files: _FilesOf) -> list[tuple[str, dict[str, Any]]]:
        """Return the manifests of undamaged checkpoints by directory, the oldest first. Rename other manifests."""
        intact = []
        for folder in (folder for folder, found in files.items() if MANIFEST_FILE in found):
            checkpoint = self.location / folder
            text = (checkpoint / MANIFEST_FILE).read_bytes()
            if _is_copy(folder, text):
                continue
            damage = remote_damage(checkpoint, text, files[folder])
            if damage is None:
                intact.append((folder, json.loads(text)))
            else:
                (checkpoint / DAMAGED_FILE).write_bytes(text)
                (checkpoint / MANIFEST_FILE).remove()
                warn(f"{checkpoint} is damaged: {damage}; its manifest was renamed to {DAMAGED_FILE}")
        return sorted(intact, key=lambda pair: pair[1].get("index", -1))

    # -- orders ---------------------------------------------------------------------------------------------------

    def start(self, loop: Loop, background: Background, run_id: str, flags: Sequence[str]) -> None:
        super().start(loop, background, run_id, flags)
        ids = {process.RUN_IDS: process.extended_run_ids(run_id)}
        self._link = OrderLink(loop, self._on_message, "uploader", flags=flags, environment=ids)
        opening = replace(self.open_order(), spool=str(self.paths.root), lock=self._run_lock.as_text())
        self._link.order(opening, self._on_opened)

    def open_order(self) -> wire.OpenStorage:
        return wire.OpenStorage(url=self.location.url, filesystem=self.filesystem)

    def _order(self, order: wire.Message, then: Callable[[str | None], None]) -> None:
        """Give the uploader an order, and call ``then`` with why it failed, or None."""
        assert self._link is not None
        self._link.order(order, lambda done: then(done.failed))

    def _on_opened(self, done: wire.OrderDone) -> None:
        self._heartbeats.stop()
        if done.failed is not None:
            self._fail(f"cannot use the storage: {done.failed}")

    def _on_message(self, message: wire.Message) -> None:
        match message:
            case wire.Notice(text=text):
                warn(text)
            case wire.HostFailed(text=text):
                self._fail(text)

    def _fail(self, why: str) -> None:
        if self._problem is None:
            self._problem = why
            super()._fail(why)

    @property
    def is_idle(self) -> bool:
        return super().is_idle and (self._link is None or self._link.is_idle)

    def abandon_pending_work(self) -> None:
        super().abandon_pending_work()
        self._is_abandoned = True

    def detach(self) -> None:
        super().detach()
        if self._link is not None:
            self._link.detach()

    def secure_records(self) -> None:
        def done(failed: str | None) -> None:
            if failed is not None:
                self._cannot_write("metrics and logs", failed)

        self.flush(lambda _: self._order(wire.MirrorRecords(), done))

    def _mirror_records(self) -> None:
        def done(failed: str | None) -> None:
            if failed is not None and self._problem is None:
                warn(f"run.json, metrics and logs are only in {self.paths.root} for now: {failed}")

        if self._link is not None:
            self._order(wire.MirrorRecords(), done)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def prepare(self, new: MakeDirectory) -> None:
        new.then(self._directory_for(new.key, new.name))

    def _directory_for(self, key: str, name: str | None) -> str:
        """Return the name of a checkpoint's directory, which no other one has had."""
        if key not in self._directories:
            wanted = name or self.new_name(self.ledger.next_index)
            free = next(one for one in numbered(wanted) if one not in self._used)
            if free != wanted:
                warn(f"{self.location / wanted} exists, so this checkpoint is called {free}")
            self._used.add(free)
            self._directories[key] = free
        return self._directories[key]

    def new_name(self, index: int) -> str:
        numbers = itertools.count(max(self._next_number, index))
        number = next(one for one in numbers if self.paths.checkpoint(one).name not in self._used)
        self._next_number = number + 1
        return self.paths.checkpoint(number).name

    def publish(self, new: Publish) -> None:
        manifest = new.manifest
        directory = new.folder or self._directory_for(new.key, manifest["name"])
        self._used.add(directory)

        def answered(why: str | None) -> None:
            if why is None:
                new.done(self.location / directory)
            else:
                new.failed(why)

        manifest["name"] = directory
        order = wire.PublishCheckpoint(
            directory=directory, manifest=manifest, metadata=dict(self.metadata), positions=dict(new.positions)
        )
        self._order(order, answered)

    def update_manifest(self, new: UpdateManifest) -> None:
        name = new.saved.path.name
        order = wire.UpdateManifest(directory=name, fields=dict(new.fields))
        self._order(order, partial(_warn_if_failed, f"the manifest of {name} could not be updated"))

    def delete(self, surplus: Delete) -> None:
        order = wire.DeleteCheckpoints(directories=[saved.path.name for saved in surplus.chosen])
        self._order(order, partial(_warn_if_failed, "an old checkpoint could not be deleted"))

    # -- the end --------------------------------------------------------------------------------------------------

    def delete_end_files(self) -> None:
        super().delete_end_files()
        for path in self.paths.end_files():
            (self.location / path.name).remove()

    def close(self) -> None:
        """Mirror the small files a last time, and release the run. If that fails, keep the spool and name it."""
        problem: str | None = "the wait for the storage was interrupted"
        try:
            if not self._is_abandoned:
                problem = self._finish_storage() if self._link is not None else None
        finally:
            if self._link is not None:
                self._link.close()
            self._release(problem)

    def _finish_storage(self) -> str | None:
        """Delete checkpoints that were not committed, and mirror the small files. Return why that failed, or None."""
        assert self._link is not None
        problems: list[str | None] = []
        uncommitted = sorted(set(self._directories.values()) - self.ledger.names)
        self._order(wire.DeleteCheckpoints(directories=uncommitted), lambda failed: None)
        self._order(wire.MirrorRecords(), problems.append)
        try:
            self._link.settle(self.announce_wait)
        except KeyboardInterrupt:
            self.abandon_pending_work()
            raise
        return next((problem for problem in problems if problem), None)

    def _release(self, problem: str | None) -> None:
        """Release the run. Delete the spool before its lock is released, because the next run may use it at once."""
        self._heartbeats.stop()
        try:
            if not self._is_abandoned:  # else the run is free when this process has ended, or some seconds later
                self._release_run_lock()
            if problem is None:
                _delete_spool(self.paths.root)
            else:
                warn(f"couldn't upload metrics, logs and the final status, which are in {self.paths.root}: {problem}")
        finally:
            super().close()

    def _release_run_lock(self) -> None:
        self._heartbeats.end()
        with contextlib.suppress(OSError, StorageError):  # the run is free when the lock has been silent for a while
            self._run_lock.release()


def local_directory_of(run: str) -> Path:
    """Return the local directory of a run: its spool if it is remote, else the run directory. Raise StorageError."""
    try:
        found = locate(run)
        return _spool_of(found) if isinstance(found, RemotePath) else found
    except OSError as error:
        raise StorageError(str(error)) from error


def _is_copy(folder: str, manifest: bytes) -> bool:
    with contextlib.suppress(ValueError):
        fields = json.loads(manifest)
        return isinstance(fields, dict) and is_copy(folder, fields)
    return False


def _warn_if_failed(complaint: str, failed: str | None) -> None:
    if failed is not None:
        warn(f"{complaint}: {failed}")


def _spool_of(run: RemotePath) -> Path:
    """Return the spool of a run: the same for every run of this name on this machine, so that a later one finds it."""
    identity = f"{type(run.filesystem).__name__} {run.url}"
    folder = own_temporary_directory("spool") / hashlib.sha256(identity.encode()).hexdigest()[:16]
    return folder / run.name


def _delete_spool(spool: Path) -> None:
    shutil.rmtree(spool, ignore_errors=True)
    with contextlib.suppress(OSError):
        spool.parent.rmdir()
