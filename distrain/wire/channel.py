"""One connection over two file descriptors: framed messages both ways. Runs in: coordinator, agent, worker.

Reading never blocks. Writing either queues (loops: :meth:`Channel.queue`) or blocks until the kernel took it all
(workers: :meth:`Channel.send`), so nothing that a worker reported waits in its memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from distrain import wire
from distrain.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.system.loop import Loop

_READ_SIZE = 256 << 10
_F_SETPIPE_SZ = 1031  # linux/fcntl.h; fcntl.F_SETPIPE_SZ exists from Python 3.10 on, on Linux only


def widen_pipe(fd: int, size: int = 1 << 20) -> None:
    """Ask for a larger pipe buffer (bytes); best effort, the default of 64 KiB works too."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, _F_SETPIPE_SZ, size)


class _Unsent(NamedTuple):
    data: list[bytes | memoryview]
    """One element, or none once another one took over."""
    written: list[int]
    """Bytes of it that the kernel took, in turn."""


class Channel:
    """Framed messages over ``read_fd`` and ``write_fd``, which it owns. ``greeting``: wait for the magic first."""

    uploads = True
    acknowledges = True
    commits_for_all_ranks = True

    def __init__(self, read_fd: int, write_fd: int, *, greeting: bool = False) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.decoder = wire.Decoder(greeting=greeting)
        self.at_end = False
        self.broken: str | None = None
        """Why what comes in is no longer understood, after which the channel is at its end."""
        self._outbox: deque[memoryview] = deque()
        self.queued_bytes = 0
        self._unsent = _Unsent([b""], [])
        self.heard_at = time.monotonic()
        """When anything was read last: a long frame on a slow line is a sign of life, too."""
        self._lock = threading.RLock()
        self.on_drained: Callable[[], None] | None = None
        self._loop: Loop | None = None
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)

    # -- for loops ------------------------------------------------------------------------------------------------

    def attach(self, loop: Loop, on_frames: Callable[[list[wire.Frame]], None]) -> None:
        """Let ``loop`` read and write for us. ``on_frames`` gets an empty list once, at the end of the stream."""
        self._loop = loop
        self._on_frames = on_frames
        self.resume_reading()

    def detach(self) -> None:
        """Without the loop from now on: :meth:`flush` and :meth:`wait` are for the caller to call."""
        if self._loop:
            self._loop.forget(self.read_fd)
            self._loop.forget(self.write_fd)
            self._loop = None

    def resume_reading(self) -> None:
        if self._loop and not self.at_end:
            self._loop.on_readable(self.read_fd, self._read_turn)

    def pause_reading(self) -> None:
        """Leave further frames in the kernel, which in the end makes the other side wait."""
        if self._loop:
            self._loop.on_readable(self.read_fd, None)

    def _read_turn(self) -> None:
        frames = self.receive()
        if frames:
            self._on_frames(frames)
        if self.at_end and self._loop:
            self._loop.forget(self.read_fd)
            self._on_frames([])

    def queue(self, message: wire.Message | bytes) -> None:
        """Send without waiting; what the kernel does not take now goes out when it does."""
        data = message if isinstance(message, bytes) else wire.encode(message)
        self._outbox.append(memoryview(data))
        self.queued_bytes += len(data)
        if len(self._outbox) == 1:
            self.flush()

    def flush(self) -> None:
        """Write what the kernel takes now. A broken pipe drops the rest: the reading side tells of the end."""
        while self._outbox:
            try:
                written = os.write(self.write_fd, self._outbox[0])
            except BlockingIOError:
                break
            except OSError:
                self._outbox.clear()
                self.queued_bytes = 0
                break
            self.queued_bytes -= written
            if written == len(self._outbox[0]):
                self._outbox.popleft()
            else:
                self._outbox[0] = self._outbox[0][written:]
        if self._loop and self.write_fd >= 0:
            self._loop.on_writable(self.write_fd, self._write_turn if self._outbox else None)

    def _write_turn(self) -> None:
        self.flush()
        if self.on_drained is not None:
            self.on_drained()

    # -- for everybody --------------------------------------------------------------------------------------------

    def receive(self) -> list[wire.Frame]:
        """Frames that have arrived, without waiting. Sets ``at_end`` when the other side is gone."""
        data = self._read()
        return self._decode(data) if data else []

    def drain(self) -> list[wire.Frame]:
        """Everything that has arrived, to the last byte: what a dead sender left in the kernel."""
        frames: list[wire.Frame] = []
        while data := self._read():
            frames += self._decode(data)
        return frames

    def _read(self) -> bytes:
        """What is there, at most a chunk; empty if nothing is there now, or ever again (``at_end``)."""
        try:
            data = os.read(self.read_fd, _READ_SIZE)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.at_end = self.at_end or not data
        self.heard_at = time.monotonic()
        return data

    def _decode(self, data: bytes) -> list[wire.Frame]:
        frames: list[wire.Frame] = []
        try:
            frames = self.decoder.feed(data)
            self.decoder.feed(b"")
        except WireError as error:
            self.broken = str(error)
            self.at_end = True
        return frames

    def wait(self, timeout_s: float | None = None) -> list[wire.Frame]:
        """Like :meth:`receive`, but wait for at least one frame, the end, or the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            frames = self.receive()
            if frames or self.at_end:
                return frames
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return []
            _poll(self.read_fd, select.POLLIN, left)

    def send(self, message: wire.Message | bytes) -> None:
        """Send and wait until the kernel has it all. Raises OSError (BrokenPipeError) when nobody can read it."""
        with self._lock:
            # What an exception (a signal handler's, say) cut off goes first, or the stream would make no sense.
            self._settle(message if isinstance(message, bytes) else wire.encode(message))
            while self._unsent.data[0]:
                unsent = self._unsent
                try:
                    # os.write is called, and its result noted, without a bytecode in between: a signal handler that
                    # raised there would make us write the same again.
                    unsent.written.extend(map(os.write, (self.write_fd,), unsent.data))
                except BlockingIOError:
                    _poll(self.write_fd, select.POLLOUT, None)
                self._settle()

    def _settle(self, more: bytes = b"") -> None:
        """Drop what was written and add ``more``. Whoever held the old data finds it empty: a signal handler that sends
        while we send writes all of it.
        """
        while True:
            old = self._unsent
            rest = memoryview(next(iter(old.data), b""))[sum(old.written) :]  # not copied, it may be large
            new = _Unsent([b"".join((rest, more)) if rest and more else more or rest], [])
            if self._unsent is old:  # no signal handler sent anything meanwhile
                self._unsent = new
                old.data.clear()
                return

    def close(self) -> None:
        """Close both descriptors; harmless when done twice."""
        for fd in {self.read_fd, self.write_fd}:
            if self._loop:
                self._loop.forget(fd)
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.read_fd = self.write_fd = -1
        self.at_end = True


def _poll(fd: int, event: int, timeout_s: float | None) -> None:
    poll = select.poll()
    poll.register(fd, event)
    poll.poll(None if timeout_s is None else timeout_s * 1000)
