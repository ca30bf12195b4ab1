"""Files: copied, hashed and flushed to disk. Runs in: coordinator, worker, uploader."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import threading
import weakref
import zlib
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.checkpoint import MANIFEST_FILE, PENDING_FILE
from distrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "copy_file",
    "copy_folders",
    "crc32_of",
    "list_files",
    "sync_directory",
    "sync_file",
    "write_and_sync",
    "write_atomically",
]

_KINDS = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
_COPY_BYTES = 4 << 20
_KERNEL_COPY_BYTES = 16 << 20
_HASHED_AT_ONCE_BYTES = 8 << 20
"""Which takes some two milliseconds."""
_LOOK_AGAIN_S = 1.0
"""For the thread that hashes to see that nobody is there any more, if a signal handler has kept him from saying so."""
_SYNC_FILE_RANGE_WRITE = 2
_NOT_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""What copy_file_range says where it cannot be used (other file systems, old kernels, sandboxes)."""


def list_files(folder: Path) -> list[tuple[str, int]]:
    """Relative path and size in bytes of every file below ``folder``, sorted; links are followed. Raises
    CheckpointError for a link that leads nowhere or in a circle, for what is no file, and for a name that is taken."""
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        for name in folders:
            _check_circle(folder, Path(parent, name))
        for name in names:
            path = Path(parent, name)
            if name in (MANIFEST_FILE, PENDING_FILE):
                _check_ours(path)
                continue
            if path.is_symlink() and not path.exists():
                raise CheckpointError(f"{path} is a link to {os.readlink(path)}, which does not exist")
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(
                    f"{path} is a {_KINDS.get(stat.S_IFMT(status.st_mode), 'device')}, which no checkpoint can hold; "
                    "delete it, or write the checkpoint's files into a directory of their own"
                )
            found.append((str(path.relative_to(folder)), status.st_size))
    return sorted(found)


def _check_ours(path: Path) -> None:
    """The manifest of a committed checkpoint that is reported again is no part of it. Raises CheckpointError for a file
    of the user's with that name."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict) or not {"attempt", "files", "index"} <= content.keys():
        raise CheckpointError(
            f"{path}: distrain keeps a file of its own with the name {path.name} in every checkpoint; call yours "
            "something else"
        )


def copy_folders(source: Path, target: Path) -> None:
    """Make the directories below ``source`` below ``target``, too: those without files come with no file. Raises
    OSError."""
    for parent, folders, _ in os.walk(source, followlinks=True):
        for name in folders:
            with contextlib.suppress(FileExistsError, NotADirectoryError):  # it is a file of another rank
                (target / Path(parent, name).relative_to(source)).mkdir(parents=True, exist_ok=True)


def _check_circle(top: Path, folder: Path) -> None:
    if not folder.is_symlink():
        return
    real, parents = folder.resolve(), folder.relative_to(top).parents
    if any((top / parent).resolve().is_relative_to(real) for parent in parents):
        raise CheckpointError(f"{folder} is a link to {os.readlink(folder)}, which it is itself in: it has no end")


def copy_file(source: Path, target: Path) -> tuple[int, int]:
    """Copy and flush to disk; returns size in bytes and crc32 of what was written. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        _naming(source),
        source.open("rb", buffering=0) as reader,
        target.open("wb+", buffering=0) as writer,
        _Hasher(os.fstat(reader.fileno()).st_size) as hasher,
    ):
        with _naming(target):
            size = _copy_in_kernel(reader.fileno(), writer.fileno(), hasher)
        buffer = memoryview(bytearray(_COPY_BYTES))
        while count := reader.readinto(buffer):
            hasher.add(partial(zlib.crc32, buffer[:count]))
            written = 0
            with _naming(target):
                while written < count:
                    written += writer.write(buffer[written:count])
            _begin_flush(writer.fileno(), size, count)
            size += count
            hasher.finish()
        with _naming(target):
            hasher.finish()
            os.fsync(writer.fileno())
    return size, hasher.crc


def _copy_in_kernel(reader: int, writer: int, hasher: _Hasher) -> int:
    """Copy as far as the kernel does it by itself, which takes a third of the CPU, or no bytes at all where the file
    system can share them; returns how many bytes that were."""
    size = 0
    while hasattr(os, "copy_file_range"):
        try:
            count = os.copy_file_range(reader, writer, _KERNEL_COPY_BYTES)
        except OSError as error:
            if error.errno not in _NOT_IN_KERNEL:
                raise
            break
        if not count:
            break
        _begin_flush(writer, size, count)
        hasher.add(partial(_hash_part, writer, size, count))
        size += count
    return size


