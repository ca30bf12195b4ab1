"""Bytes that a process prints, cut into lines that a console may show. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import re

from distrain.system.text import without_controls

BAR_INTERVAL_S = 30.0
"""Seconds between two states of a progress bar on a console without a footer."""
_LONGEST_LINE = 64 << 10
_LONGEST_BAR = 1 << 10
_INNER_BAR = re.compile(rb"\n+\r([^\n]*?)(?:\x1b\[A)+")
"""A state of a bar below the open one, as tqdm draws it: down, the state, and up again."""
_CONTROL_BYTES = bytes(byte for byte in range(0x80) if not without_controls(chr(byte)))


class LineCutter:
    """A cutter of bytes into blocks of whole lines.

    Of a line that stays open, such as a progress bar, it returns the current state every :data:`BAR_INTERVAL_S`, unless
    ``has_footer``.
    """

    def __init__(self, *, has_footer: bool = False) -> None:
        self._has_footer = has_footer
        self._rest = b""
        self._shown_at = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        begins = not self._rest
        end = data.rfind(b"\n") + 1
        block, self._rest = (self._rest + data[:end], data[end:]) if end else (b"", self._rest + data)
        if block or begins:
            self._shown_at = now
        is_due = self.is_bar and not self._has_footer and now >= self._shown_at + BAR_INTERVAL_S
        if is_due or len(self._rest) > _LONGEST_LINE:
            self._shown_at = now
            block += self.end()
        return block

    @property
    def is_bar(self) -> bool:
        """True if the open line is a progress bar."""
        return b"\r" in self._rest

    @property
    def bar(self) -> str:
        """The state of the progress bar that is open, or nothing."""
        return _clean(self._rest[-_LONGEST_BAR:]).decode() if self.is_bar else ""

    def end(self) -> bytes:
        """Return the open line, ended."""
        rest, self._rest = self._rest, b""
        return rest + b"\n" if rest else b""


def with_one_bar(data: bytes) -> bytes:
    """Return output in which a bar below another one is a state of that one, which stays open."""
    if b"\x1b[A" not in data:
        return data
    return _INNER_BAR.sub(lambda inner: b"\r" + inner[1] if inner[1].strip() else b"", data)


def readable(block: bytes, rank: int) -> bytes:
    """Return lines of a rank without what must not be shown, and without the prefix of torch."""
    block, prefix_of_torch = _clean(block), f"[rank{rank}]:".encode()
    if prefix_of_torch in block:
        for prefix in (prefix_of_torch + b" ", prefix_of_torch):
            block = (b"\n" + block).replace(b"\n" + prefix, b"\n")[1:]
    return block


def _clean(block: bytes) -> bytes:
    """Return lines as they may appear on a console: the last state of each line, in UTF-8, without control characters.

    Ordinary lines come back as they are. The time for that is a small part of the time to print them.
    """
    if block.isascii() and not any(byte in block for byte in _CONTROL_BYTES):
        return block
    lines = block.decode(errors="replace").split("\n")
    if b"\r" in block:
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return without_controls("\n".join(lines)).encode()
