"""A program on a real pseudo-terminal, and what a terminal emulator shows of it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from functools import partial
from typing import TYPE_CHECKING

import pyte

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Terminal:
    """A program on a terminal of its own. ``screen``: what a terminal emulator shows of it."""

    def __init__(self, argv: list[str], columns: int, rows: int, folder: Path | None = None) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self._fd, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            argv,
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            cwd=folder,
            preexec_fn=partial(_control, other),
        )
        os.close(other)

    def lines(self) -> list[str]:
        """Everything that is on the screen, and above it, without empty lines at the end."""
        above = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
        lines = [line.rstrip() for line in [*above, *self.screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def wait_for_end(self, timeout_s: float = 60.0) -> list[str]:
        """Read until the program has ended."""
        lines = self.wait_for(lambda _: False, timeout_s)
        self.process.wait(timeout_s)
        return lines

    def wait_for(self, condition: Callable[[list[str]], bool], timeout_s: float = 60.0) -> list[str]:
        """Read until the condition is true for the lines, or the program has ended."""
        deadline = time.monotonic() + timeout_s
        while not condition(self.lines()):
            assert time.monotonic() < deadline, "\n".join(self.lines())
            if select.select([self._fd], [], [], 0.2)[0]:
                try:
                    self._stream.feed(os.read(self._fd, 65536))
                except OSError:  # the program has ended
                    break
        return self.lines()

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def press_ctrl_c(self) -> None:
        self.type("\x03")

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait()
        if self._fd >= 0:
            self.hang_up()


def _control(terminal: int) -> None:
    """Make the terminal that of this process, as a terminal emulator does: its signals come, also that of its end."""
    heed_hangups()
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def heed_hangups() -> None:
    """End this process at SIGHUP, which it ignores if the tests were started with ``nohup``."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
