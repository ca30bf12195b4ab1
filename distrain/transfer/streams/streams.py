"""The protocol of a stream, which carries the content of files between the mover and a host, or between two hosts.

A stream is a pair of descriptors. The server begins with :data:`~distrain.wire.MAGIC`; all bytes before that, such as
the greeting of a login shell, are skipped. Then the other side sends requests, and the server answers them in order.
Further requests may be sent before the first one is answered.

- A header, of a request or of an answer, is its size (4 bytes, big-endian) and JSON. An answer with ``failed`` tells
  why the request could not be carried out; the stream stays usable. ``working`` is not an answer yet: it says, every
  :data:`SIGN_OF_LIFE_S` seconds, that the request is being carried out.
- A part of a file is a number of chunks, and an end mark. A chunk is its size (4 bytes, at most 1 MiB) and so many
  bytes. The end mark is a size of 0. Or it is 0xffffffff and a header with ``failed``, if the rest cannot be read.

The requests, by ``do``. ``items`` are parts of files: name below the directory, first byte, number of bytes.
``staging`` is a directory for files until all have arrived. Each order has one of its own. Its parent must exist.

- ``list`` (folder, files) is answered by the ``sizes`` of the files and all ``folders`` below the folder.
- ``sizes`` (folder, files) is answered by ``sizes``, None for a file that does not exist.
- ``hash`` (folder, files) is answered by ``files``: name, size and crc32 of each.
- ``read`` (folder, items) is answered by the parts, without a header.
- ``write`` (staging, items, is_crc32) is followed by the parts. It is answered by ``digests``: one for each part, a
  crc32 or that of a shipped file.
- ``pull`` (staging, items, is_crc32, peer) is the same with parts that the server reads from another host.
- ``finish`` (folder, staging, files, folders) moves all files to ``folder``, and makes the directories ``folders``.
- ``drop`` (staging) deletes what has arrived.
- ``serve`` (folder, address) is answered by ``port`` and ``secret``; see :mod:`distrain.transfer.streams.peers`.

Runs in: mover, stream server.
"""

from __future__ import annotations

import errno
import json
import os
import select
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.wire.channel import widen_pipe

if TYPE_CHECKING:
    from collections.abc import Callable

Item = tuple[str, int, int]
"""A part of a file: its name, first byte and number of bytes."""

SIGN_OF_LIFE_S = 20.0
MOST_CONTENT = 1 << 20
"""Bytes in a chunk, at most."""
_SIZE_BYTES = 4
_END, _PROBLEM = 0, 0xFFFFFFFF
_LARGEST_HEADER = 256 << 20
_LEAST_ROOM = 64 << 10
"""A chunk begins in the buffer if so much room is left, or all that is left of the part fits."""
_CHATTER_KEPT = 4 << 10
_SILENT = "it does nothing any more"


class StreamEndedError(Exception):
    """The other end of the stream is gone, or sends what is no stream."""


class RefusedError(Exception):
    """The other end has answered why it could not do what it was asked for. The stream stays usable."""


def check_name(name: str) -> str:
    """Return a path below a folder. Raise RefusedError for one that leads out of it, or to the folder itself."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\0" in name or ".." in parts or parts == ["."]:
        raise RefusedError(f"{name!r} is no file below the folder")
    return name


# -- reading ---------------------------------------------------------------------------------------------------------


class Reader:
    """The bytes that arrive over a descriptor, through one buffer. All methods raise StreamEndedError at the end.

    patience_s: seconds to wait for the next bytes, after which the other end counts as gone; None for any time.
    """

    def __init__(self, fd: int, largest_header: int = _LARGEST_HEADER, *, patience_s: float | None = None) -> None:
        widen_pipe(fd)
        self._fd = fd
        self._patience_s = patience_s
        self._largest_header = largest_header
        self._buffer = memoryview(bytearray(MOST_CONTENT))
        self._start = self._end = 0

    def some(self, most: int) -> memoryview:
        """Return the next bytes, at least one, without copying them. They are valid until the next call."""
        if self._start == self._end:
            self._fill()
        start = self._start
        self._start = min(self._end, start + most)
        return self._buffer[start : self._start]

    def _fill(self) -> None:
        if self._patience_s is not None and not _has_bytes(self._fd, self._patience_s):
            raise StreamEndedError(f"it has sent nothing for {self._patience_s:g} s")
        try:
            count = os.readv(self._fd, [self._buffer])
        except BlockingIOError:  # a socket with a time limit
            raise StreamEndedError(_SILENT) from None
        except OSError as error:
            raise StreamEndedError(str(error)) from None
        if not count:
            raise StreamEndedError("it has ended")
        self._start, self._end = 0, count

    def exactly(self, size: int) -> bytes:
        """Return so many bytes."""
        data = bytearray()
        while len(data) < size:
            data += self.some(size - len(data))
        return bytes(data)

    def number(self) -> int:
        """Return the next number of 4 bytes."""
        if self._end - self._start >= _SIZE_BYTES:
            return int.from_bytes(self.some(_SIZE_BYTES), "big")
        return int.from_bytes(self.exactly(_SIZE_BYTES), "big")

    def header(self) -> dict[str, Any]:
        """Return the next header."""
        size = self.number()
        if size > self._largest_header:
            raise StreamEndedError(f"a header of {size} bytes is no header of distrain")
        try:
            header = json.loads(self.exactly(size))
        except ValueError as error:
            raise StreamEndedError(f"a header that is no JSON: {error}") from None
        if not isinstance(header, dict):
            raise StreamEndedError("a header that is no JSON object")
        return header

    def answer(self) -> dict[str, Any]:
        """Return the next header that is an answer. Raise RefusedError if it tells of a failure."""
        while "working" in (header := self.header()):
            pass
        if "failed" in header:
            raise RefusedError(header["failed"])
        return header

    def skip_chatter(self) -> bytes:
        """Read up to the magic. Raise StreamEndedError, with the last bytes as its argument, if there is none."""
        seen = b""
        try:
            while not seen.endswith(wire.MAGIC):
                seen = seen[-_CHATTER_KEPT:] + bytes(self.some(1))
        except StreamEndedError:
            raise StreamEndedError(seen.decode(errors="replace").strip()) from None
        return seen[: -len(wire.MAGIC)]

    def part(
        self, count: int, write: Callable[[memoryview], None], received: Callable[[int], None] = lambda _: None
    ) -> None:
        """Read a part of a file of ``count`` bytes, and hand all to ``write``. ``received`` is told of each chunk.

        Raise RefusedError if the sender could not send all, or an OSError of ``write``, after the end of the part.
        """
        problem: OSError | None = None
        left = count
        while (size := self.number()) not in (_END, _PROBLEM):
            if size > min(left, MOST_CONTENT):
                raise StreamEndedError(f"a chunk of {size} bytes, of which {left} were asked for, is none of distrain")
            left -= size
            received(size)
            while size:
                data = self.some(size)
                size -= len(data)
                if problem is None:
                    try:
                        write(data)
                    except OSError as error:
                        problem = error
        if size == _PROBLEM:
            self.answer()
        if problem is not None:
            raise problem
        if left:
            raise StreamEndedError(f"a part has {count - left} bytes instead of {count}")


def _has_bytes(fd: int, patience_s: float) -> bool:
    """Wait until there is something to read, or the end."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(patience_s * 1000))


