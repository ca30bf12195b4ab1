"""The agent's end of an uploader. Runs in: agent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from distrain import process, wire
from distrain.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.loop import Loop

__all__ = ["UploaderLink"]


class UploaderLink:
    """A process that is started with the first order. ``answer`` gets a :class:`~distrain.wire.Delivered` for each."""

    def __init__(self, loop: Loop, answer: Callable[[wire.Delivered], None], *, flags: Sequence[str]) -> None:
        self._loop = loop
        self._answer = answer
        self._flags = flags
        self._process: process.Process | None = None
        self._channel: Channel
        self._open: dict[tuple[int, int, int], wire.Upload] = {}

    def order(self, upload: wire.Upload) -> None:
        self._open[upload.attempt, upload.rank, upload.ordinal] = upload
        try:
            if self._process is None:
                self._start()
        except OSError as error:
            self._fail(f"the uploader cannot be started: {error}")
            return
        self._channel.queue(upload)

    def _start(self) -> None:
        argv = process.bootstrap_argv("uploader", str(os.getpid()), flags=self._flags)
        self._process = process.spawn(argv)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._channel = Channel(os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()))
        self._process.stdin.close()
        self._process.stdout.close()
        self._channel.attach(self._loop, self._on_frames)

    def _on_frames(self, frames: list[wire.Frame]) -> None:
        if not frames:
            self._died()
        for frame in frames:
            done = frame.message()
            assert isinstance(done, wire.Delivered)
            self._open.pop((done.attempt, done.rank, done.ordinal), None)
            self._answer(done)

    def _died(self) -> None:
        """The next order starts another one."""
        assert self._process is not None
        self._channel.close()
        self._process.kill()
        code = self._process.wait()
        self._process = None
        self._fail(f"the uploader has died (exit code {code})")

    def _fail(self, why: str) -> None:
        orders, self._open = list(self._open.values()), {}
        for order in orders:
            self._answer(
                wire.Delivered(
                    attempt=order.attempt,
                    rank=order.rank,
                    ordinal=order.ordinal,
                    files=[],
                    skipped=[],
                    failed=f"{why}; its files may still be in {order.source}",
                )
            )
