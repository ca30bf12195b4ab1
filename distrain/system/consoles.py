"""Threads that write to the consoles, so that Ctrl-S in a terminal or a paused ``less`` does not stop a run.

Lines can be pinned to the bottom of a terminal (:class:`Footer`). Runs in: coordinator.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from collections import deque
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_QUEUED_BYTES = 4 << 20
"""Output that may wait for a slow console. After that callers wait, and then leave lines out."""
_WRITE_BYTES = 64 << 10
"""Pieces of output that are written together."""
_PATIENCE_S = 0.1
"""Seconds to wait for a slow console. After that no caller waits until the console accepts output again."""
_FEWEST_COLUMNS, _FEWEST_ROWS = 30, 12
"""The smallest terminal that has room for a footer."""
_CLEAR = b"\r\x1b[J"
"""Delete everything from the line of the cursor on."""

_lock = threading.Lock()
_writers: dict[tuple[int, int], _Writer] = {}
"""Writers by device and inode: stdout and stderr are often one terminal, which needs one order of lines."""
_runs = 0


@contextlib.contextmanager
def console_threads() -> Iterator[None]:
    """Write to the consoles in threads within the block. At its end, wait until the consoles show everything."""
    global _runs
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # earlier output of the user comes first
    with _lock:
        _runs += 1
    try:
        yield
    finally:
        try:
            for writer in list(_writers.values()):
                writer.drain()
        finally:
            with _lock:
                _runs -= 1
                if not _runs:
                    for writer in _writers.values():
                        writer.close()
                    _writers.clear()


def _forget_in_child() -> None:
    """Let a child of the user's ``os.fork()``, which has no such threads, write to the consoles itself."""
    global _runs, _lock
    for writer in _writers.values():
        os.close(writer.fd)
    _runs, _lock = 0, threading.Lock()
    _writers.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def write_to(console: IO[str], text: str | bytes) -> None:
    """Print text, through the console's thread if there is one. Raises OSError or ValueError for a closed console.

    text: bytes must be UTF-8. Most consoles need no other encoding.
    """
    encoding = getattr(console, "encoding", None) or "utf-8"
    if isinstance(text, bytes) and encoding.lower() not in ("utf-8", "utf8"):
        text = text.decode()
    data = text if isinstance(text, bytes) else text.encode(encoding, errors="replace")
    writer = _writer_of(console)
    if writer is None:
        console.write(data.decode(encoding))
        console.flush()
    else:
        writer.add(data)


def _writer_of(console: IO[str]) -> _Writer | None:
    """Return the writer of a standard stream, or None if the caller should write itself.

    The caller writes outside of runs, and to streams that are not the interpreter's own, such as a notebook's.
    """
    if type(console) is not io.TextIOWrapper:
        return None
    with _lock:
        if not _runs:
            return None
        status = os.fstat(console.fileno())
        key = (status.st_dev, status.st_ino)
        if key not in _writers:
            try:
                _writers[key] = _Writer(os.dup(console.fileno()))
            except RuntimeError:  # the user may have no more threads
                return None
        return _writers[key]


class Footer:
    """Lines at the bottom of the terminal of this process. Everything else is printed above them.

    The cursor rests on an empty line above the footer. So the footer can be deleted without knowing how many lines it
    has, which changes when the terminal is resized; and a print that does not come through here spoils little.
    Within the life of a footer, ``sys.stdout`` and ``sys.stderr`` are replaced, so that prints come through here.
    """

    @classmethod
    def pin(cls) -> Footer | None:
        """Return a new footer, or None if stdout and stderr are not one terminal with room for it.

        Call it within :func:`console_threads`.
        """
        if any(type(stream) is not io.TextIOWrapper for stream in (sys.stdout, sys.stderr)):
            return None
        try:
            columns, rows = os.get_terminal_size(sys.stderr.fileno())
            is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
            writer, other = _writer_of(sys.stderr), _writer_of(sys.stdout)
        except (OSError, ValueError):
            return None
        is_large = columns >= _FEWEST_COLUMNS and rows >= _FEWEST_ROWS
        if not (is_terminal and is_large and writer) or writer is not other or writer.has_footer:
            return None
        return cls(writer)

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self._streams = sys.stdout, sys.stderr
        self._own = tuple(_above(stream) for stream in self._streams)
        sys.stdout, sys.stderr = self._own
        writer.has_footer = True

    def width(self) -> int:
        """Return the columns of the terminal."""
        try:
            return os.get_terminal_size(self._writer.fd).columns
        except OSError:  # it was closed
            return 80

    def show(self, text: str) -> None:
        """Replace the footer.

        text: lines with their ends, each narrower than the terminal. Colours are allowed.
        """
        height = text.count("\n")
        self._writer.set_footer(f"\n{text}\x1b[{height + 1}A".encode() if height else b"")

    def print_above(self, lines: bytes) -> None:
        """Print whole lines of UTF-8."""
        self._writer.add(lines)

    def close(self) -> None:
        """Remove the footer, and give ``sys.stdout`` and ``sys.stderr`` back."""
        for stream in self._own:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if (sys.stdout, sys.stderr) == self._own:
            sys.stdout, sys.stderr = self._streams
        self._writer.set_footer(b"")
        self._writer.has_footer = False


