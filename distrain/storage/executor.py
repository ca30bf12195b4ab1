"""Does what the coordinator orders: brings a rank's files, publishes and deletes checkpoints, mirrors the spool.

Runs in: uploader; coordinator, for storage that no other process can reach, or if it has no workers.
"""

from __future__ import annotations

import contextlib
import json
import uuid
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distrain import wire
from distrain.checkpoint import DELETED, MANIFEST_FILE, METADATA_FILE, PENDING_FILE
from distrain.errors import DistrainError
from distrain.storage.file_transfer import file_copier
from distrain.storage.files import copy_folders, crc32_of, list_files, sync_file
from distrain.storage.paths import RunPaths
from distrain.storage.records import no_metadata
from distrain.storage.run_lock import RunLock
from distrain.system.log import warn
from distrain.system.remote_path import OPENING_PATIENCE_S, RemotePath, decode_filesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distrain.storage.file_transfer import Files


class StorageExecutor:
    """Does what the coordinator orders, one order after the other, and says what came of it. Raises nothing."""

    def __init__(self, run: RemotePath | None = None, tell: Callable[[str], None] = warn) -> None:
        """``tell`` hears what the user should read, but is no failure."""
        self._run = run
        self._tell = tell
        self._opened: wire.OpenStorage | None = None
        self._mirrored: dict[str, tuple[int, int]] = {}

    def do(self, order: wire.Message) -> wire.Message:
        """The answer to an order."""
        try:
            match order:
                case wire.OpenStorage():
                    self._open(order)
                    return wire.StorageOpened()
                case wire.Upload():
                    return self._bring(order)
                case wire.PublishCheckpoint():
                    self._publish(order)
                case wire.UpdateManifest():
                    self._amend(order)
                case wire.DeleteCheckpoints():
                    self._remove(order)
                case wire.MirrorRecords():
                    self.mirror()
                case _:
                    raise AssertionError(f"not an order: {order!r:.200}")
            return wire.OrderDone(token=order.token)
        except Exception as error:  # who waits for the answer must get one, whatever a filesystem comes up with
            return wire.failed_answer(order, _why(order, error))

    def _open(self, order: wire.OpenStorage) -> None:
        """See whether we can write, read and delete there. Raises OSError."""
        self._run = self._run or RemotePath(order.url, decode_filesystem(order.filesystem))
        self._opened = order
        run = self._run if order.again else replace(self._run, patience_s=OPENING_PATIENCE_S)
        probe = run / f".probe-{uuid.uuid4().hex}"
        probe.write(b"distrain")
        if probe.read() != b"distrain":
            raise OSError(f"what was written to {probe} does not come back")
        probe.remove()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _bring(self, order: wire.Upload) -> wire.Message:
        source = Path(order.source)
        if not order.source:
            return self._look_at(order)
        try:
            if self._run is None:
                copy_folders(source, Path(order.directory))
            take = file_copier(source, Path(order.directory)) if self._run is None else self._put(order)
            files = _each(take, order.files)
            skipped = _each(lambda path: crc32_of(source / path), order.others)
        except Exception as error:
            return wire.failed_answer(order, f"{_why(order, error)}; what could not be stored is in {order.source}")
        return wire.FilesCopied(
            attempt=order.attempt, rank=order.rank, ordinal=order.ordinal, files=files, skipped=skipped
        )

    def _look_at(self, order: wire.Upload) -> wire.Message:
        """What is in a directory that the ranks have filled themselves."""
        if self._run is None:
            folder = Path(order.directory)
            files = _each(lambda path: sync_file(folder / path), [path for path, _ in list_files(folder)])
        else:
            target = self._mark(order)
            names = sorted(target.files().keys() - {MANIFEST_FILE, PENDING_FILE})
            files = _each(lambda path: (target / path).crc32(), names)
        return wire.FilesCopied(attempt=order.attempt, rank=order.rank, ordinal=order.ordinal, files=files, skipped=[])

    def _mark(self, order: wire.Upload) -> RemotePath:
        """Its directory elsewhere, marked as incomplete."""
        assert self._run is not None
        target = self._run / order.directory
        (target / PENDING_FILE).write(json.dumps({"attempt": order.attempt, "ordinal": order.ordinal}).encode())
        return target

    def _put(self, order: wire.Upload) -> Callable[[str], tuple[int, int]]:
        """Bring the files to a directory elsewhere, which is marked as incomplete first; returns what hashes them."""
        target, source = self._mark(order), Path(order.source)
        if len(order.files) > 1:
            target.put_all(source, order.files)
        elif order.files:  # which may go in parts
            target.put(source / order.files[0], order.files[0])
        return lambda path: crc32_of(source / path)

    def _publish(self, order: wire.PublishCheckpoint) -> None:
        """Look whether all files are there, and write the manifest, which makes them a checkpoint."""
        run = self._owned_run()
        target = run / order.directory
        manifest = {**order.manifest, "files": dict(order.manifest["files"])}
        if order.metadata:
            self._add_metadata(target, order.metadata, manifest["files"])
        present = target.files()
        for name, fact in manifest["files"].items():
            size, version = present.get(name, (None, ""))
            if size != fact["size"]:
                found = "is missing" if size is None else f"has {size} bytes instead of {fact['size']}"
                raise OSError(f"{target / name} {found}, although it was stored")
            if version:
                fact["version"] = version
        (target / MANIFEST_FILE).write(json.dumps(manifest, indent=1).encode())
        with contextlib.suppress(OSError):  # next time, then
            (target / PENDING_FILE).remove()

    def _add_metadata(
        self, target: RemotePath, metadata: dict[str, object], files: dict[str, dict[str, object]]
    ) -> None:
        """The run's, beside the checkpoint's own, which come first."""
        try:
            own = json.loads((target / METADATA_FILE).read()) if METADATA_FILE in files else {}
        except ValueError:
            own = None
        if not isinstance(own, dict):
            self._tell(no_metadata(target))
            return
        data = json.dumps({**metadata, **own}).encode()
        (target / METADATA_FILE).write(data)
        files[METADATA_FILE] = {"size": len(data), "crc32": f"{zlib.crc32(data):08x}", "rank": 0}

    def _amend(self, order: wire.UpdateManifest) -> None:
        manifest = self._owned_run() / order.directory / MANIFEST_FILE
        manifest.write(json.dumps({**json.loads(manifest.read()), **order.fields}, indent=1).encode())

    def _remove(self, order: wire.DeleteCheckpoints) -> None:
        """The manifest goes first: what is half deleted is no checkpoint."""
        run = self._owned_run()
        for name in order.directories:
            (run / name / PENDING_FILE).write(DELETED)
            (run / name / MANIFEST_FILE).remove()
            for entry in (run / name).names():
                if entry != PENDING_FILE:
                    (run / name / entry).remove()
            (run / name).remove()  # with the marker, so that what a kill leaves is swept

    def _owned_run(self) -> RemotePath:
        """Raises StorageError if another coordinator has taken the run over."""
        assert self._run is not None
        assert self._opened is not None
        if self._opened.lock:
            RunLock.from_text(self._run, self._opened.lock).check()
        return self._run

    # -- the rest of the run directory ----------------------------------------------------------------------------

    def mirror(self) -> None:
        """Bring what has changed in the spool since the last time. Raises OSError, StorageError."""
        run = self._owned_run()
        assert self._opened is not None
        spool = Path(self._opened.spool)
        for path in RunPaths(spool).mirrored():
            name = str(path.relative_to(spool))
            with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
                state = (path.stat().st_mtime_ns, path.stat().st_size)
                if self._mirrored.get(name) != state:
                    run.put(path, name)
                    self._mirrored[name] = state

    def beat(self) -> None:
        """Show that the run is alive. Raises OSError, StorageError."""
        assert self._run is not None
        assert self._opened is not None
        RunLock.from_text(self._run, self._opened.lock).beat()


def _each(take: Callable[[str], tuple[int, int]], paths: Iterable[str]) -> Files:
    return [(path, *take(path)) for path in paths]


def _why(order: wire.Message, error: Exception) -> str:
    if isinstance(error, (OSError, DistrainError)):
        return str(error)
    return f"{type(order).__name__}: {type(error).__name__}: {error}"
