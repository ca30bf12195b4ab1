"""A checkpoint in a directory that other programs use, too: the files that this rank wrote there. Runs in: worker.

Sources: fanotify(7) and fanotify_init(2) for "Limited functionality" without privileges, fcntl(2) for leases.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import struct
import tempfile
import time
import zipfile
from pathlib import Path

from distrain.errors import CheckpointError
from distrain.storage.checkpoint import Checkpoint
from distrain.storage.file_transfer import TIME_OF_FILES, states_of
from distrain.system.log import warn_once
from distrain.system.scratch import scratch_directory

OWN_DIRECTORY = "Write the files into a directory of their own: checkpoint_dir = tempfile.mkdtemp()"
PATIENCE_S = 10.0
"""Seconds to wait until nothing writes a file. Other ranks may write one of the same name."""
_TICK_S = 0.002
_INIT_FLAGS = 0x001 | 0x002 | 0x400 | 0x800  # FAN_CLOEXEC, FAN_NONBLOCK, FAN_REPORT_DIR_FID, FAN_REPORT_NAME
_MARK_ADD, _AT_FDCWD = 0x1, -100
_CLOSED, _MOVED_HERE, _OVERFLOW, _ON_CHILD = 0x8, 0x80, 0x4000, 0x08000000
_READ_BYTES = 1 << 16


_EVENT = struct.Struct("=IIQiiI2IIi")
"""An event of fanotify: its length, versions, mask, file, process, and the handle of the directory, up to the bytes of
the handle, after which the name of the file stands. Of the handle: a header, the file system, its length and type."""


class WrittenFiles:
    """Knows which files of a directory this process has written since this object was made.

    Linux tells a process which files it has written itself, and needs no privileges for that. Where it does not (before
    Linux 5.13, in containers that forbid it, on file systems without handles), all new and changed files of the user
    are taken. Directories, and what is in them, are not looked at.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self._began_ns = time.clock_gettime_ns(TIME_OF_FILES)
        self._written: set[str] = set()
        self._events = _watch(self.folder)

    def close(self) -> None:
        """Know nothing of what is written from now on."""
        if self._events is not None:
            os.close(self._events)
            self._events = None  # its number may soon be another file's

    def own_part(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Return a copy of the files, if the checkpoint is this directory, else None.

        Each is copied while nothing writes it. Raises CheckpointError for a file that is written all the time.
        """
        is_local = bool(checkpoint.path) and checkpoint.remote_path is None
        if not is_local or os.path.realpath(checkpoint.path) != self.folder:
            return None
        target = tempfile.mkdtemp(prefix="distrain-checkpoint-", dir=scratch_directory())
        names = []
        for name in self._names():
            with contextlib.suppress(FileNotFoundError):  # another rank has deleted it
                _copy(Path(self.folder, name), Path(target, name))
                names.append(name)
        warn_once(
            f"report(): other programs use {checkpoint.path}, too, so the checkpoint has only the files that this rank "
            f"wrote there: {', '.join(names) or 'none'}. {OWN_DIRECTORY}"
        )
        return Checkpoint(target)

    def _names(self) -> list[str]:
        self._read_events()
        with os.scandir(self.folder) as entries:
            return sorted(entry.name for entry in entries if self._is_own(entry))

    def _is_own(self, entry: os.DirEntry[str]) -> bool:
        if not entry.is_file(follow_symlinks=False):
            return False
        if self._events is not None:
            return entry.name in self._written
        state = entry.stat(follow_symlinks=False)
        return state.st_uid == os.geteuid() and max(state.st_mtime_ns, state.st_ctime_ns) >= self._began_ns

    def _read_events(self) -> None:
        while self._events is not None:
            try:
                events = os.read(self._events, _READ_BYTES)
            except BlockingIOError:
                return
            start, end = 0, len(events)
            events += bytes(_EVENT.size)  # an overflow has no handle
            while start < end:
                length, _, mask, _, pid, _, _, _, handle_bytes, _ = _EVENT.unpack_from(events, start)
                if mask & _OVERFLOW:  # other programs have written too much
                    os.close(self._events)
                    self._events = None
                    return
                if pid == os.getpid():
                    name = events[start + _EVENT.size + handle_bytes : start + length]
                    self._written.add(os.fsdecode(name.partition(b"\0")[0]))
                start += length


def _watch(folder: str) -> int | None:
    """Return a descriptor from which the fanotify events of the directory can be read; None if there are none here."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        events: int = libc.fanotify_init(_INIT_FLAGS, os.O_RDONLY)
        mask = ctypes.c_uint64(_CLOSED | _MOVED_HERE | _ON_CHILD)
    except (OSError, AttributeError):
        return None
    if events >= 0 and libc.fanotify_mark(events, _MARK_ADD, mask, _AT_FDCWD, os.fsencode(folder)) < 0:
        os.close(events)
        return None
    return events if events >= 0 else None


def _copy(source: Path, target: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        before = states_of(source.parent, [source.name])
        with source.open("rb") as file:
            is_still = _keep_writers_out(file.fileno(), is_late=time.monotonic() > deadline)
            if is_still:
                shutil.copyfile(source, target)
        if is_still and states_of(source.parent, [source.name]) == before and _is_whole(target):
            return
        if time.monotonic() > deadline + 1:
            raise CheckpointError(
                f"report(): {source} is being written all the time, or ranks have written it at once. {OWN_DIRECTORY}"
            )
        time.sleep(_TICK_S)


def _keep_writers_out(file: int, *, is_late: bool) -> bool:
    """Have the kernel stop those who open the file for writing until it is closed. Return False if somebody has now.

    Return True where the kernel cannot do that, too.
    """
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # of somebody who waits: nobody minds this one
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return is_late
    except OSError:
        return True
    return True


def _is_whole(path: Path) -> bool:
    """Return False for an archive, such as torch.save() writes, whose end is missing or whose parts are damaged."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return True
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except zipfile.BadZipFile:
        return False
    except RuntimeError:  # it has a password, or is compressed in a way that Python does not know
        return True
