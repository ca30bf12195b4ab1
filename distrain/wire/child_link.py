"""A child process that speaks the protocol on its stdin and stdout. Runs in: coordinator, agent, their children."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from distrain.system import process
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ChildLink:
    """A child process, in a session of its own, and the channel to it. Raises OSError if it cannot be started.

    stderr: as for ``subprocess.Popen``. environment: added to this process's. greeting: see :class:`Channel`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
        greeting: bool = False,
    ) -> None:
        self.process = process.spawn(argv, stderr=stderr, environment=environment)
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        self.channel = Channel(os.dup(stdout.fileno()), os.dup(stdin.fileno()), greeting=greeting)
        stdin.close()
        stdout.close()

    def kill(self) -> int:
        """SIGKILL the child and its process group. Return its exit code; harmless when done twice.

        Resource trackers of the group end by themselves.
        """
        self.channel.close()
        process.kill_groups([self.process.pid])
        return process.reap(self.process)


def channel_to_parent(parent: str) -> Channel:
    """Return the child's end of the channel. This process dies with its parent, and leaves Ctrl-C to it.

    parent: its pid.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_with_parent(int(parent))
    return Channel(*process.private_stdio())
