"""Files: copied, hashed and flushed to disk. Runs in: coordinator, worker, uploader."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.checkpoint import MANIFEST_FILE
from distrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["copy_file", "crc32_of", "list_files", "sync_directory", "sync_file", "write_and_sync", "write_atomically"]

_COPY_BYTES = 4 << 20
_KERNEL_COPY_BYTES = 16 << 20
_SYNC_FILE_RANGE_WRITE = 2
_NOT_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""What copy_file_range says where it cannot be used (other file systems, old kernels, sandboxes)."""


def list_files(folder: Path) -> list[tuple[str, int]]:
    """Relative path and size in bytes of every file below ``folder``, sorted; links are followed. Raises
    CheckpointError for one that leads nowhere."""
    found = []
    for parent, _, names in os.walk(folder, followlinks=True):
        for name in names:
            if name == MANIFEST_FILE:  # of a committed checkpoint that is reported again
                continue
            path = Path(parent, name)
            if path.is_symlink() and not path.exists():
                raise CheckpointError(f"{path} is a link to {os.readlink(path)}, which does not exist")
            found.append((str(path.relative_to(folder)), path.stat().st_size))
    return sorted(found)


def copy_file(source: Path, target: Path) -> tuple[int, int]:
    """Copy and flush to disk; returns size in bytes and crc32 of what was written. Raises OSError.

    A thread that ends with this call hashes what was copied while the next bytes are: the two take equally long."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        _naming(source),
        source.open("rb", buffering=0) as reader,
        target.open("wb+", buffering=0) as writer,
        ThreadPoolExecutor(1) as hasher,
    ):
        with _naming(target):
            size, crc = _copy_in_kernel(reader.fileno(), writer.fileno(), hasher)
        buffer = memoryview(bytearray(_COPY_BYTES))
        while count := reader.readinto(buffer):
            hashed = hasher.submit(zlib.crc32, buffer[:count], crc)
            written = 0
            with _naming(target):
                while written < count:
                    written += writer.write(buffer[written:count])
            _begin_flush(writer.fileno(), size, count)
            size += count
            crc = hashed.result()
        with _naming(target):
            os.fsync(writer.fileno())
    return size, crc


def _copy_in_kernel(reader: int, writer: int, hasher: ThreadPoolExecutor) -> tuple[int, int]:
    """Copy as far as the kernel does it by itself, which takes a third of the CPU, or no bytes at all where the file
    system can share them; returns size in bytes and crc32."""
    size = 0
    hashed = hasher.submit(int)
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
        hashed = hasher.submit(_hash_on, hashed, writer, size, count)
        size += count
    return size, hashed.result()


def _hash_on(before: Future[int], fd: int, start: int, count: int) -> int:
    """crc32 of a file up to ``start + count``, when that up to ``start`` is known."""
    crc = before.result()
    end = start + count
    buffer = memoryview(bytearray(min(count, _COPY_BYTES)))
    while start < end:
        read = os.preadv(fd, [buffer[: end - start]], start)
        if not read:
            raise OSError(errno.EIO, "the copy was made shorter while it was written")
        crc = zlib.crc32(buffer[:read], crc)
        start += read
    return crc


def _begin_flush(fd: int, start: int, count: int) -> None:
    """Have the kernel write these bytes to disk while the next ones are copied and hashed, where it can. A hint: only
    fsync makes them last."""
    with contextlib.suppress(AttributeError):  # Linux has it, Python does not
        ctypes.CDLL(None).sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def sync_file(path: Path) -> tuple[int, int]:
    """Flush a file to disk, while a thread that ends with this call hashes it; returns its size in bytes and crc32.
    Raises OSError."""
    with path.open("rb") as file, ThreadPoolExecutor(1) as hasher:
        found = hasher.submit(crc32_of, path)
        os.fsync(file.fileno())
        return found.result()


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
        if error.filename is None:
            error.filename = str(path)
        raise


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
