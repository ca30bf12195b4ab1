"""One trial of a drill: a run in a process of its own, which is watched, stopped or killed. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.drilling.causes import Cause
from distrain.drilling.command import ORDER, notes_folder
from distrain.drilling.isolation import mirror
from distrain.drilling.journal import Journal, read_journal, read_notes
from distrain.storage.runs.details import error_of, failures_in
from distrain.system.pickling import pickled
from distrain.system.process import Process, kill_tree, spawn_quiet, sweep_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.drilling.order import Order, ProbeOrder

_POLL_S = 0.1
_STOP_S = 15.0
"""Seconds in which a run ends after two signals."""
_REFUSALS = (errno.EACCES, errno.EROFS, errno.EOVERFLOW)
"""Errors of Landlock, of read-only file systems, and of overlays over directories of other users."""
_ERROR = re.compile(
    r"(?:\[rank\d+\]: ?)?(?!torch\.multiprocessing\.spawn\.)((?:[\w.]+\.)?\w*(?:Error|Exception)(?::.*)?)$"
)
"""The last line of a traceback, as torch shows that of a rank. spawn() raises an error that only contains another."""
_PROTECTED = (
    "a drill protects everything outside your directory: use relative paths or, in arguments, {drill}, as in "
    "--output {drill}/out"
)


class Trial:
    """A run in a directory of its own.

    template: what all trials run. limit_s: the longest time of this one, from now on.
    """

    def __init__(self, template: Order, folder: Path, limit_s: float) -> None:
        self._template, self._folder = template, folder
        self._deadline = time.time() + limit_s
        self._process: Process
        self._starts = 0
        self._said = 0
        """The size of the output before the last start."""
        if not folder.exists():
            (folder / "files").mkdir(parents=True)
            (folder / "tmp").mkdir()
            if template.copies:
                mirror(os.getcwd(), folder / "work", template.copies, template.fresh)

    def start(self, probe: ProbeOrder, workers: int | None = None) -> None:
        """Start the run, or continue it. ``workers``: another number of them."""
        folder, template = self._folder, self._template
        directory = folder / "work" if template.copies else Path.cwd()
        number = workers or template.workers

        def placed(words: Sequence[str]) -> tuple[str, ...]:
            known = {"{drill}": str(folder / "files"), "{workers}": str(number), os.path.realpath("."): str(directory)}
            for name, value in known.items():
                words = [word.replace(name, value) for word in words]
            return tuple(words)

        order = replace(
            template,
            arguments=placed(template.arguments),
            command=placed(template.command),
            start=self._starts,
            storage=str(folder / "runs"),
            workers=number,
            probe=probe,
            folder=str(folder),
        )
        self._starts += 1
        (folder / "order.pkl").write_bytes(pickled(replace(order, trainer=None)) + pickled(order))
        own = {
            "DISTRAIN_ON_END": "",
            "DISTRAIN_TRACKERS": "",
            "MLFLOW_TRACKING_URI": f"file:{folder / 'mlruns'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(folder / "tmp"),
            "WANDB_MODE": "offline",
        }
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # what one trial has compiled is there for all
            if name not in os.environ:
                own[name] = str(folder.parent / name.lower())
                os.makedirs(own[name], exist_ok=True)
        with open(folder / "console.log", "ab") as console:
            self._said = console.tell()
            self._process = spawn_quiet(
                [sys.executable, "-m", "distrain", "drill-trial", str(folder / "order.pkl")],
                directory=str(directory),
                environment=os.environ | own,
                output=console.fileno(),
            )

    def watch(self, until: Callable[[Journal], bool]) -> bool:
        """Wait until something is so, the run ends, or its time is over. Return whether it has become so."""
        while time.time() < self._deadline:
            has_ended, began = not self.is_running, time.time()
            if until(self.journal()):
                return True
            if has_ended:
                return False
            time.sleep(max(_POLL_S, 3 * (time.time() - began)))  # a large model has long notes
        return False

    def journal(self) -> Journal:
        """Read what has happened so far."""
        if self._template.command:
            return read_notes(notes_folder(self._folder), has_finished=self._process.poll() == 0)
        return read_journal(self._folder / "runs/run")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask_to_stop(self) -> None:
        """Send SIGTERM, as before a preemption."""
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """End the run at once, and return the exit code."""
        for wait_s in (0.5, _STOP_S):
            if self.is_running:
                self.ask_to_stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(wait_s)
        return self.kill()

    def kill(self) -> int:
        """Kill all processes of the run at once, so that none sees another one die. Return the exit code."""
        if self.is_running:
            kill_tree(self._process.pid)
        if self._template.command:  # its launcher may have left ranks behind
            sweep_environment(ORDER, str(self._folder / "order.pkl").__eq__)
        return self._process.wait()

    def files(self) -> set[str]:
        """Return the files that the run has written outside its run directory, relative to the working directory."""
        changed = {self._folder / "changes" / str(index) / "0": root for index, root in enumerate(self._template.roots)}
        places = {self._folder / "files": "{drill}", self._folder / "work": ".", **changed}
        found = ((path, folder, root) for folder, root in places.items() for path in folder.rglob("*"))
        return {
            os.path.relpath(Path(root, path.relative_to(folder)))
            for path, folder, root in found
            if path.is_file() and path.stat().st_mtime >= self._template.began
        }

    def why_failed(self) -> tuple[str, list[Cause]]:
        """Return the error of the run, or the last that the process has said, and what it points to."""
        error = error_of(self._folder / "runs/run")
        for failure in failures_in(error)[:1]:
            is_prefix = "state_dict" in error["message"] and "module." in error["message"]
            why = str(failure["summary"])
            hint = f" ({_PROTECTED})" if any(f"[Errno {number}]" in why for number in _REFUSALS) else ""
            return why + hint, [Cause("prefix", "")] if is_prefix else []
        said = (self._folder / "console.log").read_bytes()[self._said :].decode(errors="replace").splitlines()
        if self._template.command and (errors := list(filter(None, map(_ERROR.match, said)))):
            return errors[0][1], []
        return next((line for line in reversed(said) if line.strip() and "\x1e" not in line), "it says nothing"), []
