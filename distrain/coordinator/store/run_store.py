"""The coordinator's access to a run directory, local or remote. Runs in: coordinator.

Only :class:`RunStore` publishes and deletes checkpoints. Workers and uploaders add files. An uploader writes a manifest
or deletes a directory only when the coordinator orders it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

from distrain.decisions.checkpoints.actions import Delete, MakeDirectory, Publish, Record, UpdateManifest
from distrain.decisions.checkpoints.ledger import Ledger
from distrain.decisions.hearing import does
from distrain.errors import StorageError
from distrain.storage.files import write_atomically
from distrain.storage.ownership import check_owners, open_without_links
from distrain.storage.paths import RunPaths
from distrain.storage.run_lock import LocalLock
from distrain.system.background import Background
from distrain.system.log import say, warn
from distrain.system.text import advice_on, is_full_disk, without_errno, without_nonfinite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from distrain import wire
    from distrain.system.loop import Loop
    from distrain.system.remote_path import RemotePath

_RESERVED_BYTES = 64 << 10
"""Disk space that a run keeps for its end."""
_LINE_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_T = TypeVar("_T")


class RunDirectory:
    """A local directory that this process has locked: the run directory, or the spool of a remote one.

    Methods raise OSError.
    """

    def __init__(self, paths: RunPaths, run: object) -> None:
        """Make and lock the directory. Raise StorageError if a stranger owns it, or another process uses ``run``."""
        self._paths = paths
        paths.root.mkdir(parents=True, exist_ok=True)
        check_owners(paths.root)
        self._status = paths.root.stat()
        self._lock = LocalLock(paths.lock, run)
        self._metrics = _LineFile(paths.metrics)
        self._events = _LineFile(paths.events)

    def open(self) -> None:
        """Open the files of lines, reserve disk space, and delete what an earlier run was writing when it died."""
        self._metrics.open()
        self._events.open()
        shutil.rmtree(self._paths.staging, ignore_errors=True)
        try:
            self._reserve()
        except OSError as error:
            if is_full_disk(str(error)):  # a part of it would take the last space
                self._paths.reserve.unlink(missing_ok=True)
            raise

    def _reserve(self) -> None:
        """Write the reserve, and read it, so that a storage that cannot do that fails before the training begins."""
        content = os.urandom(_RESERVED_BYTES)  # no file system can compress it
        with open(self._paths.reserve, "wb+", opener=open_without_links) as file:
            file.write(content)
            file.seek(0)
            if file.read() != content:
                raise OSError(errno.EIO, "a file read back different bytes than were written", str(self._paths.reserve))

    def check_same(self) -> None:
        """Raise OSError if the directory was unmounted, moved or deleted, so that no run continues in a new one."""
        if not os.path.samestat(self._paths.root.stat(), self._status):
            raise OSError(errno.ESTALE, "the run directory was replaced during the run")

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace run.json."""
        self.check_same()
        write_atomically(self._paths.manifest, json.dumps(manifest, indent=1).encode())

    def append_lines(self, metrics: bytes, events: bytes) -> None:
        """Append lines to the metrics and to the events, after those that a full disk did not take."""
        self._metrics.unwritten += metrics
        self._events.unwritten += events
        self.check_same()
        self._metrics.write()
        self._events.write()

    def clear(self) -> None:
        """Delete the files that only a running coordinator needs. Their space is for what a run writes at its end."""
        shutil.rmtree(self._paths.staging, ignore_errors=True)
        with contextlib.suppress(OSError):  # the directory has become read-only; the next run replaces the file
            self._paths.reserve.unlink(missing_ok=True)

    def release(self) -> None:
        """Close the files of lines, and release the lock."""
        self._metrics.close()
        self._events.close()
        self._lock.release()


