"""Parts of files that arrive over a stream: written, hashed, and flushed to disk. Runs in: mover, stream server."""

from __future__ import annotations

import hashlib
import os
import zlib
from functools import partial
from typing import TYPE_CHECKING

from distrain.storage.flushing import begin_flush
from distrain.transfer.streams.streams import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.transfer.streams.streams import Item, Reader

_FLUSHED_BYTES = 8 << 20
"""Bytes of a file after which the kernel begins to write them to disk."""
_CRC32 = "crc32:"


class _Crc32:
    """A crc32, with the interface of a hash of hashlib."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview) -> None:
        """Hash more bytes."""
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        """Return the digest of all bytes."""
        return as_crc32(self._value)


def as_crc32(number: int) -> str:
    """Return a crc32 as :class:`~distrain.wire.Deliver` has it."""
    return f"{_CRC32}{number}"


def crc32_of(digest: str) -> int | None:
    """Return the number in a digest that is a crc32, None for another one."""
    return int(digest.removeprefix(_CRC32)) if digest.startswith(_CRC32) else None


class ArrivingPart:
    """A part of a file that is written and hashed while it arrives. A context manager. Raises OSError.

    The file is made if it does not exist. is_crc32: the digest is a crc32, or else as
    :func:`~distrain.wire.shipped_file.digest_of` returns it. mode: permission bits of a new file. size: that of the
    whole file, if there may be a larger one already.
    """

    def __init__(
        self, path: str, start: int, *, is_crc32: bool = True, mode: int = 0o666, size: int | None = None
    ) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        if size is not None and os.fstat(self._fd).st_size > size:
            os.ftruncate(self._fd, size)
        self._at = self._flushed = start
        self._hash = _Crc32() if is_crc32 else hashlib.blake2b(digest_size=20)

    def __enter__(self) -> ArrivingPart:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, data: memoryview) -> None:
        """Write and hash the next bytes."""
        self._hash.update(data)
        try:
            while data:
                written = os.pwrite(self._fd, data, self._at)
                self._at += written
                data = data[written:]
        except OSError as error:
            error.filename = self._path
            raise
        if self._at - self._flushed >= _FLUSHED_BYTES:
            self.begin_flush()

    def begin_flush(self) -> None:
        """Let the kernel write to disk what has arrived."""
        begin_flush(self._fd, self._flushed, self._at - self._flushed)
        self._flushed = self._at

    def digest(self) -> str:
        """Return the digest of all bytes."""
        return self._hash.hexdigest()


def receive_parts(
    reader: Reader,
    items: Sequence[Item],
    open_part: Callable[[int], ArrivingPart],
    received: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Store parts that arrive, and return their digests. Raise OSError, RefusedError or StreamEndedError.

    open_part: gets the number of the item. All parts are read, also after an error; the first one is raised.
    """
    digests: list[str] = []
    problem: Exception | None = None
    for number, (_, _, count) in enumerate(items):
        try:
            digests.append(_receive_part(reader, count, partial(open_part, number), received))
        except (OSError, RefusedError) as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return digests


def _receive_part(
    reader: Reader, count: int, open_part: Callable[[], ArrivingPart], received: Callable[[int], None]
) -> str:
    try:
        part = open_part()
    except (OSError, RefusedError):
        reader.part(count, lambda _: None, received)
        raise
    with part:
        reader.part(count, part.write, received)
        part.begin_flush()
    return part.digest()
