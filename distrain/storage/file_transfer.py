"""Files of one rank on their way into a checkpoint: copied to it, flushed, and deleted where they came from.

Runs in: worker, uploader, mover, stream server; coordinator, which hashes the checkpoint that it resumes from.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

from distrain.system.background import in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from mmap import mmap
    from pathlib import Path

Files = list[tuple[str, int, int]]
"""Relative path, size in bytes and crc32 of each file."""
_READ_BYTES = 1 << 20
_PART_BYTES = 16 << 20
"""Size of the parts of a large file that are copied and hashed at the same time."""
_CRC32_POLYNOMIAL = 0xEDB88320
_WRITING_THREADS, _HASHING_THREADS = 4, 8
TIME_OF_FILES = 5
"""CLOCK_REALTIME_COARSE, from which the kernel takes the times of files."""
_TICK_S = 0.001
_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2
_NOT_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""Errors of copy_file_range where it cannot be used: between file systems, on old kernels, in sandboxes."""


# -- directories -----------------------------------------------------------------------------------------------------


def make_folders(top: str | Path, names: Iterable[str]) -> None:
    """Make a directory, and directories below it, where nothing else has their names. Raise OSError."""
    os.makedirs(top, exist_ok=True)
    for name in sorted({*filter(None, names)}):
        with contextlib.suppress(FileExistsError, NotADirectoryError):  # another rank has a file of that name
            os.makedirs(os.path.join(top, name), exist_ok=True)


def folders_below(top: str | Path) -> list[str]:
    """Return the relative paths of all directories in a directory. Follow links."""
    return [
        os.path.relpath(os.path.join(parent, name), top)
        for parent, names, _ in os.walk(top, followlinks=True)
        for name in names
    ]


# -- storing ---------------------------------------------------------------------------------------------------------


def store_files(source: Path, target: Path, names: Sequence[str]) -> Files:
    """Copy files to another directory, flush them to disk and hash them. Raise OSError.

    If the two directories are the same, the files are only flushed and hashed. Each part of a file is hashed while
    others are copied and flushed.
    """
    if source != target:
        for folder in {(target / name).parent for name in names}:
            folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (target / name).open("wb").close()

    def store_part(name: str, start: int, count: int) -> int:
        path = target / name
        with path.open("rb+" if source != target else "rb", buffering=0) as file, naming(path):
            if source != target:
                _copy_part(source / name, file.fileno(), start, count)
            begin_flush(file.fileno(), start, count)
            return _hash_part(file.fileno(), start, count)

    files = _by_parts(source, names, store_part, threads=_WRITING_THREADS)
    in_threads(flush, [target / name for name in names])
    return files


def hash_files(folder: Path, names: Sequence[str], *, is_needed: Callable[[], bool] = lambda: True) -> Files:
    """Hash files of a directory, several parts of a large one at once. Raise OSError.

    is_needed: asked before each part; once it returns False, no more is read, and OSError is raised.
    """

    def hash_part(name: str, start: int, count: int) -> int:
        if not is_needed():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), str(folder))
        with (folder / name).open("rb", buffering=0) as file, naming(folder / name):
            return _hash_part(file.fileno(), start, count)

    return _by_parts(folder, names, hash_part, threads=_HASHING_THREADS)


def _by_parts(folder: Path, names: Sequence[str], do: Callable[[str, int, int], int], *, threads: int) -> Files:
    """Do something with each part of these files, in threads. ``do`` returns the crc32 of the part."""
    states = states_of(folder, names)
    sizes = {name: size for name, (_, size, _) in states.items()}
    parts = [
        (name, start, min(_PART_BYTES, size - start))
        for name, size in sizes.items()
        for start in range(0, max(size, 1), _PART_BYTES)
    ]
    crcs = dict.fromkeys(names, 0)
    with unchanged(folder, states):
        done = in_threads(lambda part: do(*part), parts, threads=threads)
    for (name, _, count), crc in zip(parts, done, strict=True):
        crcs[name] = combined_crc32(crcs[name], crc, count)
    return [(name, size, crcs[name]) for name, size in sizes.items()]


