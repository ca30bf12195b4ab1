"""A child process that speaks the protocol on its stdin and stdout. Runs in: coordinator, agent, their children."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from distrain.system import process
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_STRAY_BYTES = 4 << 10
_MOST_KEPT_BYTES = 1 << 20


class ChildLink:
    """A child process, in a session of its own, and the channel to it. Raises OSError if it cannot be started.

    environment: added to this process's. greeting: see :class:`Channel`. What a child that greets writes to stderr, as
    ssh does, is kept for :meth:`stray`.
    """

    def __init__(
        self, argv: Sequence[str], *, environment: Mapping[str, str] | None = None, greeting: bool = False
    ) -> None:
        with contextlib.ExitStack() as stack:
            self._said = stack.enter_context(open(os.memfd_create("stderr"), "rb")) if greeting else None
            stderr = self._said.fileno() if self._said else None
            self.process = process.spawn(argv, stderr=stderr, environment=environment)
            stack.pop_all()
        self._forgotten = 0
        """Bytes at the beginning of what it has written that are no longer of interest."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        self.channel = Channel(os.dup(stdout.fileno()), os.dup(stdin.fileno()), greeting=greeting)
        stdin.close()
        stdout.close()

    def stray(self) -> bytes:
        """Return the end of what it has written to stderr."""
        assert self._said is not None
        fd = self._said.fileno()
        return os.pread(fd, _STRAY_BYTES, max(self._forgotten, os.fstat(fd).st_size - _STRAY_BYTES)).lstrip(b"\0")

    def limit_stray(self) -> None:
        """Free the memory of what it has written to stderr if that is much: from now on, it begins with a hole."""
        assert self._said is not None
        if os.fstat(self._said.fileno()).st_blocks * 512 > _MOST_KEPT_BYTES:
            os.truncate(self._said.fileno(), 0)

    def forget_stray(self) -> None:
        """Leave out what it has written to stderr so far."""
        assert self._said is not None
        self._forgotten = os.fstat(self._said.fileno()).st_size

    def close(self) -> None:
        """Close all descriptors; harmless when done twice."""
        self.channel.close()
        if self._said is not None:
            self._said.close()

    def kill(self) -> int:
        """SIGKILL the child and its process group. Return its exit code; harmless when done twice.

        Resource trackers of the group end by themselves.
        """
        self.close()
        process.kill_groups([self.process.pid])
        return process.reap(self.process)


def channel_to_parent(parent: str) -> Channel:
    """Return the child's end of the channel. This process dies with its parent, and leaves Ctrl-C to it.

    parent: its pid.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_with_parent(int(parent))
    return Channel(*process.private_stdio())
