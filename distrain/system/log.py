"""Lines for the user: what distrain itself says on stderr, and what may stand in such a line. Runs in: anywhere."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from typing import IO, TYPE_CHECKING

from distrain.system.consoles import show

if TYPE_CHECKING:
    from collections.abc import Iterator


def say(text: str) -> None:
    """One line on how the run goes."""
    _logger.info(text)


def warn(text: str) -> None:
    """One line that the user should read."""
    _logger.warning(text)


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Warn with a line that later runs of this process do not repeat."""
    if text not in _warned:
        _warned.add(text)
        warn(text)


class _Console(logging.Handler):
    """Our lines on stderr, which leaves stdout to the workers."""

    def emit(self, record: logging.LogRecord) -> None:
        print_on(sys.stderr, f"distrain: {record.getMessage()}\n")


_logger = logging.getLogger("distrain")
_logger.addHandler(_Console())
_logger.setLevel(logging.INFO)
_logger.propagate = False


@contextlib.contextmanager
def log_level(level: str) -> Iterator[None]:
    """Show only what has at least this level, as ``logging`` calls it. Of several runs at once, the last to begin
    decides among those that have not ended.
    """
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


def print_on(console: IO[str] | None, text: str) -> None:
    """Print on a console. One that has gone away (a closed terminal, ``| head``) is no reason to end a training."""
    if console is not None:  # None: a process without standard streams, such as a daemon
        with contextlib.suppress(OSError, ValueError):
            show(console, text)


def without_controls(text: str) -> str:
    """The text, which may have several lines, without what moves about on a terminal."""
    return _CONTROLS.sub("", text)


_CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-ln-~]"  # control sequences other than colours (m): they move about in what others wrote
    r"|\x1b[\]PX^_][^\x07\x1b]*(\x07|\x1b\\)?"  # titles, links
    r"|\x1b[^\[\]PX^_]|\x1b$|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]"
)
"""ECMA-48; a tabulator and colours stay."""
