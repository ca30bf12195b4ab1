"""Frames: messages as bytes. Runs in: anywhere.

A frame consists of the size of its header (4 bytes, big-endian), the size of its body (8 bytes), the header and the
body. The header is JSON: ``{"kind": ..., fields}``, without fields that have their default value. The codec never
unpickles the body: it is bytes for the receiver.

The first bytes of an agent are :data:`MAGIC` and a :class:`~distrain.wire.Hello`. Bytes before the magic, such as the
greeting of a login shell, are skipped, and kept for the error message if no magic follows.
"""

from __future__ import annotations

import json
import struct
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

from distrain.errors import WireError
from distrain.wire import messages
from distrain.wire.messages import Message

MAGIC = b"\0distrain\0"
_SIZES = struct.Struct("!IQ")
_LARGEST_HEADER = 64 << 20
_CLASSES = [cls for cls in vars(messages).values() if isinstance(cls, type) and issubclass(cls, Message)]
MESSAGES = {cls.__name__: cls for cls in _CLASSES if cls is not Message}
"""Every message class by its kind."""
_FIELDS = {kind: tuple((f.name, f.default) for f in fields(cls) if f.name != "body") for kind, cls in MESSAGES.items()}
"""By kind: the fields of the header with their defaults."""
_WITH_BODY = {kind for kind, cls in MESSAGES.items() if "body" in cls.__dataclass_fields__}
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DECODER = json.JSONDecoder()


class Frame(NamedTuple):
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
        values = {**self.header, "body": self.body} if self.kind in _WITH_BODY else self.header
        try:
            return cls(**values)
        except TypeError as error:
            raise WireError(f"{self.kind}: {error}") from None


def encode(message: Message) -> bytes:
    """Return a message as the bytes of one frame."""
    kind = type(message).__name__
    header = {"kind": kind}
    for name, default in _FIELDS[kind]:
        value = getattr(message, name)
        if value is not default:
            header[name] = value
    head = _ENCODER.encode(header).encode()
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

    def await_greeting(self) -> None:
        """Skip what comes until the next magic."""
        self._greeted = False

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete now.

        Raises WireError for bytes that aren't a frame: in the next call, if there were frames before them.
        """
        source: bytes | bytearray = data
        if self._buffer or not self._greeted:
            self._buffer += data
            source = self._buffer
            if not (self._greeted or self._skip_to_magic()):
                return []
        frames: list[Frame] = []
        end = 0
        with memoryview(source) as view:
            try:
                while (frame := _first_frame(view[end:])) is not None:
                    frames.append(frame)
                    end += len(frame.raw)
            except WireError:
                if not frames:
                    raise
        if source is data:
            self._buffer += data[end:]
        else:
            del self._buffer[:end]
        return frames

    def _skip_to_magic(self) -> bool:
        found = self._buffer.find(MAGIC)
        skipped = found if found >= 0 else max(0, len(self._buffer) - len(MAGIC) + 1)
        self._skipped = (self._skipped + bytes(self._buffer[:skipped]))[-self._CHATTER_KEPT :]
        del self._buffer[: skipped + (len(MAGIC) if found >= 0 else 0)]
        self._greeted = found >= 0
        return self._greeted


def _first_frame(data: memoryview) -> Frame | None:
    """Return the frame at the beginning of the data, or None if it is not complete. Raises WireError."""
    if len(data) < _SIZES.size:
        return None
    head_size, body_size = _SIZES.unpack_from(data)
    if head_size > _LARGEST_HEADER:
        raise WireError(f"not a distrain header ({head_size} bytes)")
    body_at = _SIZES.size + head_size
    if len(data) < body_at + body_size:
        return None
    raw = bytes(data[: body_at + body_size])
    try:
        header, end = _DECODER.raw_decode(raw[_SIZES.size : body_at].decode())
        if end != head_size:
            raise ValueError("there is more after its end")
        return Frame(kind=str(header.pop("kind")), header=header, body=raw[body_at:], raw=raw)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WireError(f"a frame whose header is not distrain's: {error}") from None
