"""The coordinator's hand on a local run directory, and the only code that commits checkpoints. Runs in: coordinator.

A checkpoint is written aside, flushed to disk with its manifest, then renamed: a directory named ``checkpoint_…`` is
complete, always. What is in the directory is told in :mod:`distrain.storage.paths`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import threading
import time
import uuid
import zlib
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from distrain.checkpoint import MANIFEST_FILE, METADATA_FILE, unread
from distrain.errors import StorageError
from distrain.storage.commit import Commit, CommittedFile
from distrain.storage.files import copy_folders, cure, sync_directory, write_and_sync, write_atomically
from distrain.storage.paths import DAMAGED, RunPaths
from distrain.storage.records import (
    PENDING,
    CommittedCheckpoint,
    committed_at,
    damage_of,
    no_metadata,
    without_nonfinite,
)
from distrain.system.background import Background
from distrain.system.log import say, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain import wire
    from distrain.system.loop import Loop
    from distrain.system.remote_path import RemotePath

_RESERVED_BYTES = 64 << 10
_T = TypeVar("_T")


class _Lock:
    """The descriptor that a lock hangs on. A forked child closes it, as the lock is there until nobody has it open.

    A child that C code has forked, and that executes no program, keeps it. POSIX locks, which nobody inherits, would
    end as soon as this process closes any descriptor of the file, and keep no second run out of the same process.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        _locks.add(self)

    def release(self) -> None:
        """Once, as by then somebody else may have a descriptor of this number."""
        if self in _locks:
            _locks.remove(self)
            os.close(self.fd)


def _lock_soon(fd: int) -> None:
    """Lock the file. A reader that looks whether the run is in use holds the lock for some microseconds, so try for a
    moment. Raises BlockingIOError if another run has the lock, OSError on a file system without locks.
    """
    deadline = time.monotonic() + _LOCKING_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOCKING_S / 20)


_LOCKING_S = 0.5
_locks: set[_Lock] = set()


def _drop_locks() -> None:
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_drop_locks)