def has_footer(console: IO[str]) -> bool:
    """Return whether a footer is pinned to this console."""
    try:
        writer = _writer_of(console)
    except (OSError, ValueError):
        return False
    return writer is not None and writer.has_footer


def _above(console: IO[str]) -> io.TextIOWrapper:
    """Return a stream whose lines are printed above the footer."""
    return io.TextIOWrapper(_WholeLines(console), encoding="utf-8", errors="replace", line_buffering=True)


class _WholeLines(io.BufferedIOBase):
    """Print to a console, but whole lines only."""

    name = "<above the footer>"

    def __init__(self, console: IO[str]) -> None:
        self._console = console
        self._rest = b""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._console.fileno()

    def write(self, data: Any) -> int:
        whole, newline, rest = bytes(data).rpartition(b"\n")
        if newline:
            write_to(self._console, self._rest + whole + newline)
            self._rest = b""
        self._rest += rest
        return len(data)


class _Writer:
    """The thread that writes to one console, and its queue. It owns ``fd``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.has_footer = False
        self._footer = b""
        self._is_footer_new = False
        self._is_footer_drawn = False
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._lines_left_out = 0
        self._stuck = False
        self._ended = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="distrain-console", daemon=True).start()

    def add(self, data: bytes) -> None:
        with self._changed:
            if not (self._has_room() or self._stuck):
                self._stuck = not self._changed.wait_for(self._has_room, _PATIENCE_S)
            if self._has_room():
                self._report_lines_left_out()
                self._append(data)
            else:
                self._lines_left_out += data.count(b"\n")

    def _has_room(self) -> bool:
        return self._queued_bytes <= _MOST_QUEUED_BYTES

    def _append(self, data: bytes) -> None:
        self._queue.append(data)
        self._queued_bytes += len(data)
        self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything is shown."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queued_bytes and not self._is_footer_new)

    def set_footer(self, footer: bytes) -> None:
        """Show this below all output from now on. It must leave the cursor where it was."""
        with self._changed:
            self._footer, self._is_footer_new = footer, True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_footer_new or self._ended)
                if self._ended:
                    os.close(self.fd)
                    return
                data, footer = self._take(), self._footer
            try:
                _write_all(self.fd, b"".join((_CLEAR * self._is_footer_drawn, data, footer)))
                self._is_footer_drawn = bool(footer)
            except OSError:  # the console is closed; the logs have everything
                with self._changed:
                    self._queue.clear()
                    self._queued_bytes = len(data)
            with self._changed:
                self._queued_bytes -= len(data)
                self._stuck = False
                self._is_footer_new = self._footer is not footer
                if not self._queue:
                    self._report_lines_left_out()
                self._changed.notify_all()

    def _take(self) -> bytes:
        """Return the first pieces of the queue, to be written at once."""
        pieces: list[bytes] = []
        size = 0
        while self._queue and (not pieces or size + len(self._queue[0]) <= _WRITE_BYTES):
            pieces.append(self._queue.popleft())
            size += len(pieces[-1])
        return b"".join(pieces)

    def _report_lines_left_out(self) -> None:
        if self._lines_left_out:
            text = f"{self._lines_left_out} lines are not shown, as this console was too slow; the logs have them"
            self._lines_left_out = 0
            self._append(f"distrain: {text}\n".encode())


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another program has made the terminal non-blocking
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
