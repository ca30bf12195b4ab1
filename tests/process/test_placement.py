"""The CPUs that workers really have: of this machine, and of one with two NUMA nodes and GPUs, which is made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import DataParallelTrainer, LaunchError, Result, RunConfig, ScalingConfig
from tests.nvml import make_driver
from tests.process.conftest import reported
from tests.sysfs import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")
CPUS = sorted(os.sched_getaffinity(0))
ON_TWO_NODES = """\
import os, sys
import distrain
from distrain import DataParallelTrainer, RunConfig, ScalingConfig

def train():
    distrain.report({"cpus": sorted(os.sched_getaffinity(0))})

_, storage, start_method = sys.argv
scaling = ScalingConfig(num_workers=2, numa_binding="node", use_gpu=True, start_method=start_method)
DataParallelTrainer(train, scaling_config=scaling, run_config=RunConfig(storage_path=storage, name="run")).fit()
"""


def train() -> None:
    distrain.report({"cpus": sorted(os.sched_getaffinity(0)), "threads": os.environ["OMP_NUM_THREADS"]})


def fit(storage: Path, **scaling: Any) -> Result:
    scaling_config = ScalingConfig(num_workers=2, **scaling)
    return DataParallelTrainer(train, scaling_config=scaling_config, run_config=RunConfig(storage_path=storage)).fit()


@pytest.fixture
def one_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Leave this process one CPU, and return which."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    yield max(allowed)
    os.sched_setaffinity(0, allowed)


def test_without_a_binding_workers_have_the_cpus_of_the_launch(storage: Path, one_cpu: int) -> None:
    result = fit(storage)
    assert reported(result.path, 0)[0] == {"cpus": [one_cpu], "threads": "1"}


def run_on(machine: Machine, shown: str, folder: Path, start_method: str = "forkserver") -> str:
    """Train in a namespace where this machine is another one, with two GPUs. Return its stderr."""
    machine.write(folder / "sys")
    (folder / "train.py").write_text(ON_TWO_NODES)
    mounts = [f"mount --bind {folder}/sys/{name} /sys/{name}" for name in ("devices/system/node", "bus")]
    gpus = {"LD_LIBRARY_PATH": str(make_driver(folder / "driver")), "FAKE_GPUS": "gg", "CUDA_VISIBLE_DEVICES": shown}
    python = [sys.executable, str(folder / "train.py"), str(folder / "runs"), start_method]
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", f'{" && ".join(mounts)} && exec "$@"', "sh", *python],
        env={**os.environ, **gpus},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stderr


needs_two_nodes = pytest.mark.skipif(
    len({cpu % 2 for cpu in CPUS}) < 2
    or shutil.which("unshare") is None
    or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0,
    reason="needs an even and an odd CPU, and a namespace of its own",
)


@needs_two_nodes
@pytest.mark.sample(1)
@pytest.mark.parametrize(("shown", "start_method", "nodes"), [("0,1", "forkserver", (1, 0)), ("1,0", "spawn", (0, 1))])
def test_a_worker_is_bound_near_its_gpu(shown: str, start_method: str, nodes: tuple[int, int], tmp_path: Path) -> None:
    machine = Machine(sockets=2, cores_per_cache=CPUS[-1] // 2 + 1, is_interleaved=True, gpu_nodes=(1, 0))
    run_on(machine, shown, tmp_path, start_method)
    rows = map(json.loads, (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines())
    cpus = {row["rank"]: row["metrics"]["cpus"] for row in rows}
    assert cpus == {rank: [cpu for cpu in CPUS if machine.node_of(cpu) == node] for rank, node in enumerate(nodes)}


@needs_two_nodes
def test_workers_that_cannot_be_bound_are_refused(tmp_path: Path) -> None:
    machine = Machine(sockets=2, cores_per_cache=CPUS[-1] + 1, gpu_nodes=(1, 1))  # all CPUs here are on the first node
    said = run_on(machine, "0,1", tmp_path)
    assert "cannot start 2 workers: numa_binding='node': the CPUs " in said


def test_a_binding_without_gpus_is_refused(storage: Path) -> None:
    with pytest.raises(LaunchError, match="near their GPUs: set use_gpu=True, too"):
        fit(storage, numa_binding="node")
