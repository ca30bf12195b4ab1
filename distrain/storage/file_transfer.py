"""Files of one rank on their way into a checkpoint: copied to it, and deleted where they came from.

Runs in: worker, uploader; coordinator, which hashes the checkpoint that it resumes from.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
import zlib
from typing import TYPE_CHECKING

from distrain.storage.flushing import begin_flush, naming
from distrain.system.background import in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


Files = list[tuple[str, int, int]]
"""Relative path, size in bytes and crc32 of each file."""
_NEW_NS = 1_000_000_000
"""Nanoseconds since the last change for which a file may be changed again without a new modification time."""
_READ_BYTES = 4 << 20
_COPY_BYTES = 16 << 20
_PART_BYTES = 64 << 20
"""Size of the parts of a large file that are hashed at the same time."""
_NOT_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""Errors of copy_file_range where it cannot be used: between file systems, on old kernels, in sandboxes."""


# -- storing ---------------------------------------------------------------------------------------------------------


def store_files(source: Path, target: Path, names: Sequence[str]) -> Files:
    """Copy files to another directory, flush them to disk and hash them. Raise OSError.

    If the two directories are the same, the files are only flushed and hashed.
    """
    if source != target:
        for folder in {(target / name).parent for name in names}:
            folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            _copy(source / name, target / name)
    return hash_files(target, names, flush=True)


def _copy(source: Path, target: Path) -> None:
    """Copy a file, and let the kernel begin to flush it."""
    if not _copy_in_kernel(source, target):
        shutil.copyfile(source, target)
        with target.open("rb", buffering=0) as file:
            begin_flush(file.fileno(), 0, 0)


def _copy_in_kernel(source: Path, target: Path) -> bool:
    """Copy a file with copy_file_range, and flush each part while the next one is copied. Return False if it cannot.

    It copies nothing where the file system can share the bytes.
    """
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer, naming(target):
        done, size = 0, os.fstat(reader.fileno()).st_size
        try:
            while count := os.copy_file_range(reader.fileno(), writer.fileno(), _COPY_BYTES):
                begin_flush(writer.fileno(), done, count)
                done += count
        except OSError as error:
            if error.errno not in _NOT_IN_KERNEL:
                raise
    return done == size


def hash_files(
    folder: Path,
    names: Sequence[str],
    *,
    threads: int = 4,
    is_needed: Callable[[], bool] = lambda: True,
    flush: bool = False,
) -> Files:
    """Hash files of a directory, several parts of a large one at once. Raise OSError.

    is_needed: asked before each part; once it returns False, no more is read, and OSError is raised. flush: flush the
    files to disk, too.
    """
    sizes = [(folder / name).stat().st_size for name in names]
    parts = [
        (folder / name, start, min(_PART_BYTES, size - start))
        for name, size in zip(names, sizes, strict=True)
        for start in range(0, max(size, 1), _PART_BYTES)
    ]
    crcs = dict.fromkeys((folder / name for name in names), 0)

    def hash_part(part: tuple[Path, int, int]) -> int:
        if not is_needed():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), str(folder))
        path, start, size = part
        with path.open("rb", buffering=0) as file, naming(path):
            crc = _hash_part(file.fileno(), start, size)
            if flush and start == 0:  # while other threads hash the rest of a large file
                os.fsync(file.fileno())
            return crc

    for (path, _, size), crc in zip(parts, in_threads(hash_part, parts, threads=threads), strict=True):
        crcs[path] = combined_crc32(crcs[path], crc, size)
    return [(name, size, crcs[folder / name]) for name, size in zip(names, sizes, strict=True)]


def _hash_part(fd: int, start: int, count: int) -> int:
    """Return the crc32 of ``count`` bytes of a file. Raise OSError."""
    end, crc = start + count, 0
    buffer = memoryview(bytearray(min(count, _READ_BYTES)))
    while start < end:
        read = os.preadv(fd, [buffer[: end - start]], start)
        if not read:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        crc = zlib.crc32(buffer[:read], crc)
        start += read
    return crc


def combined_crc32(first: int, second: int, size: int) -> int:
    """Return the crc32 of two texts together, from the crc32 of each and the size of the second in bytes.

    This is crc32_combine() of zlib, which Python does not have: ``first`` is multiplied with the matrix that appends a
    zero byte, to the power of ``size``, over the field of two elements.
    """
    if not first:
        return second
    matrix = [0xEDB88320, *(1 << bit for bit in range(31))]  # appends one zero bit
    for _ in range(3):
        matrix = [_product(matrix, column) for column in matrix]
    while size:
        if size & 1:
            first = _product(matrix, first)
        size >>= 1
        matrix = [_product(matrix, column) for column in matrix]
    return first ^ second


def _product(matrix: Sequence[int], vector: int) -> int:
    """Multiply a matrix, given by its columns, with a vector of bits."""
    product = 0
    for column in matrix:
        if vector & 1:
            product ^= column
        vector >>= 1
    return product


# -- deleting --------------------------------------------------------------------------------------------------------


class LocalFiles:
    """The files in a directory as they are now, to be deleted once the checkpoint that has copies of them is committed.

    Nothing behind a symlink is deleted: of a symlink, including ``folder`` itself, only the link.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._files: dict[str, tuple[int, int, int]] = {}
        self._folders: dict[str, bool] = {}
        """By path: True if the directory was empty. A directory comes after those in it."""
        if self.folder.is_symlink():
            self._files[str(self.folder)] = _state(self.folder.lstat())
        else:
            self._note_folder(str(self.folder))

    def _note_folder(self, folder: str) -> None:
        """Remember the files of a directory, and the directory after all that is in it."""
        is_empty = True
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                is_empty = False
                if entry.is_dir(follow_symlinks=False):
                    self._note_folder(entry.path)
                elif (status := _dated(entry)) is not None:
                    self._files[entry.path] = _state(status)
        self._folders[folder] = is_empty

    def overlaps(self, folder: Path) -> bool:
        """Return whether one of the two directories is the other or is in it."""
        first, second = (os.path.join(os.path.realpath(path), "") for path in (self.folder, folder))
        return first.startswith(second) or second.startswith(first)

    def delete(self) -> None:
        """Delete the files that nobody has changed or replaced since, and the directories that this makes empty.

        A file that cannot be deleted stays: the checkpoint no longer needs it. A directory that is empty for
        another reason stays, too: another rank may have made it anew.
        """
        emptied = {path for path, was_empty in self._folders.items() if was_empty}
        for path, state in self._files.items():
            with contextlib.suppress(OSError):
                if _state(os.lstat(path)) == state:
                    os.unlink(path)
                    emptied.add(os.path.dirname(path))
        for path in self._folders:
            with contextlib.suppress(OSError):
                if path in emptied:
                    os.rmdir(path)
                    emptied.add(os.path.dirname(path))


def _dated(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of a file whose modification time differs from that of any later change.

    Returns None if the file is gone: another rank deletes files of an earlier checkpoint.

    File systems take the time from a clock that ticks every few milliseconds. A new file is set back by 1 ns, so that a
    change within the same tick is noticed.
    """
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISREG(status.st_mode) and time.time_ns() - status.st_mtime_ns < _NEW_NS:
        with contextlib.suppress(OSError):  # the file belongs to another user
            os.utime(entry.path, ns=(status.st_atime_ns, status.st_mtime_ns - 1), follow_symlinks=False)
            status = os.lstat(entry.path)
    return status


def _state(status: os.stat_result) -> tuple[int, int, int]:
    """Return what changes when a file is written or replaced."""
    return status.st_ino, status.st_size, status.st_mtime_ns