class _Hasher:
    """crc32 of one part of a file after the other; if it is large (``size`` in bytes), by a thread that ends with the
    ``with``. Not concurrent.futures: that imports ``queue``, which may be a user's module beside his script."""

    def __init__(self, size: int) -> None:
        self.crc = 0
        """Of all parts, after :meth:`finish`."""
        self._parts: deque[Callable[[int], int]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if size > _HASHED_AT_ONCE_BYTES:
            self._thread = threading.Thread(
                target=_take_parts, args=(weakref.ref(self),), name="distrain-hash", daemon=True
            )

    def __enter__(self) -> _Hasher:
        if self._thread is not None:
            try:
                self._thread.start()
            except BaseException as error:
                if not isinstance(error, RuntimeError) or error.__context__ is not None:  # a signal handler has raised
                    self._ended = True
                    if isinstance(error, KeyError) and error.__context__ is not None:
                        raise error.__context__ from None  # start() did not find what the thread had tidied up already
                    raise
                self._thread = None  # as many threads as the user may have
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True  # first of all, whatever a signal handler raises next
        if self._thread is not None:
            with self._changed:
                self._changed.notify_all()
            self._thread.join()

    def add(self, part: Callable[[int], int]) -> None:
        """``part``: from the crc32 of all before it to that with it. Without a thread, raises what that raises."""
        if self._thread is None:
            self.crc = part(self.crc)
            return
        with self._changed:
            self._parts.append(part)
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait for all parts. Raises what one of them has raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._parts)
        if self._error is not None:
            raise self._error

    def take_part(self) -> bool:
        """Hash one part, or wait a while for one. False when no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._parts or self._ended, _LOOK_AGAIN_S)
            if self._ended or not self._parts:
                return not self._ended
            part = self._parts[0]
        try:
            self.crc = part(self.crc)
        except Exception as error:  # raised where the parts come from
            self._error = self._error or error
        with self._changed:
            self._parts.popleft()
            self._changed.notify_all()
        return True


def _take_parts(wanted: weakref.ref[_Hasher]) -> None:
    """Until the ``with`` has ended; or nobody has the hasher any more, as a signal handler has raised just before it
    could say so."""
    while (hasher := wanted()) is not None and hasher.take_part():
        del hasher


def _hash_part(fd: int, start: int, count: int, crc: int) -> int:
    """``crc`` of a file up to ``start``, taken on over the next ``count`` bytes. Raises OSError."""
    end = start + count
    buffer = memoryview(bytearray(min(count, _COPY_BYTES)))
    while start < end:
        read = os.preadv(fd, [buffer[: end - start]], start)
        if not read:
            raise OSError(errno.EIO, "the file was made shorter while it was read")
        crc = zlib.crc32(buffer[:read], crc)
        start += read
    return crc


def _begin_flush(fd: int, start: int, count: int) -> None:
    """Have the kernel write these bytes to disk while the next ones are copied and hashed, where it can. A hint: only
    fsync makes them last."""
    with contextlib.suppress(AttributeError):  # Linux has it, Python does not
        ctypes.CDLL(None).sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def sync_file(path: Path) -> tuple[int, int]:
    """Flush a file to disk, while it is hashed; returns its size in bytes and crc32. Raises OSError."""
    with _naming(path), path.open("rb") as file, _Hasher(size := os.fstat(file.fileno()).st_size) as hasher:
        for start in range(0, size, _KERNEL_COPY_BYTES):
            hasher.add(partial(_hash_part, file.fileno(), start, min(_KERNEL_COPY_BYTES, size - start)))
        os.fsync(file.fileno())
        hasher.finish()
    return size, hasher.crc


def crc32_of(path: Path) -> tuple[int, int]:
    """Size in bytes and crc32 of a file."""
    size = crc = 0
    buffer = memoryview(bytearray(_COPY_BYTES))
    with path.open("rb", buffering=0) as reader:
        while count := reader.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            size += count
    return size, crc


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that readers see the old or the new one, never a part."""
    aside = path.with_name(f"{path.name}.new")
    write_and_sync(aside, data)
    aside.replace(path)


def write_and_sync(path: Path, data: bytes) -> None:
    with _naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError of a write or of a read does not say by itself which file it was."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # without a number: somebody else's, as of an alarm
            error.filename = str(path)
        raise


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