# -- writing ---------------------------------------------------------------------------------------------------------


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write bytes to a stream. Raise StreamEndedError if nobody reads them."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except BlockingIOError:
        raise StreamEndedError(_SILENT) from None
    except OSError as error:
        raise StreamEndedError(str(error)) from None


def as_header(header: dict[str, Any]) -> bytes:
    """Return a header as bytes."""
    data = json.dumps(header, separators=(",", ":")).encode()
    return len(data).to_bytes(_SIZE_BYTES, "big") + data


def send_header(fd: int, header: dict[str, Any]) -> None:
    """Send a header. Raise StreamEndedError."""
    write_all(fd, as_header(header))


class PartSender:
    """Sends parts of files. Small ones are sent together: :meth:`flush` sends the last of them.

    Each chunk is read into a buffer, so that its size is known before it is sent. os.sendfile would save 0.2 s of CPU
    time for 1 GB, of the 3 s that ssh takes for it at both ends.

    All methods raise StreamEndedError.
    """

    def __init__(self, fd: int) -> None:
        widen_pipe(fd)
        self._fd = fd
        self._buffer = memoryview(bytearray(MOST_CONTENT + 2 * _SIZE_BYTES))
        self._used = 0

    def send(self, path: str, start: int, count: int, is_needed: Callable[[], bool] = lambda: True) -> None:
        """Send bytes of a file, or why they cannot be read. Stop early once ``is_needed`` returns False."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.send_problem(str(error))
            return
        try:
            self._send_chunks(fd, start, start + count, is_needed)
        except OSError as error:
            error.filename = path
            self.send_problem(str(error))
        finally:
            os.close(fd)

    def _send_chunks(self, fd: int, start: int, end: int, is_needed: Callable[[], bool]) -> None:
        while start < end:
            if not is_needed():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            self._make_room(end - start)
            first = self._used + _SIZE_BYTES
            most = min(end - start, MOST_CONTENT, len(self._buffer) - first - _SIZE_BYTES)
            read = os.preadv(fd, [self._buffer[first : first + most]], start)
            if not read:
                raise OSError(errno.EIO, "the file became shorter while it was read")
            self._number(read)
            self._used += read
            start += read
        self._make_room(_SIZE_BYTES)
        self._number(_END)

    def send_problem(self, text: str) -> None:
        """End a part with the reason why the rest cannot be sent."""
        self.flush()
        write_all(self._fd, _PROBLEM.to_bytes(_SIZE_BYTES, "big") + as_header({"failed": text}))

    def _make_room(self, wanted: int) -> None:
        if len(self._buffer) - self._used - 2 * _SIZE_BYTES < min(wanted, _LEAST_ROOM):
            self.flush()

    def _number(self, number: int) -> None:
        self._buffer[self._used : self._used + _SIZE_BYTES] = number.to_bytes(_SIZE_BYTES, "big")
        self._used += _SIZE_BYTES

    def flush(self) -> None:
        """Send what was kept back."""
        used, self._used = self._used, 0
        write_all(self._fd, self._buffer[:used])
