"""Local files: list, copy, hash, and flush to disk. Runs in: coordinator, worker, uploader."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import json
import os
import stat
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.checkpoint import MANIFEST_FILE, PENDING_FILE
from distrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

_KINDS = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
_COPY_BYTES = 4 << 20
_KERNEL_COPY_BYTES = 16 << 20
_HASHED_IN_TURN_BYTES = 8 << 20
"""Size up to which a file is hashed without a thread. That takes about two milliseconds."""
_ORDER_BYTES = 8
_SYNC_FILE_RANGE_WRITE = 2
_NOT_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""Errors of copy_file_range where it cannot be used: between file systems, on old kernels, in sandboxes."""


def list_files(folder: Path) -> list[tuple[str, int]]:
    """Return the relative path and the size in bytes of every file below ``folder``, sorted. Follow links.

    Raise CheckpointError for a broken or circular link, for a pipe, socket or device, and for a reserved name.
    """
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        for name in folders:
            _check_circle(folder, Path(parent, name))
        for name in names:
            path = Path(parent, name)
            if name in (MANIFEST_FILE, PENDING_FILE):
                _check_is_manifest(path)
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


def _check_is_manifest(path: Path) -> None:
    """Raise CheckpointError for a user's file with the name of a manifest.

    A checkpoint that is reported again has the manifest of its first commit, which is not one of its files.
    """
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
    """Make the directories below ``source`` also below ``target``. Raise OSError.

    Copying files makes only the directories that have files.
    """
    for parent, folders, _ in os.walk(source, followlinks=True):
        for name in folders:
            with contextlib.suppress(FileExistsError, NotADirectoryError):  # another rank has a file of that name
                (target / Path(parent, name).relative_to(source)).mkdir(parents=True, exist_ok=True)


def _check_circle(top: Path, folder: Path) -> None:
    if not folder.is_symlink():
        return
    real, parents = folder.resolve(), folder.relative_to(top).parents
    if any((top / parent).resolve().is_relative_to(real) for parent in parents):
        raise CheckpointError(f"{folder} is a circular link: it is inside {os.readlink(folder)}, to which it leads")


def copy_file(source: Path, target: Path) -> tuple[int, int]:
    """Copy a file and flush it to disk. Return its size in bytes and its crc32. Raise OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _naming(source), source.open("rb", buffering=0) as reader, target.open("wb+", buffering=0) as writer:
        with _naming(target):
            size, crc = _copy_in_kernel(reader.fileno(), writer.fileno())
        buffer = memoryview(bytearray(_COPY_BYTES))
        while count := reader.readinto(buffer):
            written = 0
            with _naming(target):
                while written < count:
                    written += writer.write(buffer[written:count])
            _begin_flush(writer.fileno(), size, count)
            crc = zlib.crc32(buffer[:count], crc)
            size += count
        with _naming(target):
            os.fsync(writer.fileno())
    return size, crc


def _copy_in_kernel(reader: int, writer: int) -> tuple[int, int]:
    """Copy as much as copy_file_range does. Return the size in bytes and the crc32 of that part."""
    parts = _copied_parts(reader, writer)
    if os.fstat(reader).st_size > _HASHED_IN_TURN_BYTES:
        return _hash_alongside(writer, parts)
    return _hash_in_turn(writer, parts)


def _copied_parts(reader: int, writer: int) -> Iterator[tuple[int, int]]:
    """Copy the file in parts with copy_file_range. Yield the start and the size of each part in bytes.

    It takes a third of the CPU time of read and write, and copies nothing where the file system can share the bytes.
    """
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
        yield size, count
        size += count


def _hash_in_turn(fd: int, parts: Iterator[tuple[int, int]]) -> tuple[int, int]:
    """Hash each part of a file after it was copied. Return the size in bytes and the crc32 of all parts."""
    size = crc = 0
    for start, count in parts:
        crc = _hash_part(fd, start, count, crc)
        size += count
    return size, crc


def _hash_alongside(fd: int, parts: Iterator[tuple[int, int]]) -> tuple[int, int]:
    """Do the same as :func:`_hash_in_turn`, in a thread that hashes a part while the next one is copied.

    No lock is taken here: if a signal handler raised just after that, the lock would stay taken and the thread would
    never end. Instead, the sizes of the parts go through a pipe. The thread ends when the pipe is closed, which an
    exception does, too.
    """
    orders, order_fd = os.pipe()
    ended_fd, end = os.pipe()
    result: list[int | BaseException] = []
    size = 0
    with open(ended_fd, "rb", buffering=0) as ended:
        with open(order_fd, "wb", buffering=0) as order:
            own = (os.dup(fd), orders, end)
            try:
                _thread.start_new_thread(_hash_orders, (*own, result))
            except RuntimeError:  # the user may have no more threads
                for descriptor in own:
                    os.close(descriptor)
                return _hash_in_turn(fd, parts)
            with contextlib.suppress(BrokenPipeError):  # the thread has failed
                for start, count in parts:
                    order.write(count.to_bytes(_ORDER_BYTES, sys.byteorder))
                    size = start + count
                order.write(bytes(_ORDER_BYTES))  # end, as a child that was forked meanwhile keeps the pipe open
        ended.read(1)
    [crc] = result
    if isinstance(crc, BaseException):
        raise crc
    return size, crc


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


def _begin_flush(fd: int, start: int, count: int) -> None:
    """Let the kernel write these bytes to disk while the next ones are copied. Only fsync makes them durable."""
    with contextlib.suppress(AttributeError):  # only Linux has the function
        ctypes.CDLL(None).sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def sync_file(path: Path) -> tuple[int, int]:
    """Hash a file and flush it to disk. Return its size in bytes and its crc32. Raise OSError."""
    with _naming(path), path.open("rb") as file:
        size, crc = os.fstat(file.fileno()).st_size, 0
        for start in range(0, size, _KERNEL_COPY_BYTES):
            count = min(_KERNEL_COPY_BYTES, size - start)
            _begin_flush(file.fileno(), start, count)
            crc = _hash_part(file.fileno(), start, count, crc)
        os.fsync(file.fileno())
    return size, crc


def crc32_of(path: Path) -> tuple[int, int]:
    """Return the size in bytes and the crc32 of a file. Raise OSError."""
    size = crc = 0
    buffer = memoryview(bytearray(_COPY_BYTES))
    with path.open("rb", buffering=0) as reader:
        while count := reader.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            size += count
    return size, crc


def write_atomically(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace a file so that readers see the old or the new one, never a part. Raise OSError.

    sync: flush the file to disk first, so that this holds after a power cut, too.
    """
    temporary = path.with_name(f"{path.name}.new")
    try:
        if sync:
            write_and_sync(temporary, data)
        else:
            temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_and_sync(path: Path, data: bytes) -> None:
    """Write a file and flush it to disk. Raise OSError."""
    with _naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError of a read or a write, which has no file name."""
    try:
        yield
    except OSError as error:
        if (
            error.filename is None and error.errno is not None
        ):  # without a number, as from a signal handler, it is not of the file
            error.filename = str(path)
        raise


def sync_directory(path: Path) -> None:
    """Flush a directory to disk, so that renames in it survive a power cut. Raise OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_FULL_DISK = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def is_full_disk(text: str) -> bool:
    """Return whether an error with this text means that a disk is full or a quota is used up."""
    return any(message in text for message in _FULL_DISK)


def full_disk_hint(text: str) -> str:
    """Return advice to append to an error of the storage with this text, or an empty string."""
    return "; free some space there, or choose another storage_path" if is_full_disk(text) else ""
