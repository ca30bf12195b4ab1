"""Files of one rank on their way into a checkpoint: copied to it, and deleted where they came from.

Runs in: worker, uploader; coordinator, which hashes the checkpoint that it resumes from.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import stat
import sys
import time
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING

from distrain.storage.flushing import begin_flush, flush_file, naming
from distrain.system.background import in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


Files = list[tuple[str, int, int]]
"""Relative path, size in bytes and crc32 of each file."""
_NEW_NS = 1_000_000_000
"""Nanoseconds since the last change for which a file may be changed again without a new modification time."""
_COPY_BYTES = 4 << 20
_KERNEL_COPY_BYTES = 16 << 20
_HASHED_LATER_BYTES = 8 << 20
"""Size up to which a file is hashed after it was copied, while others are flushed, and not while it is copied."""
_PART_BYTES = 64 << 20
"""Size of the parts of a large file that are hashed at the same time."""
_OPEN_FILES = 128
"""Copies that are open at the same time. A process may have 1,024 open files on most systems."""
_ORDER_BYTES = 8
_NOT_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""Errors of copy_file_range where it cannot be used: between file systems, on old kernels, in sandboxes."""


# -- storing ---------------------------------------------------------------------------------------------------------


def store_files(source: Path, target: Path, names: Sequence[str]) -> Files:
    """Copy files to another directory, flush them to disk and hash them. Raise OSError.

    If the two directories are the same, the files are only flushed and hashed.
    """
    if source != target:
        return _copy_files(source, target, names)
    paths = [target / name for name in names]
    in_threads(_begin_flush_of, paths)
    found = hash_files(target, names)
    in_threads(flush_file, paths)
    return found


def hash_files(
    folder: Path, names: Sequence[str], *, threads: int = 4, is_needed: Callable[[], bool] = lambda: True
) -> Files:
    """Hash files of a directory, several parts of a large one at once. Raise OSError.

    is_needed: asked before each part; once it returns False, no more is read, and OSError is raised.
    """
    sizes = [(folder / name).stat().st_size for name in names]
    parts = [
        (folder / name, start, min(_PART_BYTES, size - start))
        for name, size in zip(names, sizes, strict=True)
        for start in range(0, size, _PART_BYTES)
    ]
    crcs = dict.fromkeys((folder / name for name in names), 0)

    def hash_part(part: tuple[Path, int, int]) -> int:
        if not is_needed():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), str(folder))
        path, start, size = part
        with path.open("rb", buffering=0) as file, naming(path):
            return _hash_part(file.fileno(), start, size, 0)

    for (path, _, size), crc in zip(parts, in_threads(hash_part, parts, threads=threads), strict=True):
        crcs[path] = combined_crc32(crcs[path], crc, size)
    return [(name, size, crcs[folder / name]) for name, size in zip(names, sizes, strict=True)]


