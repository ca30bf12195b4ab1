"""The other end of an uploader. Runs in: agent, coordinator."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from distrain import wire
from distrain.system import process
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.system.loop import Loop

_NEWS = (wire.Notice, wire.HostFailed)
"""What it says without having been asked."""
_REPEATABLE = (wire.PublishCheckpoint, wire.UpdateManifest, wire.DeleteCheckpoints, wire.MirrorRecords)
"""Orders that may be carried out twice."""
_MOST_DEATHS = 3
_SLOW_S = 5.0
_FLUSH_S = 0.1
"""How long to wait before writing on what the kernel did not take yet."""


class UploaderLink:
    """A process that is started with the first order. ``answer`` hears what it says: the answers come in the order of
    the orders. Without a loop, answers are read in :meth:`settle` only.
    """

    def __init__(
        self,
        loop: Loop | None,
        answer: Callable[[wire.Message], None],
        *,
        flags: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._loop = loop
        self._answer = answer
        self._flags = flags
        self._environment = environment or {}
        self._opening: wire.OpenStorage | None = None
        self._process: process.Process | None = None
        self._channel: Channel
        self._open: deque[wire.Message] = deque()
        self._deaths = 0

    @property
    def pid(self) -> int | None:
        """None if it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def is_idle(self) -> bool:
        """Tell if every order is answered."""
        return not self._open

    def order(self, order: wire.Message) -> None:
        if isinstance(order, wire.OpenStorage):
            self._opening = replace(order, again=True)
        try:
            if self._process is None:
                self._start()
                if self._opening is not None and not isinstance(order, wire.OpenStorage):
                    self._send(self._opening)
        except OSError as error:
            self._open.append(order)
            self._fail(f"the uploader cannot be started: {error}")
            return
        self._send(order)

    def _send(self, order: wire.Message) -> None:
        self._open.append(order)
        self._channel.queue(order)

    def _start(self) -> None:
        argv = process.bootstrap_argv("uploader", str(os.getpid()), flags=self._flags)
        self._process = process.spawn(argv, environment=self._environment)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._channel = Channel(os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()))
        self._process.stdin.close()
        self._process.stdout.close()
        if self._loop is not None:
            self._channel.attach(self._loop, self._on_frames)

    def _on_frames(self, frames: list[wire.Frame]) -> None:
        if not frames:
            self._died()
        for frame in frames:
            message = frame.message()
            if not isinstance(message, _NEWS):
                self._open.popleft()
            self._answer(message)

    def detach(self) -> None:
        """The loop ends: from now on answers are read in :meth:`settle` only."""
        self._loop = None
        if self._process is not None:
            self._channel.detach()

    def settle(self, slow: Callable[[], None]) -> None:
        """Wait until every order is answered. Calls ``slow`` once if that takes some seconds."""
        told_at = time.monotonic() + _SLOW_S
        while self._open:
            if time.monotonic() >= told_at:
                told_at = math.inf
                slow()
            self._channel.flush()
            frames = self._channel.wait(_FLUSH_S)
            if frames or self._channel.at_end:
                self._on_frames(frames)

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _died(self) -> None:
        """Another one is started at once if it has a run directory to keep, or orders that may be carried out twice;
        else with the next order.
        """
        assert self._process is not None
        self._channel.close()
        self._process.kill()
        code = self._process.wait()
        self._process = None
        again = self._deaths < _MOST_DEATHS
        self._deaths += 1
        repeated = [order for order in self._open if again and isinstance(order, _REPEATABLE)]
        self._open = deque(order for order in self._open if order not in repeated)
        self._fail(f"the uploader has died (exit code {code})")
        opening = [self._opening] if again and self._opening is not None else []
        for order in (*opening, *repeated):
            self.order(order)

    def _fail(self, why: str) -> None:
        orders, self._open = list(self._open), deque()
        for order in orders:
            kept = f"; its files may still be in {order.source}" if isinstance(order, wire.Upload) else ""
            self._answer(wire.failed_answer(order, why + kept))
