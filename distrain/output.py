"""What workers print: whole lines with the rank in front on the console, raw bytes in one file per rank.

Runs in: coordinator.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.loop import Loop

__all__ = [
    "RankOutput",
    "RankOutputs",
    "ReportLines",
    "log_level",
    "patient_consoles",
    "say",
    "warn",
    "without_controls",
]

_LONGEST_LINE = 64 << 10
_LINES_KEPT = 100
_LONGEST_KEPT = 2 << 10
REPORT_INTERVAL_S = 0.5
"""Between two report lines on the console; metrics.jsonl has them all."""
PROGRESS_INTERVAL_S = 5.0
"""Between two states of a progress bar on the console."""


def say(text: str) -> None:
    """One line on how the run goes."""
    _logger.info(text)


def warn(text: str) -> None:
    """One line that the user should read."""
    _logger.warning(text)


class _Console(logging.Handler):
    """Our lines on stderr, which leaves stdout to the workers."""

    def emit(self, record: logging.LogRecord) -> None:
        _print(sys.stderr, f"distrain: {record.getMessage()}\n")


_logger = logging.getLogger("distrain")
_logger.addHandler(_Console())
_logger.setLevel(logging.INFO)
_logger.propagate = False


@contextlib.contextmanager
def log_level(level: str) -> Iterator[None]:
    """Show only what has at least this level, as ``logging`` calls it. Of several runs at once, the last to begin
    decides among those that have not ended."""
    global _usual_level
    mine = object()
    with _levels_lock:
        if not _levels:
            _usual_level = _logger.level
        _levels[mine] = level
        _logger.setLevel(level)
    try:
        yield
    finally:
        with _levels_lock:
            del _levels[mine]
            _logger.setLevel(next(reversed(_levels.values()), _usual_level))


_levels: dict[object, str] = {}
"""Of the runs of this process that have not ended, in the order in which they began."""
_usual_level: int | str = logging.INFO
_levels_lock = threading.Lock()


def _print(console: IO[str] | None, text: str) -> None:
    """A console that has gone away (a closed terminal, ``| head``) is no reason to end a training; the logs go on."""
    if console is None:  # a process without standard streams, such as a daemon
        return
    encoding = getattr(console, "encoding", None) or "utf-8"
    data = text.encode(encoding, errors="replace")
    with contextlib.suppress(OSError, ValueError):
        if _backlogs is not None and _may_block(console):
            console.flush()
            _backlogs.of(console).add(data)
        else:
            console.write(data.decode(encoding))
            console.flush()


# -- consoles that take no more ---------------------------------------------------------------------------------------

_MOST_UNSHOWN = 1 << 20
_TERMINAL_BYTES = 512
"""What a terminal that takes anything takes at once; a pipe takes PIPE_BUF."""
_backlogs: _Backlogs | None = None
"""None: we wait for consoles."""


class _Backlog:
    """What a console has yet to show: a terminal after Ctrl-S, or a pipe into a paused ``less``."""

    def __init__(self, fd: int, at_once: int, stuck_after_s: float | None) -> None:
        self.fd = fd
        self._stuck_after_ms = None if stuck_after_s is None else 1000 * stuck_after_s
        self.unshown = bytearray()
        self._at_once = at_once
        self._dropped = 0
        self._stuck = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def add(self, data: bytes) -> None:
        """Show it now if the console takes it, else later, or never if there is too much of it."""
        self.show()
        while len(self.unshown) > _MOST_UNSHOWN and not self._stuck:
            self._stuck = not self._poll.poll(self._stuck_after_ms)
            self.show()
        if len(self.unshown) > _MOST_UNSHOWN:
            self._dropped += data.count(b"\n")
        else:
            self.unshown += data
            self.show()

    def show(self, *, wait: bool = False) -> None:
        """As much as the console takes now, or all of it; nothing, if it has gone away."""
        try:
            while self.unshown and (wait or self._poll.poll(0)):
                del self.unshown[: os.write(self.fd, self.unshown[: self._at_once])]
                self._stuck = False
        except OSError:
            self.unshown.clear()
            self._dropped = 0
        if self._dropped and not self.unshown:
            text = f"distrain: {self._dropped} lines are not shown, as this console was blocked; the logs have them\n"
            self.unshown += text.encode()
            self._dropped = 0
            self.show(wait=wait)


class _Backlogs(dict[int, _Backlog]):
    """By descriptor."""

    def __init__(self, stuck_after_s: float | None) -> None:
        super().__init__()
        self._stuck_after_s = stuck_after_s

    def of(self, console: IO[str]) -> _Backlog:
        fd = console.fileno()
        if fd not in self:
            at_once = _TERMINAL_BYTES if console.isatty() else select.PIPE_BUF
            self[fd] = _Backlog(fd, at_once, self._stuck_after_s)
        return self[fd]


def _may_block(console: IO[str]) -> bool:
    """Whether this is a stream of the interpreter's, to something that may not be read for long."""
    if type(console) is not io.TextIOWrapper:
        return False
    mode = os.fstat(console.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or console.isatty()


@contextlib.contextmanager
def patient_consoles(loop: Loop, stuck_after_s: float | None) -> Iterator[Callable[[], None]]:
    """Show what a console does not take when it does, without waiting for it: up to a MiB, beyond which a slow console
    is waited for. One that takes nothing for ``stuck_after_s`` (None: there is no hurry) is not any more, and in the
    end shows how many lines it has missed. Yields what is to be called before each turn of ``loop``. After the last
    one, waits until all is shown."""
    global _backlogs
    before = _backlogs
    mine = _backlogs = _Backlogs(stuck_after_s)

    def watch() -> None:
        for backlog in mine.values():
            loop.on_writable(backlog.fd, backlog.show if backlog.unshown else None)

    try:
        yield watch
    finally:
        _backlogs = before
        for backlog in mine.values():
            loop.forget(backlog.fd)
            backlog.show(wait=True)


class _Stream:
    """Bytes in, whole lines out. Of a line that was overwritten by carriage returns, the last state counts; of one that
    goes on for long, such as a progress bar, the present state from time to time."""

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = 0.0

    def feed(self, data: bytes, now: float) -> list[str]:
        begins = not self._rest
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines or begins:
            self._shown_at = now
        is_due = b"\r" in self._rest and now >= self._shown_at + PROGRESS_INTERVAL_S
        if is_due or len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest, self._shown_at = b"", now
        return [_last_state(line) for line in lines]

    def end(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [_last_state(rest)] if rest else []


def _last_state(line: bytes) -> str:
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    return without_controls(text)


def without_controls(text: str) -> str:
    """The text, which may have several lines, without what moves about on a terminal."""
    return _CONTROLS.sub("", text)


_CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-ln-~]"  # control sequences other than colours (m): they move about in what others wrote
    r"|\x1b[\]PX^_][^\x07\x1b]*(\x07|\x1b\\)?"  # titles, links
    r"|\x1b[^\[\]PX^_]|\x1b$|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]"
)
"""ECMA-48; a tabulator and colours stay."""