def states_of(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Return by name the facts that change when a file is written or replaced. Raise OSError."""
    return {name: _state((folder / name).stat()) for name in names}


def wait_for_tick(states: Mapping[str, Sequence[int]]) -> None:
    """Wait until a write would give the files a new time. Many kernels advance their clock only every 4 ms."""
    while any(state[2] == time.clock_gettime_ns(TIME_OF_FILES) for state in states.values()):
        time.sleep(_TICK_S)


@contextlib.contextmanager
def unchanged(folder: Path, states: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Raise OSError for a file whose facts have changed: what was read may belong to another step."""
    try:
        yield
    except OSError:
        _check_states(folder, states)
        raise
    _check_states(folder, states)


def _check_states(folder: Path, states: Mapping[str, Sequence[int]]) -> None:
    for name, state in states.items():
        if _state((folder / name).stat()) != list(state):
            raise OSError(
                f"{folder / name} was written or replaced before it was stored. Write each checkpoint into a directory "
                "of its own, and let nothing else write there, or use CheckpointUploadMode.SYNC"
            )


def crc32_of(memory: mmap) -> int:
    """Return the crc32 of a mapped file, whose parts are read in threads."""
    view, crc = memoryview(memory), 0
    parts = [view[start : start + _PART_BYTES] for start in range(0, len(view), _PART_BYTES)]
    for part, each in zip(parts, in_threads(zlib.crc32, parts), strict=True):
        crc = combined_crc32(crc, each, len(part))
    return crc


def _copy_part(source: Path, writer: int, start: int, count: int) -> None:
    """Copy bytes of a file to the same place of an open one, which shares them where the file system can do that."""
    end = start + count
    with source.open("rb", buffering=0) as file:
        while start < end:
            copied = _copy_in_kernel(file.fileno(), writer, start, end - start)
            if not copied:
                with naming(source):
                    data = os.pread(file.fileno(), min(_READ_BYTES, end - start), start)
                    if not data:
                        raise _shorter()
                copied = os.pwrite(writer, data, start)
            start += copied


def _copy_in_kernel(reader: int, writer: int, start: int, count: int) -> int:
    """Copy bytes with copy_file_range. Return their number, 0 where it cannot be used."""
    try:
        return os.copy_file_range(reader, writer, count, start, start)
    except OSError as error:
        if error.errno in _NOT_IN_KERNEL:
            return 0
        raise


def _hash_part(fd: int, start: int, count: int) -> int:
    """Return the crc32 of ``count`` bytes of a file. Raise OSError."""
    end, crc = start + count, 0
    buffer = memoryview(bytearray(min(count, _READ_BYTES)))
    while start < end:
        read = os.preadv(fd, [buffer[: end - start]], start)
        if not read:
            raise _shorter()
        crc = zlib.crc32(buffer[:read], crc)
        start += read
    return crc


def _shorter() -> OSError:
    return OSError(errno.EIO, "the file became shorter while it was read")


def combined_crc32(first: int, second: int, size: int) -> int:
    """Return the crc32 of two texts together, from the crc32 of each and the size of the second in bytes.

    This is crc32_combine() of zlib, which Python does not have. A crc32 is a polynomial over the field of two elements,
    modulo that of the algorithm, and its highest bit belongs to the power 0.
    """
    return _product(_power(8 * size), first) ^ second


@lru_cache(maxsize=64)
def _power(exponent: int) -> int:
    """Return the polynomial x**exponent. Most parts of files have one size."""
    power, factor = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            power = _product(power, factor)
        factor = _product(factor, factor)
        exponent >>= 1
    return power


def _product(first: int, second: int) -> int:
    """Multiply two polynomials."""
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_CRC32_POLYNOMIAL if second & 1 else 0)
    return product


# -- flushing --------------------------------------------------------------------------------------------------------


def begin_flush(fd: int, start: int, count: int) -> None:
    """Let the kernel write bytes of a file to disk in the background. Only :func:`flush` makes them durable.

    count: their number, 0 for all up to the end.
    """
    _LIBC.sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def flush(path: str | Path) -> None:
    """Flush a file to disk, or a directory, so that renames in it survive a power cut. Raise OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the path to an OSError of a read or a write, which has no file name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # one without a number comes from a signal handler
            error.filename = str(path)
        raise


# -- deleting --------------------------------------------------------------------------------------------------------


class LocalFiles:
    """The files in a directory as they are now, to be deleted once the checkpoint that has copies of them is committed.

    Nothing behind a symlink is deleted: of a symlink, including ``folder`` itself, only the link.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._files: dict[str, list[int]] = {}
        self._folders: dict[str, bool] = {}
        """By path: True if the directory was empty. A directory comes after those in it."""
        if self.folder.is_symlink():
            self._note_file(str(self.folder))
            return
        for parent, folders, names in os.walk(self.folder, topdown=False):
            links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            for name in (*names, *links):
                self._note_file(os.path.join(parent, name))
            self._folders[parent] = not (names or folders)

    def _note_file(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another rank deletes files of an earlier checkpoint
            self._files[path] = _state(os.lstat(path))

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


def _state(status: os.stat_result) -> list[int]:
    return [status.st_ino, status.st_size, status.st_mtime_ns]