class _LineFile:
    """A file that lines are appended to. ``unwritten``: lines that :meth:`write` writes. Methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self.unwritten = bytearray()
        self._path = path
        self._fd = -1

    def open(self) -> None:
        """Open the file, and cut off a torn last line, which a power cut may leave."""
        self._fd = open_without_links(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        end = size = os.lseek(self._fd, 0, os.SEEK_END)
        while end and os.pread(self._fd, 1, end - 1) != b"\n":
            end -= 1
        if end < size:
            os.ftruncate(self._fd, end)

    def write(self) -> None:
        """Write the lines. Those that a full disk does not take stay for the next call."""
        while self.unwritten:
            del self.unwritten[: os.write(self._fd, self.unwritten)]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RunStore(ABC):
    """A run directory that the coordinator has locked.

    Small files are written to a local directory, ``paths``. Work on files is done in the background, in order. If it
    fails, the run ends, unless the run can do without the file.
    """

    is_remote = False
    """True if uploaders store the checkpoints, in directories that the coordinator names."""
    filesystem = ""
    """The filesystem of ``storage_path`` as text for other processes, or "" (see :func:`encode_filesystem`)."""

    def __init__(self, location: Path | RemotePath, directory: Path) -> None:
        """``location``: the run directory as users know it. ``directory``: the local directory for small files."""
        self.location = location
        self.paths = RunPaths(directory)
        self.metadata: dict[str, Any] = {}
        """The run's metadata, which is added to that of every checkpoint."""
        self.on_failure: Callable[[str], None] = warn
        """Called with the reason when something could not be written."""
        self.ledger = Ledger()
        """The checkpoints that are kept: at first those of earlier parts of the run."""
        self.is_stalled = False
        """True if work on files was abandoned: touching a file may block as long."""
        self._background = Background(None, "storage")
        self.directory: RunDirectory
        """The local directory for small files."""
        self._metrics: list[str] = []
        self._events: list[str] = []
        """Lines that the next :meth:`flush` writes."""

    def display_path(self, path: Path) -> str:
        """Return the path or URL under which users find a file of the run."""
        is_inside = path.is_relative_to(self.paths.root)
        return str(self.location / str(path.relative_to(self.paths.root)) if is_inside else path)

    # -- opening and closing --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opening(self) -> Iterator[contextlib.ExitStack]:
        """Lock the local directory. If the context fails, undo it and what is on the stack, and raise StorageError."""
        with contextlib.ExitStack() as undo:
            try:
                self.directory = RunDirectory(self.paths, self.location)
                undo.callback(self.directory.release)
                yield undo
            except OSError as error:
                hint = advice_on(str(error))
                raise StorageError(
                    f"cannot use the run directory {self.location}: {without_errno(error)}{hint}"
                ) from error
            undo.pop_all()

    def delete_end_files(self) -> None:
        """Delete the files in which an earlier, failed part of this run noted its end. Raise OSError."""
        for path in self.paths.end_files():
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the directory. No work may be pending, unless it was abandoned."""
        if self.is_stalled:  # a thread may still write: the lock is held until the process ends
            return
        try:
            self.flush()
            self.directory.clear()
        finally:
            self.directory.release()

    # -- work in the background -----------------------------------------------------------------------------------

    def start(self, loop: Loop, background: Background, run_id: str, flags: Sequence[str]) -> None:
        """Begin the run: do all further work on files in ``background``, in order.

        loop: reads what other processes answer.
        flags: options of the interpreter for other processes.
        """
        self._background = background

    def detach(self) -> None:
        """Stop using the loop and the background. Later work is done at once."""
        self._background = Background(None, "storage")

    def _do(self, what: str, work: Callable[[], _T], then: Callable[[_T], None] | None = None) -> None:
        """Do work on files, then call ``then`` with its result. The run fails if the work does."""
        self._background.do(work, then, lambda error: self._cannot_write(what, error))

    def _do_optional(self, complaint: str, work: Callable[[], object]) -> None:
        """Do work on files that the run can do without. Warn if it fails."""
        self._background.do(work, None, lambda error: warn(f"{complaint}: {error}"))

    def _cannot_write(self, what: str, why: object) -> None:
        self._fail(f"cannot write {what} in {self.location}: {why}{advice_on(str(why))}")

    def _fail(self, why: str) -> None:
        self.on_failure(why)

    def _warn_from_background(self, text: str) -> None:
        self._background.report(lambda: warn(text))

    @property
    def is_idle(self) -> bool:
        """True if no work is pending."""
        return not self._background.pending

    def abandon_pending_work(self) -> None:
        """Stop waiting for pending work, which may or may not be completed."""
        self.is_stalled = self._background.pending > 0

    def announce_wait(self) -> None:
        """Tell the user that the run waits for its storage."""
        say(f"waiting for the storage, {self.location}; press Ctrl-C to stop waiting")

    # -- small files ----------------------------------------------------------------------------------------------

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write run.json now. Raise OSError."""
        self.directory.write_manifest(manifest)
        self._mirror_records()

    def write_manifest_later(self, manifest: Mapping[str, Any]) -> None:
        """Write run.json in the background."""
        self._do("run.json", lambda: self.directory.write_manifest(manifest), lambda _: self._mirror_records())

    def _mirror_records(self) -> None:  # noqa: B027 - only remote storage has a second copy
        """Have the small files copied to remote storage now."""

    def make_parent(self, path: Path) -> None:
        """Make the directory of a file of the run."""
        self._do(path.name, lambda: self.paths.make_parent(path))

    def write_optional_file(self, path: Path, data: bytes, complaint: str) -> None:
        """Write a file that the run can do without. Readers never see a part of it."""

        def write() -> None:
            self.paths.make_parent(path)
            write_atomically(path, data, sync=False)

        self._do_optional(complaint, write)

    def delete_file(self, path: Path, then: Callable[[], None] = lambda: None) -> None:
        """Delete a file of the run that it can do without, and call ``then``."""

        def failed(error: OSError) -> None:
            warn(f"{path} could not be deleted: {error}")

        self._background.do(lambda: path.unlink(missing_ok=True), lambda _: then(), failed)

    def append_metrics(self, line: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Add one report, which the next :meth:`flush` writes.

        Non-finite numbers become null. The field ``nonfinite`` has their values.
        """
        finite, nonfinite = without_nonfinite(metrics)
        record = {**line, "metrics": finite, **({"nonfinite": nonfinite} if nonfinite else {})}
        self._metrics.append(_LINE_JSON.encode(record) + "\n")

    @does(Record)
    def record(self, happened: Record) -> None:
        """Add a line about a checkpoint."""
        self.append_event(happened.event, **happened.fields)

    def append_event(self, event: str, **fields: Any) -> None:
        """Add a line about what has happened, which the next :meth:`flush` writes. ``event``: its kind."""
        self._events.append(_LINE_JSON.encode({"time": time.time(), "event": event, **fields}) + "\n")

    def secure_records(self) -> None:
        """Store the small files that are only on this machine. The run fails if that is impossible."""
        self.flush()

    def flush(self, then: Callable[[object], None] | None = None) -> None:
        """Write the added reports and events, then call ``then``."""
        if self._metrics or self._events or then is not None:
            metrics, events = "".join(self._metrics).encode(), "".join(self._events).encode()
            self._metrics, self._events = [], []
            self._do("metrics", lambda: self.directory.append_lines(metrics, events), then)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def verify(self, thread: Background, *, is_needed: Callable[[], bool], then: Callable[[int], None]) -> None:
        """Make sure that the latest checkpoint is intact, then call ``then`` with the number of those that are not.

        Damaged ones are set aside with a warning. Nothing may be committed meanwhile. A store that has verified its
        checkpoints when it was opened has nothing to do here.
        thread: does the reading.
        is_needed: once it returns False, the reading ends early with an error.
        Raise StorageError, in the loop's thread, if a checkpoint cannot be read or set aside.
        """
        then(0)

    def new_name(self, index: int) -> str:
        """Return a name for the checkpoint with this number, for which the user has none. It is given only once."""
        return self.paths.checkpoint(index).name

    @does(MakeDirectory)
    @abstractmethod
    def prepare(self, new: MakeDirectory) -> None:
        """Make the directory for the files of a checkpoint."""

    @does(Publish)
    @abstractmethod
    def publish(self, new: Publish) -> None:
        """Write the metadata, then the manifest. Call ``new.done`` with the checkpoint's path, or ``new.failed``."""

    @does(UpdateManifest)
    @abstractmethod
    def update_manifest(self, new: UpdateManifest) -> None:
        """Replace fields of a checkpoint's manifest. Warn if that fails."""

    @does(Delete)
    @abstractmethod
    def delete(self, surplus: Delete) -> None:
        """Delete checkpoints. Warn if that fails."""

    # -- work of other processes ----------------------------------------------------------------------------------

    def open_order(self) -> wire.OpenStorage | None:
        """Return the first order for the uploaders of all hosts, or None."""
        return None
