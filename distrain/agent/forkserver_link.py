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
    """The forkserver of a host, and the socket to it. At first there is none; commands to none are ignored.

    on_death: gets the return code as ``subprocess`` has it, negative for a signal.
    """

    loop: Loop
    on_packet: Callable[[dict[str, Any]], None]
    on_death: Callable[[int], None]

    def __post_init__(self) -> None:
        self.ready = self.is_renewing = False
        """``is_renewing``: the forkserver of an earlier run gets ready for this one."""
        self.heard_at = 0.0
        self._prepared: wire.Prepare | None = None
        self._process: process.Process | None = None

    @property
    def pid(self) -> int | None:
        """Pid of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def start(self, prepared: wire.Prepare, threads: int) -> None:
        """Start a forkserver in place of the former one, which has no workers. Raises OSError.

        threads: value of OMP_NUM_THREADS for the workers, unless the user has set one.
        """
        if self._process is not None:
            _end(self._forget())
        self.heard_at, self._prepared, self.is_renewing = self.loop.now, prepared, False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {name: getattr(prepared, name) for name in ("preload", "start_method", "python_flags")}
        self._process = process.spawn_quiet(
            process.bootstrap_argv(
                "forkserver",
                str(theirs.fileno()),
                json.dumps(settings),
                python=[prepared.python] if prepared.python else (),
                flags=prepared.python_flags,
            ),
            environment={"OMP_NUM_THREADS": str(threads), **os.environ, **prepared.environment},
            directory=prepared.directory,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        self._pidfd = process.open_pidfd(self._process.pid)
        self.loop.on_readable(self._socket.fileno(), self._read)
        if self._pidfd >= 0:
            self.loop.on_readable(self._pidfd, self._died)

    def renew(self, prepared: wire.Prepare) -> bool:
        """Get the forkserver ready for another run. It answers ``ready``, or ``stale`` if it has to be replaced.

        Return False if it cannot start the workers of that run: it may only lack some modules.
        """
        before = self._prepared
        if not self.ready or before is None or not set(before.preload) <= set(prepared.preload):
            return False
        if replace(prepared, preload=before.preload) != before:
            return False
        self.ready, self.is_renewing, self._prepared = False, True, prepared
        self.send({"kind": "renew", "preload": prepared.preload})
        return True

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a command with descriptors. Raises OSError if there are too many descriptors in flight."""
        if self._process is None:
            return
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
        if packet["kind"] == "ready":
            self.ready, self.is_renewing = True, False
        self.on_packet(packet)

    def _died(self) -> None:
        gone = self._forget()
        with contextlib.suppress(subprocess.TimeoutExpired):
            gone.wait(timeout=1.0)  # its socket closes a moment before it ends
        _end(gone)
        self.on_death(gone.returncode or 0)

    def _forget(self) -> process.Process:
        """Hear nothing more of the forkserver, as if there were none."""
        assert self._process is not None
        for fd in (self._socket.fileno(), self._pidfd):
            self.loop.forget(fd)
        self._socket.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        gone, self._process, self.ready = self._process, None, False
        return gone

    def leave(self) -> None:
        """Let the forkserver kill its workers and their descendants and end; kill it if it does not.

        If it were killed at once, and the agent a moment later, nothing would kill those descendants.
        """
        if self._process is not None and self.ready:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_LEAVING_S)
        self.kill()

    def kill(self) -> None:
        """Kill the forkserver. Its workers die with it, and ``on_death`` is called in a later turn of the loop."""
        if self._process is not None:
            _end(self._process)


def _end(forkserver: process.Process) -> None:
    forkserver.kill()
    process.reap(forkserver)
