"""The user, who sits in front of the hosts: run scripts and the command line as the user does."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hosts.lab import Hosts

HEADER = """
import json, os, socket, sys
from pathlib import Path
import distrain
from distrain import DataParallelTrainer, RunConfig, ScalingConfig

def place():
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    return [os.environ.get("PLACE", socket.gethostname()), *(int(os.environ[name]) for name in names)]
"""
MAIN = """
def main(trainer=DataParallelTrainer, run={}, **scaling):
    config = ScalingConfig(**scaling)
    trainer(train, scaling_config=config, run_config=RunConfig(name="run", storage_path="runs", **run)).fit()
"""


@dataclass(frozen=True)
class Ran:
    """The outcome of a script or a command that the user ran in ``head``."""

    folder: Path
    code: int
    out: str
    err: str

    def reports(self) -> list[dict[str, Any]]:
        """Return the only report of each rank, by rank."""
        assert self.code == 0, self.err
        [reports] = self.reports_in_turn()
        return reports

    def reports_in_turn(self) -> list[list[dict[str, Any]]]:
        """Return the first report of each rank, by rank, then the second ones, and so on."""
        [run] = (self.folder / "runs").iterdir()
        ranks: dict[int, list[dict[str, Any]]] = {}
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            ranks.setdefault(line["rank"], []).append(line["metrics"])
        return [list(reports) for reports in zip(*(ranks[rank] for rank in sorted(ranks)), strict=True)]


class User:
    """The user in ``head``, in a directory that all hosts share."""

    def __init__(self, lab: Hosts, folder: Path) -> None:
        self.lab = lab
        self.folder = folder

    def runs(self, source: str, *arguments: str, **environment: str) -> Ran:
        (self.folder / "script.py").write_text(HEADER + source)
        return self.python("script.py", *arguments, **environment)

    def trains(self, train: str, call: str, **environment: str) -> Ran:
        """Run a training. ``call``: the arguments of ``main()``, in which ``hostfile`` is the lab's."""
        main = f"if __name__ == '__main__':\n    hostfile = {str(self.lab.hostfile)!r}\n    main({call})\n"
        return self.runs(train + MAIN + main, **environment)

    def python(self, *arguments: str, timeout_s: float = 90.0, **environment: str) -> Ran:
        return self._ran(sys.executable, *arguments, timeout_s=timeout_s, **environment)

    def launches(self, *arguments: str, timeout_s: float = 90.0, **environment: str) -> Ran:
        return self.python("-m", "distrain.launch", *arguments, timeout_s=timeout_s, **environment)

    def checks(self, *arguments: str, **environment: str) -> Ran:
        """Run ``--check``: of the hosts in the file ``hosts``, if there is one and ``arguments`` name no others."""
        if (self.folder / "hosts").exists() and "--hosts" not in arguments:
            arguments = ("--hostfile", "hosts", *arguments)
        return self.launches("--check", "--storage-path", "runs", *arguments, **{"COLUMNS": "200", **environment})

    def _ran(self, *argv: str, timeout_s: float = 90.0, **environment: str) -> Ran:
        done = self.lab.run("head", *argv, cwd=self.folder, timeout_s=timeout_s, **environment)
        return Ran(self.folder, done.returncode, done.stdout, done.stderr)
