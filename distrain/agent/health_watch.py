"""A look at the memory and the GPUs of this host now and then, while ranks train. Runs in: agent."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.hosts.memory import MemoryHistory
from distrain.hosts.troubles import troubles
from distrain.system.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.hosts.host import Gpu
    from distrain.hosts.troubles import Trouble
    from distrain.system.loop import Loop


class HealthWatch:
    """Tell the coordinator of troubles with ``send``, when there are others than before.

    A thread looks, because a GPU that has failed may not answer.

    Attribute ``memory``: what the ranks of the attempt have used.
    """

    def __init__(self, loop: Loop, send: Callable[[wire.Message], None]) -> None:
        self._loop = loop
        self._send = send
        self._thread = Background(loop, "health")
        self.memory = MemoryHistory()
        self.end()

    def begin(
        self, attempt: int, every_s: float, processes: Callable[[], dict[int, int]], gpus: Mapping[int, Sequence[Gpu]]
    ) -> None:
        """Look every so many seconds, for the first time after these. It ends the former watch.

        processes: returns the process of each rank. gpus: those of each rank; of none if there are none.
        """
        self.end()
        self._attempt = attempt
        memory = self.memory = MemoryHistory()

        def find(ranks: Mapping[int, int], before: list[Trouble]) -> list[Trouble]:
            try:
                return troubles(memory.look(ranks), gpus, before)
            except Exception:  # no oddity of a driver or of /proc may end a host
                return before

        def look() -> None:
            self._loop.call_in("health", every_s, look)
            if not self._thread.pending:
                self._thread.do(partial(find, processes(), self._found), partial(self._on_found, attempt))

        self._loop.call_in("health", every_s, look)

    def end(self) -> None:
        """Look no more. What the thread finds later is ignored."""
        self._loop.cancel("health")
        self._attempt = -1
        self._found: list[Trouble] = []

    def _on_found(self, attempt: int, found: list[Trouble]) -> None:
        if attempt != self._attempt:
            return
        if set(found) != set(self._found):
            self._send(wire.Troubles(attempt=attempt, troubles=[asdict(one) for one in found]))
        self._found = found
