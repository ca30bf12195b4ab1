"""Frames: messages as bytes. Runs in: anywhere.

A frame consists of the size of its header (4 bytes, big-endian), the size of its body (8 bytes), the header and the
body. The header is JSON: ``{"kind": ..., fields}``. The codec never unpickles the body: it is bytes for the receiver.

The first bytes of an agent are :data:`MAGIC` and a :class:`~distrain.wire.Hello`. Bytes before the magic, such as the
greeting of a login shell, are skipped, and kept for the error message if no magic follows.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from distrain.errors import WireError
from distrain.wire.messages import Message

MAGIC = b"\0distrain\0"
_SIZES = struct.Struct("!IQ")
_LARGEST_HEADER = 64 << 20


def _all_messages(base: type[Message] = Message) -> dict[str, type[Message]]:
    found: dict[str, type[Message]] = {}
    for cls in base.__subclasses__():
        found[cls.__name__] = cls
        found.update(_all_messages(cls))
    return found


MESSAGES = _all_messages()
"""Every message class by its kind."""
_FIELDS = {name: tuple(f.name for f in fields(cls) if f.name != "body") for name, cls in MESSAGES.items()}


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: its kind, the fields of its header, its body, and all its bytes (``raw``)."""

    kind: str
    header: dict[str, Any]
    body: bytes
    raw: bytes

    def message(self) -> Message:
        """Return the message. Raises WireError for an unknown kind or unknown fields."""
        cls = MESSAGES.get(self.kind)
        if cls is None:
            raise WireError(f"unknown message {self.kind!r}")
        values = dict(self.header)
        if "body" in cls.__dataclass_fields__:
            values["body"] = self.body
        try:
            return cls(**values)
        except TypeError as error:
            raise WireError(f"{self.kind}: {error}") from None


def encode(message: Message) -> bytes:
    """Return a message as the bytes of one frame."""
    kind = type(message).__name__
    header = {"kind": kind}
    for name in _FIELDS[kind]:
        header[name] = getattr(message, name)
    head = json.dumps(header, separators=(",", ":")).encode()
    body: bytes = getattr(message, "body", b"")
    return b"".join((_SIZES.pack(len(head), len(body)), head, body))


class Decoder:
    """A decoder of frames from bytes that arrive in any pieces.

    greeting: skip all bytes before :data:`MAGIC`; ``chatter`` has them.
    """

    _CHATTER_KEPT: ClassVar[int] = 16 << 10

    def __init__(self, *, greeting: bool = False) -> None:
        self._buffer = bytearray()
        self._greeted = not greeting
        self._skipped = b""

    @property
    def chatter(self) -> bytes:
        """The bytes before the magic, or all bytes if there was none; the last 16 KiB of them."""
        return self._skipped if self._greeted else self._skipped + bytes(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete now.

        Raises WireError for bytes that are no frame: in the next call, if there were frames before them.
        """
        self._buffer += data
        if not self._greeted and not self._skip_to_magic():
            return []
        frames: list[Frame] = []
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
        except WireError:
            if not frames:
                raise
        return frames

    def _skip_to_magic(self) -> bool:
        found = self._buffer.find(MAGIC)
        skipped = found if found >= 0 else max(0, len(self._buffer) - len(MAGIC) + 1)
        self._skipped = (self._skipped + bytes(self._buffer[:skipped]))[-self._CHATTER_KEPT :]
        del self._buffer[: skipped + (len(MAGIC) if found >= 0 else 0)]
        self._greeted = found >= 0
        return self._greeted

    def _next(self) -> Frame | None:
        if len(self._buffer) < _SIZES.size:
            return None
        head_size, body_size = _SIZES.unpack_from(self._buffer)
        if head_size > _LARGEST_HEADER:
            raise WireError(f"a header of {head_size} bytes cannot be ours")
        end = _SIZES.size + head_size + body_size
        if len(self._buffer) < end:
            return None
        frame = _parse(bytes(memoryview(self._buffer)[:end]), _SIZES.size + head_size)
        del self._buffer[:end]
        return frame


def _parse(raw: bytes, body_at: int) -> Frame:
    try:
        header = json.loads(raw[_SIZES.size : body_at])
        return Frame(kind=str(header.pop("kind")), header=header, body=raw[body_at:], raw=raw)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WireError(f"a frame whose header is not ours: {error}") from None
