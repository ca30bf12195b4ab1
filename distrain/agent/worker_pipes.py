"""Pipes between the agent and its workers, and the relay of their contents to the coordinator. Runs in: agent."""

from __future__ import annotations

import os
import selectors
import socket
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.wire.channel import Channel, read_pipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.system.loop import Loop

_PAUSE_AT_BYTES = 4 << 20
"""Bytes that wait for the coordinator before the workers have to wait, too."""
_RESUME_AT_BYTES = 1 << 20
_AFTER_OUTPUT = {wire.Outcome.__name__, wire.DebuggerSays.__name__}
"""Messages that must not overtake what the worker has printed before."""
GATHER_S = 0.01
"""Seconds from one look for output to the next. Output that comes meanwhile travels in few large pieces."""


class WorkerPipes:
    """The pipes of one rank: frames both ways, standard output and error, and stacks, with requests for these."""

    def __init__(self, attempt: int, rank: int) -> None:
        self.attempt = attempt
        self.rank = rank
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        own, workers = socket.socketpair()
        stacks_read, stacks_write = own.detach(), workers.detach()
        self.channel = Channel(up_read, down_write)
        self.outputs = {1: out_read, 2: err_read}
        """Pipes of the output by the worker's file descriptor."""
        self.stacks_fd = stacks_read
        self.stacks = b""
        self.child_fds: tuple[int, ...] = (down_read, up_write, out_write, err_write, stacks_write)
        """The worker's ends of the pipes, in the order of :class:`~distrain.worker.main.WorkerFds`, without the job."""
        self.pid = 0
        """0 until it is known."""
        self.spawned = False
        self.is_exiting = False
        """True once it has sent its outcome."""
        self.exited = False
        for fd in (out_read, err_read, stacks_read):
            os.set_blocking(fd, False)

    def close_child_fds(self) -> None:
        """Close the worker's ends, which the worker has inherited."""
        for fd in self.child_fds:
            os.close(fd)
        self.child_fds = ()

    def close(self, loop: Loop) -> None:
        """Close all descriptors."""
        self.close_child_fds()
        self.channel.close()
        loop.forget(self.stacks_fd)
        for fd in (*self.outputs.values(), self.stacks_fd):
            os.close(fd)


class WorkerRelay:
    """Relay frames and output of the workers to the coordinator.

    If the coordinator reads too slowly, workers wait in write(), so that the memory of the agent does not fill up.

    on_broken: is called for a worker whose pipe no longer follows the protocol.
    """

    def __init__(self, loop: Loop, up: Channel, on_broken: Callable[[WorkerPipes], None]) -> None:
        self._loop = loop
        self._up = up
        self._on_broken = on_broken
        self._workers: list[WorkerPipes] = []
        self._is_paused = False
        self._outputs = selectors.DefaultSelector()
        """The pipes of the output. The loop watches this selector, which is cheaper than to watch each pipe."""
        up.on_drained = self._resume
        self._watch_outputs()

    def add(self, worker: WorkerPipes) -> None:
        """Begin to read from a worker."""
        self._workers.append(worker)
        worker.channel.attach(self._loop, partial(self._forward, worker))
        for stream, fd in worker.outputs.items():
            self._outputs.register(fd, selectors.EVENT_READ, (worker, stream))
        if self._is_paused:
            worker.channel.pause_reading()

    def remove(self, worker: WorkerPipes) -> None:
        """Stop reading from a worker that has exited."""
        self._workers.remove(worker)
        self._loop.forget(worker.channel.read_fd)
        for fd in worker.outputs.values():
            self._forget_output(fd)

    def clear(self) -> None:
        """Stop reading from all workers, before they are closed."""
        for worker in list(self._workers):
            self.remove(worker)

    def _forget_output(self, fd: int) -> None:
        if fd in self._outputs.get_map():
            self._outputs.unregister(fd)

    def drain(self, worker: WorkerPipes) -> None:
        """Relay what a worker wrote before it died, so that it precedes the news of its death."""
        self._drain_output(worker)
        self._queue(worker.channel.drain())

    def _forward(self, worker: WorkerPipes, frames: list[wire.Frame]) -> None:
        if any(frame.kind in _AFTER_OUTPUT for frame in frames):
            self._drain_output(worker)
        worker.is_exiting |= any(frame.kind == wire.Outcome.__name__ for frame in frames)
        self._queue(frames)
        self._pause_if_flooded()
        if worker.channel.broken is not None and not worker.exited:
            self._on_broken(worker)

    def _queue(self, frames: list[wire.Frame]) -> None:
        if frames:
            self._up.queue(b"".join(frame.raw for frame in frames))

    def _watch_outputs(self) -> None:
        if not self._is_paused:
            self._loop.on_readable(self._outputs.fileno(), self._relay_outputs)

    def _relay_outputs(self) -> None:
        """Relay the output that is there, and look again after a short time."""
        self._loop.forget(self._outputs.fileno())
        self._loop.call_in("output", GATHER_S, self._watch_outputs)
        for key, _ in self._outputs.select(timeout=0):
            if not self._is_paused:
                self._relay_output(*key.data)

    def _relay_output(self, worker: WorkerPipes, stream: int) -> None:
        fd = worker.outputs[stream]
        data = read_pipe(fd)
        if data:
            self._up.queue(wire.Output(attempt=worker.attempt, rank=worker.rank, stream=stream, body=data))
            self._pause_if_flooded()
        elif data is not None:
            self._forget_output(fd)

    def _drain_output(self, worker: WorkerPipes) -> None:
        """Relay what the pipes hold, and not more: another process may keep writing to them.

        The pipes come in the order in which they became readable, as lines of one may precede those of the other.
        """
        for key, _ in self._outputs.select(timeout=0):
            if key.data[0] is worker:
                self._relay_output(*key.data)

    def _pause_if_flooded(self) -> None:
        if self._up.queued_bytes < _PAUSE_AT_BYTES or self._is_paused:
            return
        self._is_paused = True
        self._loop.forget(self._outputs.fileno())
        for worker in self._workers:
            worker.channel.pause_reading()

    def _resume(self) -> None:
        if not self._is_paused or self._up.queued_bytes > _RESUME_AT_BYTES:
            return
        self._is_paused = False
        self._watch_outputs()
        for worker in self._workers:
            worker.channel.resume_reading()
