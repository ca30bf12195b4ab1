"""The table of drills: scripts that forget one thing, with its name, and scripts that resume exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
FORGETS = {
    "optimizer": "optimizer", "scheduler": "scheduler", "scaler": "scaler", "random": "random", "python": "random",
    "numpy": "random", "torch": "random", "rank0": "rank-0", "sampler_epoch": "sampler", "epoch": "epoch",
    "position": "position", "step": "step", "buffers": "buffers", "ema": "averages", "prefix": "prefix",
    "early": "early",
}  # fmt: skip
"""By the state that loop.py forgets: the cause that the drill should name."""


@dataclass(frozen=True)
class Case:
    """arguments: of ``distrain drill``. cause: what it should find; None if the script resumes exactly."""

    arguments: tuple[str, ...]
    cause: str | None = None


LOOP = f"{HERE / 'loop.py'}:train_func"
FAULTY = {
    name: Case(("--workers", "2", "--only", "kill", "--set", f"forget={name}", LOOP), cause)
    for name, cause in FORGETS.items()
}
CORRECT = {
    "loop": Case(("--workers", "2", LOOP)),
    "torchrun": Case(("--workers", "2", f"{HERE}/correct/torchrun_script.py")),
    "tensorflow": Case(("--workers", "2", f"{HERE}/correct/tensorflow_script.py")),
    "ray": Case(("--workers", "2", "--as-ray", f"{HERE}/correct/ray_script.py")),
}
"""More that resume exactly are in examples/."""


@dataclass(frozen=True)
class Seen:
    """The report of a drill as JSON, {} if it has failed, and what it has printed."""

    report: dict[str, Any]
    output: str
    seconds: float

    @property
    def causes(self) -> set[str]:
        """The names of all causes."""
        return {cause["name"] for verdict in self.report.get("verdicts", ()) for cause in verdict["causes"]}


def drill(case: Case, directory: Path, python: str = sys.executable) -> Seen:
    """Run a drill in a directory."""
    began = time.monotonic()
    command = [python, "-m", "distrain", "drill", "--json", *case.arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=400, check=False)
    report = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    assert done.returncode == (0 if report.get("ok") else 1 if report else 2), done.stderr
    return Seen(report, done.stdout + done.stderr, time.monotonic() - began)


def words(launcher: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words that start a launcher of this Python, whatever PATH is."""
    return (str(Path(sys.executable).with_name(launcher[0])), *launcher[1:])


def content(folder: Path) -> dict[str, object]:
    """Names, bytes, modes and times of all that is in a directory."""
    found: dict[str, object] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        data = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, status.st_ino, data)
    return found
