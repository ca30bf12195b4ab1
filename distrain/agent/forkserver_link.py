"""The agent's end of a forkserver. Runs in: agent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distrain.system import process

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain import wire
    from distrain.system.loop import Loop

_PACKET_BYTES = 64 << 10
_LEAVING_S = 1.0
"""Seconds that the forkserver has to kill its workers and end."""


@dataclass(eq=False)
class ForkServerLink:
    """A forkserver process and the socket to it.

    threads: value of OMP_NUM_THREADS for the workers, unless the user has set one.
    on_death: gets the return code as ``subprocess`` has it, negative for a signal.
    """

    loop: Loop
    prepared: wire.Prepare
    threads: int
    on_packet: Callable[[dict[str, Any]], None]
    on_death: Callable[[int], None]

    def __post_init__(self) -> None:
        self.ready = False
        self.heard_at = self.loop.now
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {name: getattr(self.prepared, name) for name in ("preload", "start_method", "python_flags")}
        self._process = process.spawn_quiet(
            process.bootstrap_argv(
                "forkserver",
                str(theirs.fileno()),
                json.dumps(settings),
                python=[self.prepared.python] if self.prepared.python else (),
                flags=self.prepared.python_flags,
            ),
            environment={"OMP_NUM_THREADS": str(self.threads), **os.environ, **self.prepared.environment},
            directory=self.prepared.directory,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        self.pid = self._process.pid
        self._pidfd = process.open_pidfd(self.pid)
        self.loop.on_readable(self._socket.fileno(), self._read)
        if self._pidfd >= 0:
            self.loop.on_readable(self._pidfd, self._died)

    def fits(self, prepared: wire.Prepare) -> bool:
        """Tell if the workers of another run can be started by this forkserver: it may only lack some modules."""
        has_more = not set(self.prepared.preload) <= set(prepared.preload)
        return not has_more and replace(prepared, preload=self.prepared.preload, body=b"") == self.prepared

    def renew(self, prepared: wire.Prepare) -> None:
        """Get the forkserver ready for another run. It answers ``ready``, or ``stale`` if it has to be replaced."""
        self.ready = False
        self.prepared = replace(prepared, body=b"")
        self.send({"kind": "renew", "preload": prepared.preload})

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a command with descriptors. Raises OSError if there are too many descriptors in flight."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is noticed by its pidfd
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_PACKET_BYTES)
        except OSError:
            data = b""
        if not data:
            self._died()
            return
        self.heard_at = self.loop.now
        packet = json.loads(data)
        self.ready = self.ready or packet["kind"] == "ready"
        self.on_packet(packet)

    def _died(self) -> None:
        self._forget()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)  # its socket closes a moment before it ends
        self.kill()
        self.on_death(self._process.returncode or 0)

    def _forget(self) -> None:
        for fd in (self._socket.fileno(), self._pidfd):
            self.loop.forget(fd)
        self._socket.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def dismiss(self) -> None:
        """Kill the forkserver without a call of ``on_death``."""
        self._forget()
        self.kill()

    def leave(self) -> None:
        """Let the forkserver kill its workers and their descendants and end; kill it if it does not.

        If it were killed at once, and the agent a moment later, nothing would kill those descendants.
        """
        if self.ready:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_LEAVING_S)
        self.kill()

    def kill(self) -> None:
        """Kill the forkserver. Its workers die with it, and ``on_death`` is called in a later turn of the loop."""
        self._process.kill()
        process.reap(self._process)