class RankOutput:
    """Output of one rank of one attempt, ``shown`` on the console or only kept in the file, whose directory exists.
    ``host``: its name, where lines are to have it. ``last_lines`` are what a failure screen may quote."""

    def __init__(self, rank: int, file: Path, *, width: int = 1, shown: bool = True, host: str = "") -> None:
        self._shown = shown
        self._prefix = f"[rank {rank:>{width}}{' ' * bool(host)}{host}] "
        self._path = file
        self._file: IO[bytes] | None = None
        self._broken = False
        self._mid_line = False
        self._streams = {1: _Stream(), 2: _Stream()}
        self.last_lines: deque[str] = deque(maxlen=_LINES_KEPT)

    def feed(self, stream: int, data: bytes) -> None:
        """Bytes that the rank wrote to stdout (1) or stderr (2)."""
        self._write(data)
        self._show(stream, self._streams[stream].feed(data, time.monotonic()))

    def note(self, text: str) -> None:
        """Into the file only, from the beginning of a line."""
        self._write(b"\n" * self._mid_line + text.encode(errors="backslashreplace"))

    def _write(self, data: bytes) -> None:
        if self._broken:
            return
        try:
            if self._file is None:
                self._file = self._path.open("ab")
            self._file.write(data)
            self._mid_line = not data.endswith(b"\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A log that cannot be written is no reason to end a training."""
        if not self._broken:
            warn(f"the log {self._path} is not written any more: {error}")
        self._broken = True

    def _show(self, stream: int, lines: list[str]) -> None:
        if lines:
            self.last_lines.extend(line[:_LONGEST_KEPT] for line in lines[-_LINES_KEPT:])
        if lines and self._shown:
            console = sys.stdout if stream == 1 else sys.stderr
            _print(console, "".join(f"{self._prefix}{line}\n" for line in lines))

    def flush(self) -> None:
        if self._file is not None and not self._broken:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Show what came without a line end, and close the file."""
        for number, stream in self._streams.items():
            self._show(number, stream.end())
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)
            self._file = None


class RankOutputs:
    """Output of all ranks, of one attempt after the other. ``file_of``: where that of an attempt and a rank is kept.
    ``shown``: whose is seen on the console, too; None for everybody's."""

    def __init__(self, file_of: Callable[[int, int], Path], shown: Collection[int] | None = None) -> None:
        self._file_of = file_of
        self._shown = shown
        self._ranks: dict[int, RankOutput] = {}

    def begin(self, attempt: int, hosts: Sequence[str]) -> None:
        """A new attempt, of which each rank is on one of ``hosts``. What the last one has left open is to be closed
        before."""
        width = len(str(len(hosts) - 1))
        self._ranks = {
            rank: RankOutput(
                rank,
                self._file_of(attempt, rank),
                width=width,
                shown=self._shown is None or rank in self._shown,
                host=host if len(set(hosts)) > 1 else "",
            )
            for rank, host in enumerate(hosts)
        }

    def of(self, rank: int) -> RankOutput:
        return self._ranks[rank]

    def last_lines(self) -> dict[int, list[str]]:
        """What a failure screen may quote, by rank."""
        return {rank: list(output.last_lines) for rank, output in self._ranks.items()}

    def flush(self) -> None:
        for output in self._ranks.values():
            output.flush()

    def close(self) -> None:
        for output in self._ranks.values():
            output.close()


class ReportLines:
    """Rank 0's reports as console lines, at most one per :data:`REPORT_INTERVAL_S`; the last one is always shown."""

    def __init__(self) -> None:
        self._shown_at = -REPORT_INTERVAL_S
        self._pending: str | None = None

    def report(self, index: int, metrics: Mapping[str, Any], now: float) -> None:
        self._pending = f"report {index}: " + (", ".join(_shown(metrics)) or "no metrics")
        if now >= self._shown_at + REPORT_INTERVAL_S:
            self.flush(now)

    def deadline(self) -> float | None:
        """When :meth:`flush` should be called, if nothing comes before."""
        return None if self._pending is None else self._shown_at + REPORT_INTERVAL_S

    def flush(self, now: float) -> None:
        if self._pending is not None:
            say(self._pending)
            self._pending, self._shown_at = None, now


def _shown(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _shown(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}={value:.6g}" if isinstance(value, float) else f"{prefix}{key}={_one_line(value):.60}"


def _one_line(value: object) -> str:
    return "".join(c if c.isprintable() else " " for c in str(value))
