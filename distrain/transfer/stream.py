"""The protocol of a stream, which carries the content of files between the mover and a host.

A stream is a pair of descriptors. The server on the host begins with :data:`~distrain.wire.MAGIC`; all bytes before
that, such as the greeting of a login shell, are skipped. Then the mover sends one request after the other, and reads
the answer to each. A header is its size (4 bytes, big-endian) and JSON. Contents are the bytes of all files, one after
the other; the header before them has their sizes. An end that cannot send what it has announced closes the stream.

- ``put`` (folder, staging, folders, files) is answered by a header, and followed by contents and a header with their
  ``crcs``. The server stores them in ``staging``, compares them, and renames it to ``folder``. The answer is a header.
- ``get`` (folder, files, others) is answered by a header with the ``sizes`` of the files and all ``folders`` in the
  directory; then come the contents, and a header with the ``crcs`` of the files, and name, size and crc32 of each of
  the ``others``.
- ``list`` (folder) is answered by a header with a
  :class:`~distrain.wire.shipped_file.ShippedFile` for each of the ``files`` in a directory.
- ``delete`` (folder, files) is answered by an empty header. Directories that are empty then are deleted, too.

A header with ``failed`` takes the place of any other answer, and is the last one: the mover closes the stream then,
once it has sent the contents that it has announced.

Runs in: mover, stream server.
"""

from __future__ import annotations

import errno
import io
import json
import os
import zlib
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.errors import DistrainError
from distrain.storage.flushing import begin_flush, naming
from distrain.wire.channel import widen_pipe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CHUNK_BYTES = 1 << 20
_SIZE_BYTES = 4
_LARGEST_HEADER = 256 << 20
_CHATTER_KEPT = 4 << 10
_FLUSHED_BYTES = 8 << 20
"""Bytes of a file after which the kernel begins to write them to disk."""


class StreamEndedError(DistrainError):
    """The other end of the stream is gone, or sends something else than this protocol."""


class RefusedError(DistrainError):
    """The other end could not do what it was asked for, and says why. It carries out nothing else then."""


def checked_name(name: str) -> str:
    """Return a path below a folder. Raise RefusedError for one that leads out of it, or to the folder itself."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\0" in name or ".." in parts or parts == ["."]:
        raise RefusedError(f"{name!r} is not a file below the folder")
    return name


# -- reading ---------------------------------------------------------------------------------------------------------


class Reader:
    """The bytes that arrive over a descriptor, through one buffer. All methods raise StreamEndedError or OSError."""

    def __init__(self, fd: int) -> None:
        widen_pipe(fd)
        self._file = io.BufferedReader(io.FileIO(fd, closefd=False), _CHUNK_BYTES)

    def some(self, most: int) -> bytes:
        """Return the next bytes, at least one."""
        if data := self._file.read1(min(most, _CHUNK_BYTES)):
            return data
        raise StreamEndedError("it has ended")

    def exactly(self, size: int) -> bytes:
        """Return so many bytes."""
        data = self._file.read(size) or b""  # None from a socket that was silent for too long
        if len(data) < size:
            raise StreamEndedError("it has ended")
        return data

    def header(self) -> dict[str, Any]:
        """Return the next header. Raise RefusedError if it tells of a failure."""
        size = int.from_bytes(self.exactly(_SIZE_BYTES), "big")
        if size > _LARGEST_HEADER:
            raise StreamEndedError(f"not a distrain header ({size} bytes)")
        header: dict[str, Any] = json.loads(self.exactly(size))
        if "failed" in header:
            raise RefusedError(header["failed"])
        return header

    def skip_chatter(self) -> None:
        """Read up to the magic. Raise StreamEndedError, with the last bytes as its argument, if there is none."""
        seen = b""
        try:
            while not seen.endswith(wire.MAGIC):
                seen = seen[-_CHATTER_KEPT:] + self.some(1)
        except StreamEndedError:
            raise StreamEndedError(seen.decode(errors="replace").strip()) from None


def receive_contents(reader: Reader, folder: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Store the files that arrive in a directory, and return the header after them.

    sizes: by their paths below the directory. Raise OSError, StreamEndedError, and RefusedError if the other end could
    not read a file, or if one has been damaged.
    """
    crcs = [_receive(reader, os.path.join(folder, checked_name(name)), size) for name, size in sizes.items()]
    end = reader.header()
    for name, found, sent in zip(sizes, crcs, end["crcs"], strict=True):
        if found != sent:
            raise RefusedError(f"{name} was damaged on the way")
    return end


def _receive(reader: Reader, path: str, size: int) -> int:
    """Store the next file, and return its crc32. Raise OSError or StreamEndedError."""
    crc, start, flushed = 0, 0, 0
    with naming(path), open(path, "wb", buffering=0) as file:  # some file servers tell only at its end of a full disk
        while start < size:
            data = memoryview(reader.some(size - start))
            crc = zlib.crc32(data, crc)
            start += len(data)
            while data:
                data = data[file.write(data) :]
            if start - flushed >= _FLUSHED_BYTES or start == size:
                begin_flush(file.fileno(), flushed, start - flushed)
                flushed = start
    return crc


# -- writing ---------------------------------------------------------------------------------------------------------


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write bytes to a stream. Raise StreamEndedError if nobody reads them."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError as error:
        raise StreamEndedError(str(error)) from None


def send_header(fd: int, header: dict[str, Any]) -> None:
    """Send a header. Raise StreamEndedError."""
    data = json.dumps(header, separators=(",", ":")).encode()
    write_all(fd, len(data).to_bytes(_SIZE_BYTES, "big") + data)


def send_contents(fd: int, files: Sequence[tuple[str, int]]) -> list[int]:
    """Send the contents of files, given by path and size. Return the crc32 of each.

    Raise OSError if a file cannot be read, or has become shorter: then the stream has to be closed. Raise
    StreamEndedError.
    """
    widen_pipe(fd)
    buffer, crcs = memoryview(bytearray(_CHUNK_BYTES)), []
    for path, size in files:
        crc = 0
        with open(path, "rb", buffering=0) as file, naming(path):
            while size:
                read = file.readinto(buffer[:size])
                if not read:
                    raise OSError(errno.EIO, "the file became shorter while it was read")
                crc, size = zlib.crc32(buffer[:read], crc), size - read
                write_all(fd, buffer[:read])
        crcs.append(crc)
    return crcs