def _begin_flush_of(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        begin_flush(file.fileno(), 0, 0)


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


def _hash_open(file: IO[bytes]) -> tuple[int, int]:
    size = os.fstat(file.fileno()).st_size
    return size, _hash_part(file.fileno(), 0, size, 0)


def _copy_files(source: Path, target: Path, names: Sequence[str]) -> Files:
    for folder in {(target / name).parent for name in names}:
        folder.mkdir(parents=True, exist_ok=True)
    found: Files = []
    for start in range(0, len(names), _OPEN_FILES):
        batch = names[start : start + _OPEN_FILES]
        with contextlib.ExitStack() as stack:  # a file stays open until it is flushed: the kernel keeps its errors
            copies = [_copy(source / name, target / name, stack) for name in batch]
            found += [(name, *fact) for name, fact in zip(batch, in_threads(_finish, copies), strict=True)]
    return found


def _copy(source: Path, target: Path, stack: contextlib.ExitStack) -> tuple[IO[bytes], int | None]:
    """Copy a file, and let the kernel begin to flush it. Return the open copy, and its crc32 if that is known."""
    writer = stack.enter_context(target.open("wb+", buffering=0))
    with source.open("rb", buffering=0) as reader, naming(target):
        parts = _copied_parts(reader, writer)
        if os.fstat(reader.fileno()).st_size > _HASHED_LATER_BYTES:
            return writer, _hash_alongside(writer.fileno(), parts)
        _exhaust(parts)
    return writer, None


def _finish(copy: tuple[IO[bytes], int | None]) -> tuple[int, int]:
    """Flush a copy to disk, and hash it if it was not hashed while it was copied. Return its size and crc32."""
    file, crc = copy
    with naming(Path(file.name)):
        size, crc = _hash_open(file) if crc is None else (os.fstat(file.fileno()).st_size, crc)
        os.fsync(file.fileno())
    return size, crc


def _copied_parts(reader: IO[bytes], writer: IO[bytes]) -> Iterator[int]:
    """Copy a file in parts, and let the kernel write each to disk while the next one is copied. Yield their sizes."""
    start = 0
    for copy_part in (_copy_in_kernel, _copy_here):
        while count := copy_part(reader, writer):
            begin_flush(writer.fileno(), start, count)
            start += count
            yield count


def _copy_in_kernel(reader: IO[bytes], writer: IO[bytes]) -> int:
    """Copy some bytes with copy_file_range. Return their number, 0 where it cannot be used.

    It takes a third of the CPU time of read and write, and copies nothing where the file system can share the bytes.
    """
    if not hasattr(os, "copy_file_range"):
        return 0
    try:
        return os.copy_file_range(reader.fileno(), writer.fileno(), _KERNEL_COPY_BYTES)
    except OSError as error:
        if error.errno in _NOT_IN_KERNEL:
            return 0
        raise


def _copy_here(reader: IO[bytes], writer: IO[bytes]) -> int:
    """Copy some bytes with read and write. Return their number, 0 at the end of the file."""
    with naming(Path(reader.name)):
        data = memoryview(reader.read(_COPY_BYTES))
    written = 0
    while written < len(data):
        written += writer.write(data[written:])
    return written


def _hash_alongside(fd: int, parts: Iterator[int]) -> int | None:
    """Hash each part of a file, in a thread, while the next one is copied. Return the crc32, or None without a thread.

    No lock is taken here: if a signal handler raised just after that, the lock would stay taken and the thread would
    never end. Instead, the sizes of the parts go through a pipe. The thread ends when the pipe is closed, which an
    exception does, too.
    """
    orders, order_fd = os.pipe()
    ended_fd, end = os.pipe()
    result: list[int | BaseException] = []
    with open(ended_fd, "rb", buffering=0) as ended:
        with open(order_fd, "wb", buffering=0) as order:
            own = (os.dup(fd), orders, end)
            try:
                _thread.start_new_thread(_hash_orders, (*own, result))
            except RuntimeError:  # the user may have no more threads
                for descriptor in own:
                    os.close(descriptor)
                _exhaust(parts)
                return None
            with contextlib.suppress(BrokenPipeError):  # the thread has failed
                for count in parts:
                    order.write(count.to_bytes(_ORDER_BYTES, sys.byteorder))
                order.write(bytes(_ORDER_BYTES))  # end, as a child that was forked meanwhile keeps the pipe open
        ended.read(1)
    [crc] = result
    if isinstance(crc, BaseException):
        raise crc
    return crc


def _hash_orders(fd: int, orders: int, end: int, result: list[int | BaseException]) -> None:
    """Hash the parts whose sizes in bytes come through a pipe. Run in a thread, and close the descriptors."""
    size = crc = 0
    try:
        while count := int.from_bytes(os.read(orders, _ORDER_BYTES), sys.byteorder):
            crc = _hash_part(fd, size, count, crc)
            size += count
        result.append(crc)
    except BaseException as error:
        result.append(error)
    finally:
        with contextlib.suppress(OSError):  # the copy has failed, and does not wait
            os.write(end, b".")
        for descriptor in (fd, orders, end):
            os.close(descriptor)


def _hash_part(fd: int, start: int, count: int, crc: int) -> int:
    """Continue ``crc``, that of a file up to ``start``, over the next ``count`` bytes. Raise OSError."""
    end = start + count
    buffer = memoryview(bytearray(min(count, _COPY_BYTES)))
    while start < end:
        read = os.preadv(fd, [buffer[: end - start]], start)
        if not read:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        crc = zlib.crc32(buffer[:read], crc)
        start += read
    return crc


def _exhaust(parts: Iterator[int]) -> None:
    for _ in parts:
        pass


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

        A file that cannot be deleted stays: the checkpoint does not need it any more. A directory that is empty for
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

    Returns None if there is no such file any more: another rank deletes files of an earlier checkpoint.

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
