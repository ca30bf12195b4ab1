"""The probe of a drill in one rank: it notes what happens, and kills when it is asked to. Runs in: worker.

Notes are lines of JSON in the log of the rank, so that they come back from every host.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from distrain.api.current import session_of
from distrain.drilling.fence import fence
from distrain.drilling.order import REPORTS, STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.drilling.order import ProbeOrder

MARK = "\x1edrill "
"""Begins a line of notes."""


class Probe:
    """Watches the session of this process, and the training with torch."""

    def __init__(self, order: ProbeOrder) -> None:
        self._order = order
        self._session = session_of("drill")
        self._counts = {REPORTS: 0, STEPS: 0}
        self.check_path: Callable[[object], None] = lambda path: None
        """Raises PermissionError if this file must not be written."""

    def install(self, *, uses_torch: bool) -> None:
        """Begin to watch."""
        order, session, context = self._order, self._session, self._session.context
        if order.fenced:
            self.check_path = fence(order.fenced, order.allowed)
        seed = order.seed + context.world_rank
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        self.note("begin", world=context.world_size, attempt=context.attempt)
        if uses_torch or "torch" in sys.modules:
            import torch

            from distrain.drilling.training_state import watch

            torch.manual_seed(seed)
            watch(self)
        report, should_stop = session.report, session.should_stop

        def noted_report(metrics: Any, checkpoint: Any = None, *more: Any, **options: Any) -> None:
            if self._is_due(order.unit) and order.act == "kill before report" and checkpoint is not None:
                self._kill()
            began = time.time()
            report(metrics, checkpoint, *more, **options)
            self.note("report", saves=checkpoint is not None, seconds=time.time() - began)
            self.count(REPORTS)

        def noted_should_stop() -> bool:
            answer: bool = should_stop()
            if session._stop_calls == 1 or answer:
                self.note("should_stop", answer=answer)
            return answer

        session.report, session.should_stop = noted_report, noted_should_stop

    def note(self, what: str, **facts: Any) -> None:
        """Write a line into the log of this rank."""
        line = json.dumps({"what": what, "time": time.time(), **facts})
        data = f"\n{MARK}{line}\n".encode()
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(1, data) :]

    def count(self, unit: str) -> None:
        """Count a report or a step, and act if it is time."""
        self._counts[unit] += 1
        if unit != self._order.unit or not self._is_due(unit):
            return
        match self._order.act:
            case "kill":
                self._kill()
            case "kill host":
                self.note("kill")
                _kill_host()
            case "pause":
                self.note("pause")
                while True:
                    time.sleep(1)

    def _is_due(self, unit: str) -> bool:
        context = self._session.context
        is_here = context.world_rank == self._order.rank and context.attempt == 0
        return is_here and 0 < self._order.at <= self._counts[unit]

    def _kill(self) -> NoReturn:
        self.note("kill")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def _kill_host() -> None:
    """Kill all processes that distrain has on this host, this one last."""
    ours = [one for one in psutil.Process().parents() if " ".join(one.cmdline()).startswith("distrain:")]
    below = ours[-1].children(recursive=True) if ours else []
    for process in (*reversed(ours), *below):
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)
