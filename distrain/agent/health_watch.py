"""A look at the memory and the GPUs of this host now and then, while ranks train. Runs in: agent."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.hosts.troubles import gpu_troubles, memory_troubles
from distrain.system.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.hosts.host import Gpu
    from distrain.hosts.troubles import Trouble
    from distrain.system.loop import Loop


class HealthWatch:
    """Tell the coordinator of troubles with ``send``, when there are others than before.

    Memory and GPUs have a thread each, as a GPU that has failed may not answer.
    """

    def __init__(self, loop: Loop, send: Callable[[wire.Message], None]) -> None:
        self._loop = loop
        self._send = send
        self._threads = {kind: Background(loop, kind) for kind in ("memory", "GPU")}
        self._every_s = 0.0
        self._processes: Callable[[], dict[int, int]] = dict
        self._gpus: Mapping[int, Sequence[Gpu]] = {}
        self.end()

    def begin(
        self, attempt: int, every_s: float, processes: Callable[[], dict[int, int]], gpus: Mapping[int, Sequence[Gpu]]
    ) -> None:
        """Look every so many seconds, for the first time after these. It ends the former watch.

        processes: returns the process of each rank. gpus: those of each rank; of none if there are none.
        """
        self.end()
        self._attempt, self._every_s, self._processes, self._gpus = attempt, every_s, processes, gpus
        self._loop.call_in("health", every_s, self._look)

    def end(self) -> None:
        """Look no more. What threads find later is ignored."""
        self._loop.cancel("health")
        self._attempt = -1
        self._found: dict[str, Sequence[Trouble]] = {}
        self._told: set[tuple[int, str, str]] = set()

    def _look(self) -> None:
        self._loop.call_in("health", self._every_s, self._look)
        before = self._found.get("memory", [])
        self._do("memory", partial(memory_troubles, self._processes(), before))
        if any(self._gpus.values()):
            self._do("GPU", partial(gpu_troubles, self._gpus))

    def _do(self, kind: str, look: Callable[[], list[Trouble]]) -> None:
        thread = self._threads[kind]
        if not thread.pending:
            thread.do(partial(_try, look), partial(self._on_found, self._attempt, kind), lambda error: None)

    def _on_found(self, attempt: int, kind: str, found: Sequence[Trouble] | None) -> None:
        if attempt != self._attempt or found is None:
            return
        self._found[kind] = found
        troubles = [trouble for those in self._found.values() for trouble in those]
        keys = {trouble.key for trouble in troubles}
        if keys != self._told:
            self._told = keys
            self._send(wire.Troubles(attempt=attempt, troubles=[asdict(trouble) for trouble in troubles]))


def _try(look: Callable[[], list[Trouble]]) -> list[Trouble] | None:
    """Return what was found, None if the look failed: no oddity of a driver or of /proc may end a host."""
    try:
        return look()
    except Exception:
        return None
