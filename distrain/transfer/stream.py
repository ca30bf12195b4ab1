"""Streams, which carry the content of files between a mover and a host. Runs in: mover, stream server.

A stream is a channel of its own (:mod:`distrain.wire.channel`). The mover sends one
:class:`~distrain.wire.AskForFiles` after the other, and reads the answer to each, a :class:`~distrain.wire.FileData`:

- ``put`` is answered, and followed by contents and a FileData with their ``crcs``. The server stores them in
  ``staging``, compares them, and renames it to ``folder``. Then it answers again.
- ``get`` is answered with the ``sizes`` of the files and all ``folders`` in the directory; then come the contents, and
  another answer with the ``crcs`` of the files, and name, size and crc32 of each of the ``others``.
- ``list`` is answered with the ``files`` of the directory.
- ``delete`` deletes files, and directories that are empty then.

Contents are FileData with a ``body``, for one file after the other. One with ``failed`` may take the place of any other
message.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections import deque
from typing import TYPE_CHECKING

from distrain import wire
from distrain.errors import DistrainError
from distrain.storage.file_transfer import naming

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distrain.wire.channel import Channel

_CHUNK_BYTES = 256 << 10


class StreamEndedError(DistrainError):
    """The other end of the stream is gone, or sends something else than this protocol."""


class RefusedError(OSError):
    """The other end could not do what it was asked for, and says why."""


def checked_name(name: str) -> str:
    """Return a path below a folder. Raise RefusedError for one that leads out of it, or to the folder itself."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\0" in name or ".." in parts or parts == ["."]:
        raise RefusedError(f"{name!r} is not a file below the folder")
    return name


class StreamEnd:
    """One end of a stream. All methods raise StreamEndedError if there is no other end."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._frames: deque[wire.Frame] = deque()

    def send(self, message: wire.Message) -> None:
        """Send a message, and wait until the kernel has it."""
        try:
            self.channel.send(message)
        except OSError as error:
            raise StreamEndedError(str(error)) from None

    def next(self) -> wire.Message:
        """Return the next message."""
        while not self._frames:
            self._frames.extend(self.channel.wait())
            if not self._frames and self.channel.at_end:
                raise StreamEndedError(self.channel.broken or "it has ended")
        return self._frames.popleft().message()

    def answer(self) -> wire.FileData:
        """Return the next bytes, or the next answer. Raise RefusedError if it tells of a failure."""
        answer = self.next()
        if not isinstance(answer, wire.FileData):
            raise StreamEndedError(f"not an answer: {answer!r:.200}")
        if answer.failed is not None:
            raise RefusedError(answer.failed)
        return answer

    def send_contents(self, files: Iterable[tuple[str, int]]) -> list[int]:
        """Send the contents of files, given by path and size. Return the crc32 of each.

        Raise OSError if a file cannot be read, or has become shorter.
        """
        crcs = []
        for path, size in files:
            crc = 0
            with open(path, "rb") as file, naming(path):
                while size:
                    if not (data := file.read(min(size, _CHUNK_BYTES))):
                        raise OSError(errno.EIO, "the file became shorter while it was read")
                    crc, size = zlib.crc32(data, crc), size - len(data)
                    self.send(wire.FileData(body=data))
            crcs.append(crc)
        return crcs

    def receive_contents(self, folder: str, sizes: Mapping[str, int]) -> wire.FileData:
        """Store the files that arrive in a directory, and return the answer after them.

        sizes: by their paths below the directory. Raise OSError if the other end could not read a file, or if one has
        been damaged.
        """
        crcs = [self._receive(os.path.join(folder, checked_name(name)), size) for name, size in sizes.items()]
        end = self.answer()
        for name, found, sent in zip(sizes, crcs, end.crcs, strict=True):
            if found != sent:
                raise RefusedError(f"{name} was damaged on the way")
        return end

    def _receive(self, path: str, size: int) -> int:
        """Store the next file, and return its crc32. Raise OSError."""
        crc = 0
        with naming(path), open(path, "wb") as file:  # some file servers tell only at its end of a full disk
            while size:
                if not (data := self.answer().body):
                    raise RefusedError(f"{path} did not come whole")
                crc, size = zlib.crc32(data, crc), size - len(data)
                file.write(data)
        return crc
