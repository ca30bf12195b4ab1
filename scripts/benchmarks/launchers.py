"""The launchers: the command of each for each task, and a check of the interpreters that they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.hosts.gpus import find_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PROGRAMS = Path(__file__).resolve().parent / "programs"
DISTRAIN = "distrain fit()"
DISTRAIN_HOSTS = "distrain fit(), hosts"
TORCHRUN = "torchrun"
RAY_REPORTS, RAY_TUNED_REPORTS = 4, 20

# Role of an interpreter -> the modules that it has to import, and the command that installs them.
NEEDS = {
    "distrain": (("torch", "distrain", "psutil"), "scripts/setup_venv examples,test"),
    "torchrunx": (("torch", "torchrunx"), "{python} -m pip install torchrunx"),
    "accelerate": (("torch", "accelerate"), "{python} -m pip install accelerate"),
    "ray": (("torch", "ray", "ray.train.torch"), "{python} -m pip install 'ray[train]' torch"),
}
CHECK_SCRIPT = """\
import importlib, json, platform, sys
found, missing = {"python": platform.python_version()}, {}
for name in sys.argv[1:]:
    try:
        found[name] = getattr(importlib.import_module(name), "__version__", "")
    except BaseException as error:
        missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps([found, missing]))
"""
CHECK_TIMEOUT_S = 120


class BadInterpreterError(Exception):
    """An interpreter lacks something that its role needs. The text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A launcher. command: (task, workers) -> argv. tasks: the tasks that it can run."""

    name: str
    command: Callable[[str, int], Sequence[str]]
    tasks: frozenset[str]
    remark: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    min_workers: int = 1


def check_interpreter(role: str, python: str) -> dict[str, str]:
    """Return the versions of the modules for this role. Raises BadInterpreterError if one is missing."""
    modules, remedy = NEEDS[role]
    option = "this interpreter" if role == "distrain" else f"--{role}-python"
    try:
        done = subprocess.run(
            [python, "-c", CHECK_SCRIPT, *modules], capture_output=True, text=True, timeout=CHECK_TIMEOUT_S
        )
    except OSError as error:
        raise BadInterpreterError(f"{option} {python}: cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise BadInterpreterError(f"{option} {python}: no answer after {CHECK_TIMEOUT_S} s") from None
    try:
        found, missing = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise BadInterpreterError(f"{option} {python}: is not a working Python: {said[-1]}") from None
    if missing:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in missing.items())
        raise BadInterpreterError(
            f"{option} {python}: cannot import {reasons}; install with: {remedy.format(python=python)}"
        )
    return {name: version for name, version in found.items() if "." not in name}


def environment_of_runs(workers: int) -> dict[str, str]:
    """Return the environment of all runs with so many workers.

    They can import the module of the programs, and send no usage data. If each worker can have a GPU, it uses one.
    """
    path = os.pathsep.join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
    device = "cuda" if 0 < workers <= gpu_count() else "cpu"
    return {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "BENCHMARK_DEVICE": device}


@cache
def gpu_count() -> int:
    """Return the number of GPUs that programs see here."""
    return len(find_gpus(os.environ)[0])


def all_launchers(pythons: Mapping[str, str], hostfile: Path | None = None) -> list[Launcher]:
    """Return the launchers in the order of the table. pythons: role -> interpreter, for the optional roles given."""
    launchers = [*_distrain(), *([_distrain_on(hostfile)] if hostfile else []), *_torchrun()]
    if "torchrunx" in pythons:
        launchers.append(_torchrunx(pythons["torchrunx"]))
    if "accelerate" in pythons:
        launchers.append(_accelerate(pythons["accelerate"]))
    if "ray" in pythons:
        launchers += _ray(pythons["ray"])
    return launchers


def _program(name: str) -> str:
    return str(PROGRAMS / f"{name}.py")


def _script(task: str, script: str = "torch_script") -> list[str]:
    return [_program("empty_script")] if task == "empty" else [_program(script), task]


def _distrain() -> list[Launcher]:
    fit = [sys.executable, _program("distrain_fit")]
    launch = [sys.executable, "-m", "distrain.launch", "--storage-path", "runs", "--num-workers"]
    return [
        Launcher(
            name=DISTRAIN,
            command=lambda task, workers: [*fit, task, str(workers), "forkserver"],
            tasks=frozenset({"start", "second", "empty", "report", "checkpoint", "hold", "ddp"}),
        ),
        Launcher(
            name=f"{DISTRAIN}, import torch",
            command=lambda task, workers: [*fit, task, str(workers), "forkserver", "import-torch"],
            tasks=frozenset({"start"}),
            remark="the user's script imports torch",
        ),
        Launcher(
            name=f"{DISTRAIN}, spawn",
            command=lambda task, workers: [*fit, task, str(workers), "spawn"],
            tasks=frozenset({"start"}),
        ),
        Launcher(
            name="distrain.launch",
            command=lambda task, workers: [*launch, str(workers), *_script(task)],
            tasks=frozenset({"start", "empty", "hold", "ddp"}),
        ),
    ]


def _distrain_on(hostfile: Path) -> Launcher:
    return Launcher(
        name=DISTRAIN_HOSTS,
        command=lambda task, workers: [sys.executable, _program("distrain_fit"), task, str(workers), "forkserver"],
        tasks=frozenset({"start"}),
        remark="over ssh",
        environment={"DISTRAIN_HOSTFILE": str(hostfile), "DISTRAIN_ENV": "BENCHMARK_*"},
    )


def _torchrun() -> list[Launcher]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return [
        Launcher(
            name=TORCHRUN,
            command=lambda task, workers: [*run, str(workers), *_script(task)],
            tasks=frozenset({"start", "empty", "hold", "ddp"}),
        ),
        Launcher(
            name="torch elastic_launch",
            command=lambda task, workers: [sys.executable, _program("elastic_launch"), task, str(workers)],
            tasks=frozenset({"second"}),
            remark="torchrun from Python",
        ),
    ]


def _torchrunx(python: str) -> Launcher:
    return Launcher(
        name="torchrunx",
        command=lambda task, workers: [python, _program("torchrunx_run"), task, str(workers)],
        tasks=frozenset({"start", "second", "empty", "hold", "ddp"}),
    )


def _accelerate(python: str) -> Launcher:
    """Return ``accelerate launch`` with --multi_gpu, which starts several processes even without a GPU.

    With --cpu, accelerate would need MPI. Without GPUs, the script's Accelerator(cpu=True) uses gloo.
    """
    launch = [python, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"]
    settings = ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "--num_processes"]
    return Launcher(
        name="accelerate launch",
        command=lambda task, workers: [*launch, *settings, str(workers), *_script(task, "accelerate_script")],
        tasks=frozenset({"start", "empty", "hold", "ddp"}),
        min_workers=2,  # accelerate makes no process group for a single process
    )


def _ray(python: str) -> list[Launcher]:
    def fit(reports: int) -> Callable[[str, int], list[str]]:
        return lambda task, workers: [python, _program("ray_fit"), task, str(workers), str(reports)]

    return [
        Launcher(
            name="Ray Train",
            command=fit(RAY_REPORTS),
            tasks=frozenset({"start", "second", "empty", "report", "checkpoint", "hold", "ddp"}),
        ),
        Launcher(
            name="Ray Train, 0.1 s checks",
            command=fit(RAY_TUNED_REPORTS),
            tasks=frozenset({"report"}),
            remark="RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.1",
            environment={"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"},
        ),
    ]
