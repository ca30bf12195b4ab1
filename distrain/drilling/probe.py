"""The probe of a drill in one rank: it notes what happens, and kills when it is asked to. Runs in: worker.

Notes are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.api.current import session_of
from distrain.drilling.isolation import confine, inside_file
from distrain.hosts.host import MIRROR
from distrain.system.process import command_line, kill_tree, own_package, process_table
from distrain.system.scratch import scratch_directory
from distrain.transfer.project.directories import is_below

if TYPE_CHECKING:
    from distrain.drilling.order import Order, Unit

MARK = "\x1edrill "
"""Begins a line of notes."""
_MOST_OPENED = 5000
"""Files that are looked at, at most."""
_LIBRARIES = (sys.prefix, sys.base_prefix, str(own_package()), "/usr", "/etc", "/proc", "/sys", "/dev")
_LINGERS_S = 0.5
"""Seconds in which the drill sends a signal."""


class Probe:
    """Watches the training in this process. ``order``: that of the trial.

    Subclasses know the ``rank`` and the ``attempt``, both counted from 0, and where a line of notes goes.
    """

    rank: int
    attempt: int

    def __init__(self, order: Order) -> None:
        self.order = order.probe
        self._began = order.began
        self._counts: dict[Unit, int] = {"report": 0, "step": 0}
        self.steps_done = 0
        """Steps that have ended, while those that are counted have begun."""
        self._opened: set[str] = set()

    def watch(self) -> None:
        """Seed the random numbers of Python, and begin to note which files are read."""
        self._pid = os.getpid()
        random.seed(self.rank)
        sys.addaudithook(self._note_reading)

    def watch_torch(self) -> None:
        """Seed the random numbers of torch, and begin to note steps."""
        from distrain.torch.drill.training_state import TrainingWatch

        TrainingWatch(self, seed=self.rank)

    def _note_reading(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note a file older than the drill that the script reads: it may be a snapshot of an earlier training."""
        if event != "open" or len(self._opened) == _MOST_OPENED:
            return
        with contextlib.suppress(OSError, TypeError, ValueError):  # such as a descriptor instead of a path
            path, is_reading = os.path.relpath(arguments[0]), arguments[2] & os.O_ACCMODE == os.O_RDONLY
            is_code = path.endswith((".py", ".pyc")) or os.path.abspath(path).startswith(_LIBRARIES)
            if is_reading and not is_code and path not in self._opened:
                self._opened.add(path)
                if os.path.isfile(path) and os.path.getmtime(path) < self._began:
                    self.note("open", path=path)

    def note(self, what: str, **facts: Any) -> None:
        """Write a line of notes, unless this is another process that this one has forked."""
        if os.getpid() == self._pid:
            self.write(f"\n{MARK}{json.dumps({'what': what, 'time': time.time(), **facts})}\n".encode())

    def write(self, line: bytes) -> None:
        """Write a line where the drill finds it."""
        raise NotImplementedError

    def count(self, unit: Unit, **facts: Any) -> None:
        """Note a report or a step, and act if it is time."""
        self.note(unit, **facts)
        self._counts[unit] += 1
        if unit != self.order.unit or not self.is_due():
            return
        match self.order.act:
            case "kill":
                self.note("kill")
                kill_tree(os.getpid())
            case "kill host":
                kill_tree(_first_program())
            case "pause":
                self.note("pause")
                while True:
                    time.sleep(1)
            case "linger" if self._counts[unit] == self.order.at:
                self.note("linger")
                time.sleep(_LINGERS_S)

    def is_due(self) -> bool:
        """Return whether it is time for this rank to act."""
        is_meant = self.attempt == 0 and self.rank == self.order.rank
        return is_meant and 0 < self.order.at <= self._counts[self.order.unit]


class SessionProbe(Probe):
    """The probe of a rank of distrain. Its notes go to the log of the rank, so that they come back from every host."""

    def __init__(self, order: Order, *, uses_torch: bool) -> None:
        super().__init__(order)
        self._trial, self._uses_torch = order, uses_torch

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Protect the files that this host sees before the rest of the work is unpickled, which may run code."""
        vars(self).update(state)
        if inside_file(Path(self._trial.folder)).exists():
            return
        mirror, temporary = os.environ.get(MIRROR, ""), scratch_directory() or ""
        has_copy = is_below(os.getcwd(), mirror or self._trial.folder)
        run = os.path.dirname(mirror)  # get_trial_dir() is beside the copy of the project
        if not confine((self._trial.folder, run, temporary), self._trial.roots) and not has_copy:
            raise PermissionError("a drill cannot protect your files on this host, whose kernel has no Landlock")
        if any(is_below(root, tempfile.gettempdir()) for root in self._trial.roots) and temporary:
            os.environ["TMPDIR"] = tempfile.tempdir = temporary

    def __call__(self) -> None:
        """Begin to watch. Called in the worker."""
        session = session_of("drill")
        self.rank, self.attempt = session.context.world_rank, session.context.attempt
        self.watch()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(self.rank)
        if self._uses_torch or "torch" in sys.modules:
            self.watch_torch()
        report, should_stop = session.report, session.should_stop

        def noted_report(metrics: Any, checkpoint: Any = None, *more: Any, **options: Any) -> None:
            if checkpoint is not None and self.order.act == "kill before report" and self.is_due():
                kill_tree(os.getpid())
            report(metrics, checkpoint, *more, **options)
            self.count("report", saves=checkpoint is not None, steps=self.steps_done)

        def noted_should_stop() -> bool:
            if session._stop_calls == 0:
                self.note("should_stop")
            return bool(should_stop())

        session.report, session.should_stop = noted_report, noted_should_stop

    def write(self, line: bytes) -> None:
        """Write a line into the log of this rank."""
        while line:
            line = line[os.write(1, line) :]


def _first_program() -> int:
    """Return the pid of the process from which all others of distrain descend on this host."""
    pid, parent = os.getpid(), os.getppid()
    while b" ".join(command_line(parent)).startswith(b"distrain:"):
        pid, parent = parent, process_table()[parent].parent
    return pid
