"""Programs that start a script as several ranks: torchrun, mpirun, srun, and pods that only get torch's variables."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.hosts.slurm import SlurmLab

PREAMBLE = """
import json, os, signal, sys, tempfile, time, traceback
from pathlib import Path
import distrain
from distrain import *
from distrain.api.backend import BackendConfig
from distrain.collective import barrier, broadcast_from_rank_zero

NAMES = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "RANK")
RANK = int(next((os.environ[name] for name in NAMES if name in os.environ), 0))
FOLDER = Path(sys.argv[1])
said = {"pid": os.getpid()}

def write():
    (FOLDER / f"rank_{RANK}.new").write_text(json.dumps(said))
    (FOLDER / f"rank_{RANK}.new").rename(FOLDER / f"rank_{RANK}.json")

def store(step):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "step").write_text(str(step))
        Path(folder, f"of_{RANK}").write_text(str(step))
        distrain.report({"step": step, "rank": RANK}, Checkpoint(folder))

def first_step():
    checkpoint = distrain.get_checkpoint()
    return int(Path(checkpoint.path, "step").read_text()) + 1 if checkpoint else 0

def outcome(function, name=None, **options):
    try:
        return ["returned", fit(function, name, **options).return_value]
    except Exception as error:
        return [type(error).__name__, str(error), type(getattr(error, "original", None)).__name__]
"""

WITHOUT_TORCH = (
    PREAMBLE
    + """
import pickle

class Files(BackendConfig):
    '''Ranks that gather by files, for tests that need no torch.'''

    count = 0

    def gather(self, value):
        Files.count += 1
        folder = FOLDER / "gathered" / os.environ["MASTER_PORT"] / str(Files.count)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"new_{RANK}").write_bytes(pickle.dumps(value))
        (folder / f"new_{RANK}").rename(folder / str(RANK))
        files = [folder / str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
        while not all(file.exists() for file in files):
            time.sleep(0.005)
        return [pickle.loads(file.read_bytes()) for file in files]

def fit(function, name, storage_path=FOLDER / "runs", **options):
    run = RunConfig(name=name, storage_path=storage_path)
    return DataParallelTrainer(function, backend_config=Files(), run_config=run, **options).fit()
"""
)


@dataclass
class Started:
    """A script that runs as several ranks. ``processes``: one launcher, or all ranks."""

    folder: Path
    ranks: int
    processes: list[subprocess.Popen[str]]
    output: str = field(default="")

    def wait(self, timeout_s: float = 60.0) -> list[int]:
        """Wait, and return the exit codes."""
        outputs = [process.communicate(timeout=timeout_s)[0] for process in self.processes]
        self.output = "\n".join(outputs)
        return [process.returncode for process in self.processes]

    def files(self) -> list[Path]:
        """Return the files of all ranks."""
        return [self.folder / f"rank_{rank}.json" for rank in range(self.ranks)]


class Launcher:
    """A way to start a script as several ranks."""

    def __init__(self, name: str, command: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._command = command
        self._environment = os.environ if environment is None else environment

    def __repr__(self) -> str:
        return self.name

    def start(self, folder: Path, source: str, *arguments: str, ranks: int = 2) -> Started:
        """Start the ranks in a session of their own."""
        script = folder / "script.py"
        script.write_text(source)
        words = [word.replace("RANKS", str(ranks)) for word in shlex.split(self._command)]
        commands = [[*words, str(script), str(folder), *arguments]] * (1 if self._command else ranks)
        if not self._command:
            commands = [[sys.executable, *command] for command in commands]
        port, pods = str(_free_port()), not self._command
        return Started(
            folder,
            ranks,
            [
                subprocess.Popen(
                    command,
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    text=True,
                    env={
                        **self._environment,
                        "OMP_NUM_THREADS": "1",
                        **(_of_pod(rank, ranks, port) if pods else {}),
                    },
                )
                for rank, command in enumerate(commands)
            ],
        )


def _of_pod(rank: int, ranks: int, port: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launcher(name: str, slurm: SlurmLab | None = None) -> Launcher:
    """Return a launcher; skip the test if it is not installed. ``slurm``: the cluster for srun, which uses a node for
    each rank."""
    if name == "torchrun":
        return Launcher(name, f"{sys.executable} -m torch.distributed.run --nproc-per-node RANKS")
    if name == "mpirun":
        if shutil.which("mpirun") is None:
            pytest.skip("mpirun is not installed (apt-get install openmpi-bin)")
        return Launcher(name, f"mpirun --allow-run-as-root --oversubscribe -n RANKS {sys.executable}")
    if slurm is not None:
        srun = slurm.argv("head", "srun", "--quiet", "--ntasks-per-node=1", "--nodes=RANKS", sys.executable)
        return Launcher(name, shlex.join(srun), slurm.environment())
    return Launcher(name, "")


def end(started: Started) -> None:
    """Kill what is left of a failed test."""
    for process in started.processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