class RunStore:
    """The coordinator's hand on the run directory. Raises StorageError if it cannot be used or is in use."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        self.metadata: dict[str, Any] = {}
        """What every checkpoint is given, beside its own metadata."""
        self.failed: Callable[[str], None] = warn
        """Hears what could not be written."""
        self.is_abandoned = False
        """True once the user has ended the wait for what is under way."""
        self.is_stalled = False
        """True if that is work on files: touching one now may block as long."""
        self._background = Background(None, "storage")
        self._commits = 0
        self._lines: list[str] = []
        self._unwritten = bytearray()
        self._vanished: deque[Path] = deque()
        self._wiping: threading.Thread | None = None
        self._generation = uuid.uuid4().hex[:8]
        with contextlib.ExitStack() as undo:
            try:
                root.mkdir(parents=True, exist_ok=True)
                self._lock = self._take_lock()
                undo.callback(self._lock.release)
                self._take(undo)
                self._metrics_fd = _open_lines(self.paths.metrics)
                undo.callback(os.close, self._metrics_fd)
                self._reserve()
                self._place = root.stat()
                self._sweep()
                self._probe()
                self._next_index, self.committed = self._find()
            except OSError as error:
                raise StorageError(f"cannot use the run directory {self.place}: {error}") from error
            undo.pop_all()

    # -- where it is ----------------------------------------------------------------------------------------------

    is_elsewhere = False
    """Whether checkpoints are brought by uploaders, under names in the run directory."""
    is_of_this_process = False
    """Whether only this process can reach it."""

    @property
    def place(self) -> Path | RemotePath:
        """The run directory, as users know it."""
        return self.paths.root

    @property
    def storage_path(self) -> str:
        """What the run directory is in."""
        return str(self.paths.root.parent)

    @property
    def filesystem(self) -> str:
        """What that is on, for other processes (see :func:`distrain.system.remote_path.encode_filesystem`)."""
        return ""

    def shown(self, path: Path) -> str:
        """Where users find this file of the run."""
        return str(path)

    # -- opening --------------------------------------------------------------------------------------------------

    def _take(self, undo: contextlib.ExitStack) -> None:
        """What else is to be done before the files are looked at. Raises OSError, StorageError."""

    def _probe(self) -> None:
        """Raises OSError if nothing can be written, read or deleted, before a training finds out."""
        probe = self.paths.root / ".probe"
        probe.write_bytes(b"distrain")
        if probe.read_bytes() != b"distrain":
            raise OSError(errno.EIO, "what was written does not come back", str(probe))
        probe.unlink()

    def _find(self) -> tuple[int, list[CommittedCheckpoint]]:
        """The number of the next checkpoint, and those that there are."""
        intact = self._intact()
        return self.paths.next_index(), intact

    def _take_lock(self) -> _Lock:
        lock = _Lock(os.open(self.paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        try:
            _lock_soon(lock.fd)
        except BlockingIOError:
            holder = os.read(lock.fd, 64).decode(errors="replace").strip()
            lock.release()
            raise StorageError(
                f"another run (process {holder or 'unknown'}) is using {self.place}; "
                "wait for it, or give this run another name (RunConfig.name, --name)"
            ) from None
        except OSError:  # a file system without locks: then nobody can be told apart
            return lock
        try:
            os.ftruncate(lock.fd, 0)
            os.write(lock.fd, f"{os.getpid()}\n".encode())
        except OSError:  # a full disk
            lock.release()
            raise
        return lock

    def _sweep(self) -> None:
        """Half-written checkpoints and half-done deletions of earlier runs: nobody can be writing them now."""
        shutil.rmtree(self.paths.staging, ignore_errors=True)

    def _intact(self) -> list[CommittedCheckpoint]:
        """The checkpoints of an earlier part of the run, without those that were damaged since. All bytes of the latest
        are looked at, since the run goes on from it; of the others, the manifest.
        """
        found: list[CommittedCheckpoint] = []
        damaged: list[str] = []
        for path in reversed(self.paths.checkpoints()):
            try:
                damage = damage_of(path, thoroughly=not found)
            except OSError as error:
                raise StorageError(f"cannot read the checkpoint {path}: {error}") from error
            if damage is None:
                found.append(committed_at(path))
            else:
                aside = self._free(f"{DAMAGED}{path.name}")
                path.rename(aside)
                damaged.append(f"{path} is damaged: {damage}; it is called {aside.name} from now on")
        for text in damaged:
            warn(text)
        return found[::-1]

    def close(self) -> None:
        """Release the directory. Nothing may be under way, unless the storage is abandoned."""
        try:
            if not self.is_stalled:
                self.flush()
                if self._wiping is not None:
                    self._wiping.join()
                shutil.rmtree(self.paths.staging, ignore_errors=True)
                with contextlib.suppress(OSError):  # it has become read-only; the next run uses it again
                    self.paths.reserve.unlink(missing_ok=True)
                os.close(self._metrics_fd)
        finally:
            if not self.is_stalled:  # else it is held until the process ends, as a thread may still write
                self._lock.release()

    def drop_end(self) -> None:
        """Delete what an earlier, failed part of this run left as its end. Raises OSError."""
        for path in self.paths.end():
            path.unlink(missing_ok=True)

    # -- work in the background -----------------------------------------------------------------------------------

    def start(self, loop: Loop | None, background: Background, run_id: str, flags: Sequence[str]) -> None:
        """Begin the run. From now on ``background`` does the work on files, in order, and ``loop``, if there is one,
        reads what other processes answer. ``flags``: of the interpreter.
        """
        self._background = background

    def detach(self) -> None:
        """End the use of the loop and of the background: whatever is ordered now is done at once."""
        self._background = Background(None, "storage")

    def _do(self, what: str, work: Callable[[], _T], then: Callable[[_T], None] | None = None) -> None:
        """Do work on files. If that is not possible, the run fails: "cannot write {what} in ..."."""
        self._background.do(work, then, lambda error: self._not_written(what, error))

    def _not_written(self, what: str, error: OSError) -> None:
        self._fail(f"cannot write {what} in {self.place}: {error}{cure(str(error))}")

    def _try(self, complaint: str, work: Callable[[], object]) -> None:
        """Do work on files that a run can do without. If that is not possible, only say so."""
        self._background.do(work, None, lambda error: warn(f"{complaint}: {error}"))

    def _fail(self, why: str) -> None:
        self.failed(why)

    def _warn(self, text: str) -> None:
        """Warn from within background work."""
        self._background.report(lambda: warn(text))

    @property
    def settled(self) -> bool:
        """True unless a checkpoint is being committed."""
        return not self._commits

    @property
    def idle(self) -> bool:
        """True if nothing at all is under way."""
        return not self._background.pending

    def settle(self) -> None:
        """Wait until nothing is under way, without a loop."""

    def abandon(self) -> None:
        """Stop waiting for what is under way: it may or may not arrive."""
        self.is_abandoned, self.is_stalled = True, self._background.pending > 0

    def tell_wait(self) -> None:
        """Say what is under way, as it takes its time."""
        say(f"waiting for {self.place} to take what has not been written yet; Ctrl-C ends the waiting")

    # -- small files ----------------------------------------------------------------------------------------------

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write run.json now. Raises OSError."""
        self._write_manifest(manifest)
        self._manifest_written()

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        self._check_place()
        write_atomically(self.paths.manifest, json.dumps(manifest, indent=1).encode())

    def _manifest_written(self) -> None:
        """Hear that run.json has changed."""

    def keep_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Have run.json written."""
        self._do("run.json", lambda: self._write_manifest(manifest), lambda _: self._manifest_written())

    def make_room(self, path: Path) -> None:
        """Have the directory made that ``path``, a file of the run, belongs in."""
        self._do(path.name, lambda: self.paths.make_room(path))

    def open_log(self, path: Path, then: Callable[[IO[bytes]], None], failed: Callable[[OSError], None]) -> None:
        """Call ``then`` with the file, empty and open for writing, or ``failed`` with an OSError."""

        def work() -> IO[bytes]:
            self.paths.make_room(path)
            return path.open("wb")

        self._background.do(work, then, failed)

    def keep(self, path: Path, data: bytes, what: str) -> None:
        """Have a file of the run written that it can do without; readers never see a part of it."""

        def write() -> None:
            self.paths.make_room(path)
            write_atomically(path, data, sync=False)

        self._try(what, write)

    def remove(self, path: Path) -> None:
        """Have a file of the run deleted."""
        self._try(f"{path} could not be deleted", lambda: path.unlink(missing_ok=True))

    def append_metrics(self, line: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Add one report, to be written at the next :meth:`flush`. Non-finite numbers become null, and ``nonfinite``
        says which they were.
        """
        finite, nonfinite = without_nonfinite(metrics)
        record = {**line, "metrics": finite, **({"nonfinite": nonfinite} if nonfinite else {})}
        self._lines.append(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")

    def flush(self, then: Callable[[object], None] | None = None) -> None:
        """Have the reports written that were added, then call ``then``."""
        if self._lines or then is not None:
            data = "".join(self._lines).encode()
            self._lines = []
            self._do("metrics", lambda: self._append(data), then)

    def _append(self, data: bytes) -> None:
        """Write lines, after those that a full disk did not take."""
        self._unwritten += data
        self._check_place()
        while self._unwritten:
            del self._unwritten[: os.write(self._metrics_fd, self._unwritten)]

    def write_end(self) -> None:
        """Write what a full disk did not take, now that the run is over and its staging directory can go. Raises
        OSError.
        """
        shutil.rmtree(self.paths.staging, ignore_errors=True)
        self.paths.reserve.unlink(missing_ok=True)
        self._append(b"")

    def _reserve(self) -> None:
        """Occupy the space that the end of a run needs on a disk that has become full. Raises OSError."""
        with self.paths.reserve.open("wb") as file:
            file.write(bytes(_RESERVED_BYTES))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def latest(self) -> CommittedCheckpoint | None:
        return self.committed[-1] if self.committed else None

    def staging_directory(self, attempt: int, ordinal: int, rank: int) -> Path:
        """Where a rank writes its part of a checkpoint; the generation keeps ranks of earlier runs out."""
        self._check_place()
        folder = self._staging_root(attempt, ordinal) / f"rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _check_place(self) -> None:
        """Raises OSError if the run directory was unmounted, moved or deleted: the run must not go on in a new one."""
        if not os.path.samestat(self.paths.root.stat(), self._place):
            raise OSError(errno.ESTALE, "the run directory is not the one any more that the run began in")

    def _staging_root(self, attempt: int, ordinal: int) -> Path:
        return self.paths.staging / f"{self._generation}-{attempt}-{ordinal}"

    def prepare(self, attempt: int, ordinal: int, rank: int, *, name: str | None, then: Callable[[str], None]) -> None:
        """Call ``then`` with the directory for a rank's files of the checkpoint that is to be called ``name``."""
        self._do(f"checkpoint {ordinal}", lambda: str(self.staging_directory(attempt, ordinal, rank)), then)

    def commit(
        self,
        attempt: int,
        commit: Commit,
        *,
        name: str | None = None,
        folder: str | None = None,
        validation: Mapping[str, Any] | None = None,
        then: Callable[[CommittedCheckpoint], None],
    ) -> None:
        """Make the ranks' files the run's next checkpoint, and call ``then`` when it is one: join their parts in a
        directory of that ``name``, if it is free, or take the ``folder`` of the run directory that they are in already.
        """

        def work() -> CommittedCheckpoint:
            if folder:
                return self._adopt(attempt, commit, Path(folder), validation)
            return self._join(attempt, commit, name, validation)

        def done(saved: CommittedCheckpoint) -> None:
            self._commits -= 1
            self.committed.append(saved)
            then(saved)

        def failed(error: OSError) -> None:
            self._commits -= 1
            self._not_written(f"checkpoint {commit.ordinal}", error)

        self._commits += 1
        self._background.do(work, done, failed)

    def _join(
        self, attempt: int, commit: Commit, name: str | None, validation: Mapping[str, Any] | None
    ) -> CommittedCheckpoint:
        self._check_place()
        root = self._staging_root(attempt, commit.ordinal)
        merged = root / "merged"
        merged.mkdir()
        for file in commit.files:
            target = merged / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            (root / f"rank_{file.rank}" / file.path).rename(target)
        for part in sorted(root.glob("rank_*")):
            copy_folders(part, merged)
        name = name or self.paths.checkpoint(self._next_index).name
        final = self._free(name)
        if final.name != name:
            self._warn(f"there is a {name} in {self.paths.root} already; this checkpoint is called {final.name}")
        write_and_sync(merged / MANIFEST_FILE, self._manifest_with_metadata(attempt, commit, merged, final, validation))
        _sync_directories(merged, commit)
        merged.rename(final)
        saved = self._committed(final, commit, validation)
        shutil.rmtree(root, ignore_errors=True)
        return saved

    def _adopt(
        self, attempt: int, commit: Commit, folder: Path, validation: Mapping[str, Any] | None
    ) -> CommittedCheckpoint:
        self._check_place()
        _sync_directories(folder, commit)
        write_atomically(
            folder / MANIFEST_FILE, self._manifest_with_metadata(attempt, commit, folder, folder, validation)
        )
        sync_directory(folder)
        return self._committed(folder, commit, validation)

    def _committed(self, path: Path, commit: Commit, validation: Mapping[str, Any] | None) -> CommittedCheckpoint:
        sync_directory(self.paths.root)
        self._next_index += 1
        return CommittedCheckpoint(path, dict(commit.metrics), _validation_of(validation), index=self._next_index - 1)

    def amend(self, saved: CommittedCheckpoint, status: str, metrics: Mapping[str, Any]) -> None:
        """Note what came of the validation of a checkpoint, and add the metrics to its own."""
        position = self.committed.index(saved)
        metrics = {**saved.metrics, **metrics}
        validation = {**(saved.validation or {}), "status": status}
        self.committed[position] = replace(saved, metrics=metrics, validation=validation)
        finite, nonfinite = without_nonfinite(metrics)
        fields = {"metrics": finite, "nonfinite": nonfinite, "validation": self.committed[position].validation}
        self._amend_manifest(saved, fields)

    def _amend_manifest(self, saved: CommittedCheckpoint, fields: Mapping[str, Any]) -> None:
        def work() -> None:
            assert isinstance(saved.path, Path)
            path = saved.path / MANIFEST_FILE
            try:
                manifest = {**json.loads(path.read_text()), **fields}
            except (ValueError, TypeError) as error:
                raise OSError(errno.EIO, f"it is damaged ({error})", str(path)) from error
            write_atomically(path, json.dumps(manifest, indent=1).encode())

        self._try(f"the result of the validation of {saved.path.name} could not be written", work)

    def _free(self, name: str) -> Path:
        path, number = self.paths.root / name, 1
        while path.exists():
            number += 1
            path = self.paths.root / f"{name}-{number}"
        return path

    def _manifest_with_metadata(
        self, attempt: int, commit: Commit, folder: Path, final: Path, validation: Mapping[str, Any] | None
    ) -> bytes:
        """Of a checkpoint that is in this folder, and will be in its final one."""
        commit = replace(commit, files=tuple(self._with_metadata(folder, commit.files, final)))
        return json.dumps(self._manifest(attempt, commit, final.name, validation), indent=1).encode()

    def _manifest(
        self, attempt: int, commit: Commit, name: str, validation: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        finite, nonfinite = without_nonfinite(commit.metrics)
        return {
            "name": name,
            "index": self._next_index,
            "attempt": attempt,
            "time": time.time(),
            "ranks": list(commit.ranks),
            "metrics": finite,
            "nonfinite": nonfinite,
            "validation": _validation_of(validation),
            "files": {f.path: {"size": f.size, "crc32": f"{f.crc32:08x}", "rank": f.rank} for f in commit.files},
        }

    def _with_metadata(self, folder: Path, files: Sequence[CommittedFile], final: Path) -> Sequence[CommittedFile]:
        """Add the run's metadata to the checkpoint's own, which come first."""
        if not self.metadata:
            return files
        path = folder / METADATA_FILE
        try:
            own = json.loads(path.read_text()) if path.exists() else {}
        except ValueError:
            own = None
        if not isinstance(own, dict):
            self._warn(no_metadata(final))
            return files
        data = json.dumps({**self.metadata, **own}).encode()
        write_and_sync(path, data)
        added = CommittedFile(METADATA_FILE, 0, len(data), zlib.crc32(data))
        return [*(file for file in files if file.path != METADATA_FILE), added]

    def delete(self, positions: Sequence[int]) -> None:
        """Delete checkpoints, given by their positions in ``committed``. One that somebody reads stays."""
        if not positions:
            return
        chosen = [self.committed.pop(position) for position in sorted(positions, reverse=True)]

        def done(kept: list[CommittedCheckpoint]) -> None:
            self.committed = sorted([*self.committed, *kept], key=lambda saved: saved.index)

        self._background.do(lambda: self._delete(chosen), done)

    def _delete(self, chosen: Sequence[CommittedCheckpoint]) -> list[CommittedCheckpoint]:
        """Make each vanish at once, by a rename. Returns those that are still there, as somebody reads them."""
        kept = []
        for saved in chosen:
            assert isinstance(saved.path, Path)
            aside = self.paths.staging / f"deleted-{saved.path.name}-{uuid.uuid4().hex[:8]}"
            try:
                self.paths.staging.mkdir(exist_ok=True)
                with unread(saved.path) as free:
                    if free:
                        saved.path.rename(aside)
                        self._vanished.append(aside)
                    else:
                        kept.append(saved)
            except OSError as error:
                kept.append(saved)
                self._warn(f"a superfluous checkpoint could not be deleted: {error}")
        self._wipe()
        return kept

    def _wipe(self) -> None:
        """Free the space of what has vanished in a thread of its own, so that later commits need not wait (0.2 s per GB
        on ext4). What it overlooks as it ends is for the next one, or for :meth:`close`.
        """
        if not self._vanished or (self._wiping is not None and self._wiping.is_alive()):
            return
        wiping = threading.Thread(target=_delete_all, args=[self._vanished], name="distrain-delete", daemon=True)
        try:
            wiping.start()
            self._wiping = wiping
        except RuntimeError:  # as many threads as the user may have
            _delete_all(self._vanished)

    def for_workers(self, saved: CommittedCheckpoint) -> str:
        """The path or URL by which other processes can read it. Raises OSError, CheckpointError."""
        return str(saved.path)

    # -- what is done by others -----------------------------------------------------------------------------------

    def opening(self) -> wire.OpenStorage | None:
        """What the uploaders of all hosts have to know before anything is stored."""
        return None

    def upload(self, order: wire.Upload, then: Callable[[wire.Message], None]) -> None:
        """Store a rank's files from within this process, and call ``then`` with the answer."""
        raise AssertionError(f"nobody can store {order.source} while train_func goes on")


def _delete_all(folders: deque[Path]) -> None:
    while folders:
        shutil.rmtree(folders.popleft(), ignore_errors=True)


def _sync_directories(root: Path, commit: Commit) -> None:
    for folder in {Path(), *(parent for file in commit.files for parent in Path(file.path).parents)}:
        sync_directory(root / folder)


def _open_lines(path: Path) -> int:
    """Open for appending, without the torn last line that a power cut may have left; returns the descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    end = size = os.lseek(fd, 0, os.SEEK_END)
    while end and os.pread(fd, 1, end - 1) != b"\n":
        end -= 1
    if end < size:
        os.ftruncate(fd, end)
    return fd


def _validation_of(asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if asked is None else {**asked, "status": PENDING}
