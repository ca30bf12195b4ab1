"""The probe of a drill in one rank: it notes what happens, and kills when it is asked to. Runs in: worker.

Notes are lines of JSON in the log of the rank, so that they come back from every host.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any

from distrain.api.current import session_of
from distrain.drilling.fence import fence
from distrain.system.process import command_line, kill_tree, process_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.drilling.order import ProbeOrder, Unit

MARK = "\x1edrill "
"""Begins a line of notes."""
_LINGERS_S = 0.5
"""Seconds in which the drill sends a signal."""


class Probe:
    """Watches the session of this process, and training with torch."""

    def __init__(self, order: ProbeOrder, *, uses_torch: bool) -> None:
        self._order = order
        self._uses_torch = uses_torch
        self._counts: dict[Unit, int] = {"report": 0, "step": 0}
        self.steps_done = 0
        """Steps that have ended, while those that are counted have begun."""

    def __call__(self) -> None:
        """Seed the random numbers, and begin to watch. Called in the worker."""
        self._session = session = session_of("drill")
        self._pid = os.getpid()
        self.check_path: Callable[[object], None] = fence(self._order.fenced, self._order.allowed)
        rank = session.context.world_rank
        random.seed(rank)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(rank)
        self.note("begin")
        if self._uses_torch or "torch" in sys.modules:
            from distrain.torch.drill.training_state import TrainingWatch

            TrainingWatch(self, seed=rank)
        report, should_stop = session.report, session.should_stop

        def noted_report(metrics: Any, checkpoint: Any = None, *more: Any, **options: Any) -> None:
            if checkpoint is not None and self._order.act == "kill before report" and self._is_due():
                self._kill(os.getpid())
            began = time.time()
            report(metrics, checkpoint, *more, **options)
            seconds = time.time() - began
            self.count("report", saves=checkpoint is not None, seconds=seconds, steps=self.steps_done)

        def noted_should_stop() -> bool:
            if session._stop_calls == 0:
                self.note("should_stop")
            return bool(should_stop())

        session.report, session.should_stop = noted_report, noted_should_stop

    def note(self, what: str, **facts: Any) -> None:
        """Write a line into the log of this rank, unless this is another process that it has forked."""
        if os.getpid() != self._pid:
            return
        data = f"\n{MARK}{json.dumps({'what': what, 'time': time.time(), **facts})}\n".encode()
        while data:
            data = data[os.write(1, data) :]

    def count(self, unit: Unit, **facts: Any) -> None:
        """Note a report or a step, and act if it is time."""
        self.note(unit, **facts)
        self._counts[unit] += 1
        if unit != self._order.unit or not self._is_due():
            return
        match self._order.act:
            case "kill":
                self._kill(os.getpid())
            case "kill host":
                self._kill(_first_program())
            case "pause":
                self.note("pause")
                while True:
                    time.sleep(1)
            case "linger" if self._counts[unit] == self._order.at:
                self.note("linger")
                time.sleep(_LINGERS_S)

    def _is_due(self) -> bool:
        context, order = self._session.context, self._order
        is_meant = context.attempt == 0 and context.world_rank == order.rank
        return is_meant and 0 < order.at <= self._counts[order.unit]

    def _kill(self, root: int) -> None:
        """Kill a process and all below it."""
        self.note("kill")
        kill_tree(root)


def _first_program() -> int:
    """Return the pid of the process from which all others of distrain descend on this host."""
    pid, parent = os.getpid(), os.getppid()
    while b" ".join(command_line(parent)).startswith(b"distrain:"):
        pid, parent = parent, process_table()[parent].parent
    return pid
