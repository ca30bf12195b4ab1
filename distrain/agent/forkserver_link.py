"""The agent's end of a forkserver. Runs in: agent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distrain.system import process

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain import wire
    from distrain.system.loop import Loop

_PACKET_BYTES = 64 << 10
_LEAVING_S = 1.0
"""Seconds that the forkserver has to kill its workers and end."""


class ForkServerLink:
    """A forkserver process and the socket to it.

    threads: value of OMP_NUM_THREADS for the workers, unless the user has set one.
    on_death: gets the return code as ``subprocess`` has it, negative for a signal.
    """

    def __init__(
        self,
        loop: Loop,
        prepared: wire.Prepare,
        job_fd: int,
        *,
        threads: int,
        on_packet: Callable[[dict[str, Any]], None],
        on_death: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self.ready = False
        self.heard_at = loop.now
        self._prepared = prepared
        self._on_packet = on_packet
        self._on_death = on_death
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        settings = {
            "preload": prepared.preload,
            "start_method": prepared.start_method,
            "python_flags": prepared.python_flags,
        }
        arguments = (str(theirs.fileno()), str(job_fd), json.dumps(settings))
        self._process = process.spawn_quiet(
            process.bootstrap_argv(
                "forkserver",
                *arguments,
                python=[prepared.python] if prepared.python else (),
                flags=prepared.python_flags,
            ),
            environment={"OMP_NUM_THREADS": str(threads), **os.environ, **prepared.environment},
            directory=prepared.directory,
            pass_fds=(theirs.fileno(), job_fd),
        )
        theirs.close()
        self.pid = self._process.pid
        self._pidfd = process.open_pidfd(self.pid)
        loop.on_readable(ours.fileno(), self._read)
        if self._pidfd >= 0:
            loop.on_readable(self._pidfd, self._died)

    def fits(self, prepared: wire.Prepare) -> bool:
        """Tell if the workers of another run can be started by this forkserver: it may only lack some modules."""
        has_more = not set(self._prepared.preload) <= set(prepared.preload)
        return not has_more and replace(prepared, preload=self._prepared.preload, body=b"") == self._prepared

    def renew(self, prepared: wire.Prepare) -> None:
        """Get the forkserver ready for another run. It answers ``ready``, or ``stale`` if it has to be replaced."""
        self.ready = False
        self._prepared = replace(prepared, body=b"")
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
        self.heard_at = self._loop.now
        packet = json.loads(data)
        self.ready = self.ready or packet["kind"] == "ready"
        self._on_packet(packet)

    def _died(self) -> None:
        self._forget()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)  # its socket closes a moment before it ends
        self.kill()
        self._on_death(self._process.returncode or 0)

    def _forget(self) -> None:
        for fd in (self._socket.fileno(), self._pidfd):
            self._loop.forget(fd)
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
