"""One connection over two file descriptors: framed messages both ways. Runs in: coordinator, agent, worker.

Reading never blocks. Writing either queues (in loops: :meth:`Channel.queue`) or blocks until the kernel has all bytes
(in workers: :meth:`Channel.send`), so that no report waits in the memory of a worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
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

_PIPE_BYTES = 64 << 10
"""Size of a pipe, by default. To read with a larger buffer takes longer, as the buffer comes from the kernel."""
_WIDE_PIPE_BYTES = 1 << 20
"""Size of a wide pipe. An ordinary user may ask for it, by default."""
_MOST_PIECES = 256
"""Messages that are written together."""
_FULL = range(48 << 10, _PIPE_BYTES + 1)
"""Bytes in a full pipe of the default size. Each write of a line may leave a part of a page unused."""


def widen_pipe(fd: int, size: int = _WIDE_PIPE_BYTES) -> None:
    """Ask for a larger pipe buffer (bytes); best effort, the default of 64 KiB works too."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)


def read_pipe(fd: int) -> bytes | None:
    """Return all that a pipe holds, empty bytes at its end, or None if there is nothing now. Raises OSError.

    A pipe that is found full is widened, so that its writer waits less often. Few pipes need that, and wide pipes of a
    user are limited in number.
    """
    try:
        data = os.read(fd, _PIPE_BYTES)
    except BlockingIOError:
        return None
    if len(data) in _FULL:
        widen_pipe(fd)
        with contextlib.suppress(BlockingIOError):
            data += os.read(fd, _WIDE_PIPE_BYTES)
    return data


class _Unsent(NamedTuple):
    data: list[bytes | memoryview]
    """One element; none once a newer :class:`_Unsent` has replaced this one."""
    written: list[int]
    """Number of bytes that the kernel took with each write."""


class Channel:
    """Framed messages over ``read_fd`` and ``write_fd``, which the channel owns.

    greeting: skip all bytes before the magic.
    """

    has_uploader = True
    """True if another process can store the files of a worker while it trains."""

    def __init__(self, read_fd: int, write_fd: int, *, greeting: bool = False) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.decoder = wire.Decoder(greeting=greeting)
        self.at_end = False
        self.broken: str | None = None
        """The reason why the incoming bytes are no frames; the channel is then at its end."""
        self._outbox: deque[bytes | memoryview] = deque()
        self._flushed_in = -1.0
        """The step of the loop in which the outbox was flushed."""
        self.queued_bytes = 0
        self._unsent = _Unsent([b""], [])
        self.heard_at = time.monotonic()
        """When bytes were last read (time.monotonic): a part of a long frame is a sign of life, too."""
        self._lock = threading.RLock()
        self.on_drained: Callable[[], None] | None = None
        self._loop: Loop | None = None
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)

    # -- for loops ------------------------------------------------------------------------------------------------

    def attach(self, loop: Loop, on_frames: Callable[[list[wire.Frame]], None]) -> None:
        """Let ``loop`` read and write. ``on_frames`` gets an empty list once, at the end of the stream."""
        self._loop = loop
        self._on_frames = on_frames
        self.resume_reading()
        if self._outbox:
            self.flush()

    def detach(self) -> None:
        """Stop using the loop; from now on the caller calls :meth:`flush` and :meth:`wait`."""
        if self._loop:
            self._loop.forget(self.read_fd)
            self._loop.forget(self.write_fd)
            self._loop = None

    def resume_reading(self) -> None:
        if self._loop and not self.at_end:
            self._loop.on_readable(self.read_fd, self._read_turn)

    def pause_reading(self) -> None:
        """Leave further frames in the kernel. When its buffer is full, the other side waits."""
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
        """Send without waiting; bytes that the kernel does not take now are written when it can take them.

        Called by a callback of a loop, the first message of the step is written at once, all others together.
        """
        data = message if isinstance(message, bytes) else wire.encode(message)
        self._outbox.append(data)
        self.queued_bytes += len(data)
        if not (self._loop and self._loop.is_stepping):
            self._write_turn()
        elif len(self._outbox) == 1 and (self._flushed_in != self._loop.now or self.write_fd < 0):
            self.flush()
        elif len(self._outbox) == 1:
            self._loop.on_writable(self.write_fd, self._write_turn)

    def flush(self) -> None:
        """Write the bytes that the kernel takes now. A broken pipe drops the rest; reading then finds the end."""
        while self._outbox:
            try:
                written = os.writev(self.write_fd, list(itertools.islice(self._outbox, _MOST_PIECES)))
            except BlockingIOError:
                break
            except OSError:
                self._outbox.clear()
                self.queued_bytes = 0
                break
            self.queued_bytes -= written
            while self._outbox and written >= len(self._outbox[0]):
                written -= len(self._outbox.popleft())
            if written:
                self._outbox[0] = memoryview(self._outbox[0])[written:]
        if self._loop and self.write_fd >= 0:
            self._flushed_in = self._loop.now
            self._loop.on_writable(self.write_fd, self._write_turn if self._outbox else None)

    def _write_turn(self) -> None:
        self.flush()
        if self.on_drained is not None:
            self.on_drained()

    # -- for all programs --------------------------------------------------------------------------------------------

    def receive(self) -> list[wire.Frame]:
        """Return the frames that have arrived, without waiting. Sets ``at_end`` when the other side is gone."""
        data = self._read()
        return self._decode(data) if data else []

    def drain(self) -> list[wire.Frame]:
        """Return all frames that have arrived, including those that a dead sender left in the kernel."""
        frames: list[wire.Frame] = []
        while data := self._read():
            frames += self._decode(data)
        return frames

    def _read(self) -> bytes:
        """Return the bytes that have arrived, one chunk at most. Sets ``at_end`` if there will be no more."""
        try:
            data = read_pipe(self.read_fd)
        except OSError:
            data = b""
        if data is None:
            return b""
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
        """Wait for at least one frame, the end of the stream or the timeout, and return as :meth:`receive` does."""
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
        """Send, and wait until the kernel has all bytes. Raises OSError (BrokenPipeError) if there is no reader."""
        with self._lock:
            # The rest of a message that an exception (of a signal handler, say) cut off has to be sent first.
            self._settle(message if isinstance(message, bytes) else wire.encode(message))
            while self._unsent.data[0]:
                unsent = self._unsent
                try:
                    # os.write is called, and its result noted, without a bytecode in between: if a signal handler
                    # raised an exception there, the same bytes would be written again.
                    unsent.written.extend(map(os.write, (self.write_fd,), unsent.data))
                except BlockingIOError:
                    _poll(self.write_fd, select.POLLOUT, None)
                self._settle()

    def _settle(self, more: bytes = b"") -> None:
        """Drop the bytes that were written and add ``more``.

        A signal handler that sends during a send() writes all that is left; the interrupted send() then finds no data.
        """
        while True:
            old = self._unsent
            rest = memoryview(next(iter(old.data), b""))[sum(old.written) :]  # not copied, as it may be large
            new = _Unsent([b"".join((rest, more)) if rest and more else more or rest], [])
            if self._unsent is old:  # no signal handler sent anything meanwhile
                self._unsent = new
                old.data.clear()
                return

    def close(self) -> None:
        """Close both descriptors, after a last :meth:`flush`; harmless when done twice."""
        if self._outbox:
            self.flush()
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
