"""The parent's end of a process that carries out orders: such as an uploader. Runs in: agent, coordinator."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.system import process
from distrain.wire.child_link import ChildLink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distrain.system.loop import Loop

    _Order = tuple[wire.Message, Callable[[Any], None]]
    """An order, and what gets its answer."""

_REPEATABLE = (wire.PublishCheckpoint, wire.UpdateManifest, wire.DeleteCheckpoints, wire.MirrorRecords, wire.Deliver)
"""Orders that may be carried out twice."""
_MAX_RESTARTS = 3
_SLOW_S = 5.0
"""Seconds to wait for answers before the user is informed."""
_FLUSH_S = 0.1
"""Seconds between attempts to write what the kernel did not take."""


class OrderLink:
    """A process that carries out orders, started with the first one.

    It answers orders in their order. If it dies, open orders fail, except those that another process may repeat.

    loop: without one, answers are read by :meth:`settle` only.
    hear: gets every message of the process that answers no order.
    program, arguments: its name and arguments for :func:`~distrain.system.process.bootstrap_argv`. The pid of this
        process comes before the arguments.
    """

    def __init__(
        self,
        loop: Loop | None,
        hear: Callable[[wire.Message], None],
        program: str,
        *arguments: str,
        flags: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._loop = loop
        self._hear = hear
        self._program = program
        self._argv = process.bootstrap_argv(program, str(os.getpid()), *arguments, flags=flags)
        self._environment = environment
        self._opening: _Order | None = None
        self._child: ChildLink | None = None
        self._open: deque[_Order] = deque()
        self._deaths = 0

    @property
    def pid(self) -> int | None:
        """Pid of the process; None if there is none."""
        return None if self._child is None else self._child.process.pid

    @property
    def is_idle(self) -> bool:
        """True if every order is answered."""
        return not self._open

    def order(self, order: wire.Message, then: Callable[[Any], None]) -> None:
        """Send an order. Call ``then`` with the answer, also if the process cannot be started.

        The answer is :class:`~distrain.wire.FilesCopied` for an upload, :class:`~distrain.wire.OrderDone` for others.
        """
        if isinstance(order, wire.OpenStorage):
            self._opening = replace(order, again=True), then
        try:
            child = self._child or self._start(opens=isinstance(order, wire.OpenStorage))
        except OSError as error:
            self._answer_failed([(order, then)], f"the {self._program} cannot be started: {error}")
        else:
            self._send(child, (order, then))

    def _send(self, child: ChildLink, order: _Order) -> None:
        self._open.append(order)
        child.channel.queue(order[0])

    def _start(self, *, opens: bool) -> ChildLink:
        child = self._child = ChildLink(self._argv, environment=self._environment)
        if self._loop is not None:
            child.channel.attach(self._loop, self._on_frames)
        if self._opening is not None and not opens:
            self._send(child, self._opening)
        return child

    def _on_frames(self, frames: list[wire.Frame]) -> None:
        child = self._child
        if not frames and child is not None:  # else an answer has closed the link
            self._on_death()
        for frame in frames:
            if self._child is not child:
                break
            message = frame.message()
            if isinstance(message, (wire.OrderDone, wire.FilesCopied)):
                _, then = self._open.popleft()
                then(message)
            else:
                self._hear(message)

    def detach(self) -> None:
        """Do without the loop from now on: :meth:`settle` reads the answers."""
        self._loop = None
        if self._child is not None:
            self._child.channel.detach()

    def settle(self, slow: Callable[[], None]) -> None:
        """Wait until every order is answered. Call ``slow`` once if that takes longer than some seconds."""
        slow_at = time.monotonic() + _SLOW_S
        while self._open:
            if time.monotonic() >= slow_at:
                slow_at = math.inf
                slow()
            assert self._child is not None
            channel = self._child.channel
            channel.flush()
            frames = channel.wait(_FLUSH_S)
            if frames or channel.at_end:
                self._on_frames(frames)

    def close(self) -> None:
        """Kill the process, whatever it does."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _on_death(self) -> None:
        """Fail open orders, but have another process repeat those that are repeatable, and keep the storage open."""
        assert self._child is not None
        code = self._child.kill()
        self._child = None
        again = self._deaths < _MAX_RESTARTS
        self._deaths += 1
        opening = [self._opening] if again and self._opening is not None else []
        opened = [order for order in self._open if opening and isinstance(order[0], wire.OpenStorage)]
        repeated = [order for order in self._open if again and isinstance(order[0], _REPEATABLE)]
        lost = [order for order in self._open if order not in (*opened, *repeated)]
        self._open = deque()
        for order in (*opening, *repeated):
            self.order(*order)
        # At last, since the receiver of an answer may give new orders.
        self._answer_failed(lost, f"the {self._program} has died (exit code {code})")

    def _answer_failed(self, orders: Iterable[_Order], why: str) -> None:
        for order, then in orders:
            then(wire.failed_answer(order, why))
