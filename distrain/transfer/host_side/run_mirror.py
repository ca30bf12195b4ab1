"""The directory of one run in the cache of a host, with a mirror of the user's project. Runs in: agent, guard.

::

    runs/{place}/
        files/          the mirror: /home/me/train.py of the user's machine is files/home/me/train.py
        checkpoints/    checkpoints that were brought here for reading; .new-...: files until all have arrived
        .placed.json    the versions of each file that may be in the mirror: path -> [[digest, size, mtime_ns], ...]
        .new            a file that is being written; a rename gives it its place
        .lock           locked by the agent and its forked processes; its time is that of the last use

A kill leaves two versions of a file in ``.placed.json``: the old and the new one. Then either may be in the mirror.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
from typing import TYPE_CHECKING

from distrain.transfer.host_side.cache_files import (
    delete,
    explaining_full_disk,
    make_directory,
    open_up,
    try_lock,
    unlock,
)
from distrain.wire.shipped_file import digest_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from distrain.wire.shipped_file import ShippedFile

    _Version = list[str | int]  # [digest, size, mtime_ns], as JSON has it
    _Record = dict[str, list[_Version]]

LOCK = ".lock"
_RECORD, _NEW = ".placed.json", ".new"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system without locks."""


class RunMirror:
    """The directory of a run, which this process has locked.

    files: the mirror. checkpoints: a directory, empty at first, that goes with the run.
    """

    def __init__(self, path: Path, blobs: Path, fd: int) -> None:
        """Take over a directory with its lock."""
        self.path = path
        self.files = path / "files"
        self.checkpoints = path / "checkpoints"
        self._blobs = blobs
        self._fd = fd
        self._new = path / _NEW
        self._record = path / _RECORD

    @classmethod
    def claim(cls, path: Path, blobs: Path) -> RunMirror | None:
        """Lock a directory, which is made if necessary. Return None if another process uses it. Raise OSError."""
        make_directory(str(path))
        try:
            fd = try_lock(path / LOCK)
        except FileNotFoundError:  # it was deleted just now
            return None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
        if fd is None:
            return None
        run = cls(path, blobs, fd)
        try:
            run._begin()
        except OSError:
            unlock(fd)
            raise
        return run

    def _begin(self) -> None:
        """Delete what a run that was killed has left, other than the mirror, which is compared later."""
        os.utime(self._fd)
        for path in (self.checkpoints, self._new):
            delete(path)
        for folder in (self.files, self.checkpoints):
            make_directory(str(folder))

    def mirrored(self, path: str) -> str:
        """Return where the mirror has an absolute path of the user's machine."""
        return f"{self.files}{_normal(path)}".rstrip("/")

    # -- place --

    def place(self, files: Sequence[ShippedFile], folders: Sequence[str]) -> None:
        """Make the mirror of the project equal to the user's latest files. Raise OSError.

        What workers have written stays, unless it is in the way. Files of an earlier call that are no longer wanted
        are deleted, unless workers have changed them. folders: directories to be there, also without files.
        """
        wanted = {_normal(file.path): file for file in files}
        with explaining_full_disk(self.path.parent.parent):
            for file in files:
                with contextlib.suppress(FileNotFoundError):  # not needed if the mirror has the file
                    os.utime(self._blob(file))
            record = self.recorded_in(self.path)
            self._delete_unwanted(record, wanted)
            self._make_directories(wanted, folders)
            changed = [path for path, file in wanted.items() if not self._is_placed(path, file, record.get(path, []))]
            self._copy_changed(changed, wanted, record)

    def _delete_unwanted(self, record: _Record, wanted: Collection[str]) -> None:
        """Delete the files of earlier calls that are not wanted, and directories that are empty then."""
        real = {str(self.files): not self.files.is_symlink()}
        for path in record.keys() - wanted:
            target = f"{self.files}{path}"
            parent = os.path.dirname(target)
            with contextlib.suppress(OSError):  # it is gone, or a directory that is not empty
                if _is_real(parent, real) and _is_version(os.lstat(target), record[path]):
                    os.unlink(target)
                    while parent != str(self.files):
                        os.rmdir(parent)
                        parent = os.path.dirname(parent)

    def _make_directories(self, wanted: Collection[str], folders: Sequence[str]) -> None:
        """Make directories, in place of links that workers may have put there."""
        needed = {"/"}
        for path in [*map(_normal, folders), *map(os.path.dirname, wanted)]:
            while path not in needed:
                needed.add(path)
                path = os.path.dirname(path)
        for path in sorted(needed):  # parents first
            make_directory(f"{self.files}{path}".rstrip("/"))

    def _is_placed(self, path: str, file: ShippedFile, versions: list[_Version]) -> bool:
        """Return whether the mirror has this version of a file. Correct its mode."""
        if versions != [_version(file)]:
            return False
        target = f"{self.files}{path}"
        try:
            status = os.lstat(target)
        except FileNotFoundError:
            return False
        if not _is_version(status, versions):
            return False
        if stat.S_IMODE(status.st_mode) != _mode(file):
            os.chmod(target, _mode(file))
        return True

    def _copy_changed(self, changed: Sequence[str], wanted: Mapping[str, ShippedFile], record: _Record) -> None:
        after = {path: [_version(file)] for path, file in wanted.items()}
        if changed:
            # A kill leaves the old or the new version of each, which all are ours.
            before = {path: record.get(path, []) + after[path] for path in changed}
            self._write_record({**after, **before})
        for path in changed:
            self._copy(wanted[path], f"{self.files}{path}")
        if after != record:
            self._write_record(after)

    def _copy(self, file: ShippedFile, target: str) -> None:
        blob = self._blob(file)
        with self._deleting_new_on_failure():
            shutil.copyfile(blob, self._new)
            if digest_of(self._new) != file.digest:
                delete(blob)
                raise OSError(f"{blob} was damaged, and is deleted now; start the run again")
            os.chmod(self._new, _mode(file))
            os.utime(self._new, ns=(file.mtime_ns, file.mtime_ns))
            try:
                os.replace(self._new, target)
            except IsADirectoryError:
                delete(target)
                os.replace(self._new, target)

    def _blob(self, file: ShippedFile) -> str:
        return f"{self._blobs}/{file.digest[:2]}/{file.digest}"

    # -- the record --

    @staticmethod
    def recorded_in(path: Path) -> _Record:
        """Return the versions of each file that place() may have left in the mirror of a run."""
        try:
            record: _Record = json.loads((path / _RECORD).read_bytes())
        except (OSError, ValueError):  # a power cut may have emptied it
            return {}
        return record if isinstance(record, dict) else {}

    def _write_record(self, record: _Record) -> None:
        with self._deleting_new_on_failure():
            self._new.write_bytes(json.dumps(record).encode())
            os.replace(self._new, self._record)

    @contextlib.contextmanager
    def _deleting_new_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            delete(self._new)
            raise

    # -- the end --

    def end(self) -> tuple[int, int]:
        """Delete what the run does not need any more, and unlock it. Return number and bytes of the files that stay.

        These are the files that the workers have written or changed. Without any, the whole directory is deleted.
        Harmless when done twice, also by a forked process. What cannot be read or deleted stays, and counts.
        """
        if self._fd < 0:
            return 0, 0
        stays = self._clear() if self._is_locked() else (0, 0)
        unlock(self._fd)
        self._fd = -1
        return stays

    def _is_locked(self) -> bool:
        """Return False if a forked process has freed the lock, and maybe another run has it now."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # without locks
            pass
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path / LOCK))
        return False

    def _clear(self) -> tuple[int, int]:
        delete(self.checkpoints)
        if self.files.is_symlink():
            delete(self.files)
        count, size = self._sweep(str(self.files), self.recorded_in(self.path))
        if count:
            for path in (self._new, self._record):
                delete(path)
            with contextlib.suppress(OSError):
                os.utime(self._fd)
        else:
            delete_run(self.path)
        return count, size

    def _sweep(self, folder: str, record: _Record) -> tuple[int, int]:
        """Delete below a directory what workers have not written. Return number and bytes of the other files."""
        count = size = 0
        try:
            entries = _entries(folder)
        except OSError:  # whatever is in it stays
            return 1, 0
        for entry in entries:
            more = 0, 0
            if not entry.is_dir(follow_symlinks=False):
                more = self._sweep_file(entry, record)
            elif entry.name == "__pycache__":
                delete(entry.path)
            else:
                more = self._sweep(entry.path, record)
            count, size = count + more[0], size + more[1]
        if not count:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return count, size

    def _sweep_file(self, entry: os.DirEntry[str], record: _Record) -> tuple[int, int]:
        try:
            status = entry.stat(follow_symlinks=False)
            if not _is_version(status, record.get(entry.path[len(str(self.files)) :], [])):
                return 1, status.st_size
            os.unlink(entry.path)
        except FileNotFoundError:  # a process that workers have left has deleted it
            pass
        except OSError:
            return 1, 0
        return 0, 0


def delete_run(path: Path) -> None:
    """Delete the directory of a run whose lock this process has.

    The lock is last: who waits for it sees that it is gone, and after a kill the rest has one.
    """
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(path), key=lambda name: (name == LOCK, name == _RECORD)):
            delete(path / name)
        os.rmdir(path)  # fails if the next run has begun here


def has_leftovers(path: Path) -> bool:
    """Return whether the agent of a run that nobody has locked was killed before :meth:`RunMirror.end`."""
    return sorted(os.listdir(path)) != [LOCK, "files"]


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return what is in a directory; nothing if it is gone. Raise OSError."""
    with contextlib.suppress(FileNotFoundError):
        open_up(folder)
        with os.scandir(folder) as entries:
            return list(entries)
    return []


def _normal(path: str) -> str:
    """Return a path with one slash at its start, and without ``..``, which might lead out of the mirror."""
    return os.path.normpath("/" + path.lstrip("/"))


def _mode(file: ShippedFile) -> int:
    """Return the mode of a file in the mirror, which workers may write to. It is replaced, too."""
    return (file.mode & 0o777) | stat.S_IRUSR | stat.S_IWUSR


def _version(file: ShippedFile) -> _Version:
    return [file.digest, file.size, file.mtime_ns]


def _is_version(status: os.stat_result, versions: list[_Version]) -> bool:
    """Return whether a file is one that place() has put there, and nobody has changed."""
    found = [status.st_size, status.st_mtime_ns]
    return stat.S_ISREG(status.st_mode) and any(found == version[1:] for version in versions)


def _is_real(folder: str, known: dict[str, bool]) -> bool:
    """Return whether a directory is not behind a link, as far up as the known ones. Raise OSError."""
    if folder not in known:
        known[folder] = _is_real(os.path.dirname(folder), known) and stat.S_ISDIR(open_up(folder).st_mode)
    return known[folder]
