"""One trial of a drill: a run in a process of its own, which is watched, stopped or killed. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil

from distrain.drilling.fence import mirror
from distrain.drilling.journal import Journal, read_journal
from distrain.drilling.order import Order, ProbeOrder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_POLL_S = 0.1
_STOP_S = 15.0
"""Seconds in which a run ends after two signals."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is drilled: see :class:`~distrain.drilling.order.Order`.

    directory: the user's working directory. fenced: directories in which nothing must be written.
    """

    kind: str
    arguments: tuple[str, ...]
    directory: Path
    fenced: tuple[str, ...]
    workers: int | None = None
    seed: int = 0


class Trial:
    """A run in a directory of its own."""

    def __init__(self, target: Target, folder: Path, limit_s: float) -> None:
        self._target = target
        self._folder = folder
        self._limit_s = limit_s
        self.began = time.time()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        (folder / "files").mkdir()
        mirror(target.directory, folder / "work")

    def start(self, probe: ProbeOrder, workers: int | None = None) -> None:
        """Start the run, or continue it."""
        folder, target = self._folder, self._target
        order = Order(
            kind=target.kind,
            arguments=tuple(word.replace("{drill}", str(folder / "files")) for word in target.arguments),
            storage=str(folder / "runs"),
            workers=workers if workers is not None else target.workers,
            probe=replace(probe, seed=target.seed, fenced=target.fenced, allowed=str(folder)),
        )
        order.write(folder / "order.json")
        own = {"DISTRAIN_TRACKERS": "", "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"file:{folder / 'mlruns'}"}
        with open(folder / "console.log", "ab") as console:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "distrain", "drill-trial", str(folder / "order.json")],
                cwd=folder / "work",
                env={**os.environ, **own, "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )

    def watch(self, until: Callable[[Journal], bool]) -> bool:
        """Wait until something is so, the run ends, or its time is over. Return whether it has become so."""
        assert self._process is not None
        while time.time() < self.began + self._limit_s:
            has_ended = self._process.poll() is not None
            if until(self.journal()):
                return True
            if has_ended:
                return False
            time.sleep(_POLL_S)
        return False

    def journal(self) -> Journal:
        """Read what has happened so far."""
        return read_journal(self._folder / "runs/run")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask_to_stop(self) -> None:
        """Send SIGTERM, as before a preemption."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """End the run at once, and return the exit code."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            for wait_s in (0.5, _STOP_S):
                if self._process.poll() is None:
                    self.ask_to_stop()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(wait_s)
        if self._process.poll() is None:
            self.kill()
        return self._process.wait()

    def kill(self) -> None:
        """Kill all processes of the run at once, so that none sees another one die."""
        assert self._process is not None
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            processes = [root, *root.children(recursive=True)]
            for act in (psutil.Process.suspend, psutil.Process.kill):
                for process in processes:
                    with contextlib.suppress(psutil.Error):
                        act(process)
        self._process.wait()

    def last_words(self) -> str:
        """Return the last line on the console that says something."""
        lines = (self._folder / "console.log").read_text(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip() and "\x1e" not in line]
        named = [line for line in said if "rror" in line]
        return (named or said or ["it said nothing"])[-1]
