"""Distrain's own lines, for the user. Runs in: anywhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import IO, TYPE_CHECKING

from distrain.system.arguments import in_users_words
from distrain.system.consoles import has_footer, write_to
from distrain.system.notebook import is_kernel
from distrain.system.text import without_controls

if TYPE_CHECKING:
    from collections.abc import Iterator


def say(text: str, **facts: object) -> None:
    """Print a line about the progress of a run. facts: attributes of its ``logging.LogRecord``."""
    _logger.info(in_users_words(text, bare_names=False), extra=facts)


def warn(text: str, **facts: object) -> None:
    """Print a line that the user should read. facts: as of :func:`say`."""
    _logger.warning(in_users_words(text, bare_names=False), extra=facts)


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Print a line that the user should read once, even if later runs of this process repeat it."""
    if text not in _warned:
        _warned.add(text)
        warn(text)


class _Console(logging.Handler):
    """Print distrain's lines on stderr. Stdout is for the output of the workers.

    In a notebook, where stderr is red, it is for warnings only.
    """

    def emit(self, record: logging.LogRecord) -> None:
        clock = time.strftime("%H:%M:%S ", time.localtime(record.created))  # as every line above a footer
        is_alarming = record.levelno >= logging.WARNING or not is_kernel()
        console = sys.stderr if is_alarming else sys.stdout
        print_to(console, f"{clock * has_footer(sys.stderr)}distrain: {without_controls(record.getMessage())}\n")


_logger = logging.getLogger("distrain")
_logger.addHandler(_Console())
_logger.setLevel(logging.INFO)
_logger.propagate = False


@contextlib.contextmanager
def log_level(level: str) -> Iterator[None]:
    """Show only lines of at least this level of ``logging`` within the block.

    Of several runs at once, the level of the one that started last counts.
    """
    _levels.append(level)
    _logger.setLevel(level)
    try:
        yield
    finally:
        _levels.remove(level)
        _logger.setLevel(_levels[-1])


_levels: list[int | str] = [logging.INFO]
"""The usual level, then those of the runs of this process that have not ended, in the order in which they started."""


def print_to(console: IO[str] | None, text: str | bytes) -> None:
    """Print to a console, and ignore a closed one (a closed terminal, ``| head``): training does not depend on it.

    text: bytes must be UTF-8.
    """
    if console is not None:  # None: a process without standard streams, such as a daemon
        with contextlib.suppress(OSError, ValueError):
            write_to(console, text)
