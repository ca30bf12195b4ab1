"""Pipes between the agent and its workers, and the relay of their contents to the coordinator. Runs in: agent."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.system.loop import Loop

_PAUSE_AT_BYTES = 4 << 20
"""Bytes that wait for the coordinator before the workers have to wait, too."""
_RESUME_AT_BYTES = 1 << 20
_READ_BYTES = 64 << 10
_PIPE_BYTES = 1 << 20
"""Upper bound of what a pipe holds."""


class WorkerPipes:
    """The pipes of one rank: frames both ways, standard output and error, and stacks."""

    def __init__(self, attempt: int, rank: int) -> None:
        self.attempt = attempt
        self.rank = rank
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        stacks_read, stacks_write = os.pipe()
        self.channel = Channel(up_read, down_write)
        self.outputs = {1: out_read, 2: err_read}
        """Pipes of the output by the worker's file descriptor."""
        self.stacks_fd = stacks_read
        self.stacks = b""
        self.child_fds: tuple[int, ...] = (down_read, up_write, out_write, err_write, stacks_write)
        """The worker's ends of the pipes, in the order of :data:`~distrain.worker.main.WORKER_PIPES`."""
        self.spawned = False
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
        for fd in (*self.outputs.values(), self.stacks_fd):
            loop.forget(fd)
            os.close(fd)


class WorkerRelay:
    """Relay frames and output of the workers to the coordinator.

    If the coordinator reads too slowly, workers wait in write(), so that the memory of the agent does not fill up.

    on_broken: is called for a worker in whose pipe there is no protocol any more.
    """

    def __init__(self, loop: Loop, up: Channel, on_broken: Callable[[WorkerPipes], None]) -> None:
        self._loop = loop
        self._up = up
        self._on_broken = on_broken
        self._workers: list[WorkerPipes] = []
        self._is_paused = False
        up.on_drained = self._resume

    def add(self, worker: WorkerPipes) -> None:
        """Begin to read from a worker."""
        self._workers.append(worker)
        worker.channel.attach(self._loop, partial(self._forward, worker))
        self._watch_output(worker)
        if self._is_paused:
            self._pause(worker)

    def remove(self, worker: WorkerPipes) -> None:
        """Stop reading from a worker that has exited."""
        self._workers.remove(worker)
        for fd in (*worker.outputs.values(), worker.channel.read_fd):
            self._loop.forget(fd)

    def clear(self) -> None:
        """Forget all workers. The caller closes them."""
        self._workers = []

    def drain(self, worker: WorkerPipes) -> None:
        """Relay what a worker wrote before it died, so that it precedes the news of its death."""
        self._drain_output(worker)
        for frame in worker.channel.drain():
            self._up.queue(frame.raw)

    def _forward(self, worker: WorkerPipes, frames: list[wire.Frame]) -> None:
        for frame in frames:
            if frame.kind == wire.Outcome.__name__:
                self._drain_output(worker)  # printed before the outcome
            self._up.queue(frame.raw)
        self._pause_if_flooded()
        if worker.channel.broken is not None and not worker.exited:
            self._on_broken(worker)

    def _watch_output(self, worker: WorkerPipes) -> None:
        for stream, fd in worker.outputs.items():
            self._loop.on_readable(fd, partial(self._on_output, worker, stream))

    def _on_output(self, worker: WorkerPipes, stream: int) -> None:
        self._read_output(worker, stream)

    def _read_output(self, worker: WorkerPipes, stream: int) -> bool:
        """Relay one piece of output. Return False if there is none now."""
        try:
            data = os.read(worker.outputs[stream], _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.forget(worker.outputs[stream])
            return False
        self._up.queue(wire.Output(attempt=worker.attempt, rank=worker.rank, stream=stream, body=data))
        self._pause_if_flooded()
        return True

    def _drain_output(self, worker: WorkerPipes) -> None:
        """Relay the output in the pipes, but not more than they hold: another process may keep writing to them."""
        for stream in worker.outputs:
            for _ in range(_PIPE_BYTES // _READ_BYTES):
                if not self._read_output(worker, stream):
                    break

    def _pause_if_flooded(self) -> None:
        if self._up.queued_bytes < _PAUSE_AT_BYTES or self._is_paused:
            return
        self._is_paused = True
        for worker in self._workers:
            self._pause(worker)

    def _pause(self, worker: WorkerPipes) -> None:
        worker.channel.pause_reading()
        for fd in worker.outputs.values():
            self._loop.forget(fd)

    def _resume(self) -> None:
        if not self._is_paused or self._up.queued_bytes > _RESUME_AT_BYTES:
            return
        self._is_paused = False
        for worker in self._workers:
            worker.channel.resume_reading()
            self._watch_output(worker)
