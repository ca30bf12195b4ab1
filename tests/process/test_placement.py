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
from distrain.hosts.cpu_topology import read_cpus
from tests.nvml import make_driver
from tests.process.conftest import reported
from tests.sysfs import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPUS = sorted(os.sched_getaffinity(0))
CORES = {cpu.core for cpu in read_cpus()}
ON_TWO_NODES = """\
import os, sys
import distrain
from distrain import DataParallelTrainer, RunConfig, ScalingConfig

def train():
    distrain.report({"cpus": sorted(os.sched_getaffinity(0))})

_, storage, shown = sys.argv
scaling = ScalingConfig(num_workers=2, numa_binding="node", use_gpu=not shown)
environment = {"env_vars": {"CUDA_VISIBLE_DEVICES": shown}} if shown else {}
run = RunConfig(storage_path=storage, name="run", worker_runtime_env=environment)
DataParallelTrainer(train, scaling_config=scaling, run_config=run).fit()
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


@pytest.mark.skipif(len(CORES) < 2, reason="this machine has one core")
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_exclusive_workers_share_no_cpu(start_method: str, storage: Path) -> None:
    result = fit(storage, numa_binding="exclusive", start_method=start_method)
    cpus = [reported(result.path, rank)[0]["cpus"] for rank in (0, 1)]
    assert not set(cpus[0]) & set(cpus[1])
    assert all(cpus)


def test_without_a_binding_workers_have_the_cpus_of_the_launch(storage: Path, one_cpu: int) -> None:
    result = fit(storage)
    assert reported(result.path, 0)[0] == {"cpus": [one_cpu], "threads": "1"}


def test_workers_that_cannot_be_bound_are_refused(storage: Path, one_cpu: int) -> None:
    problem = rf"localhost: numa_binding='exclusive': .* 1 core\(s\) of NUMA node \d+ \({one_cpu}\).* 2 ranks"
    with pytest.raises(LaunchError, match=problem):
        fit(storage, numa_binding="exclusive")


@pytest.mark.skipif(len({cpu % 2 for cpu in CPUS}) < 2, reason="needs an even and an odd CPU")
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="it mounts another /sys, as root")
@pytest.mark.parametrize(("shown", "node_of_rank_0"), [("", 1), ("0,1", 1), ("1,0", 0)])
def test_a_worker_is_bound_near_its_gpu(shown: str, node_of_rank_0: int, tmp_path: Path, storage: Path) -> None:
    """GPU 0 is on node 1, GPU 1 on node 0. Scripts may take GPUs without asking for them, as under torchrun.

    shown: CUDA_VISIBLE_DEVICES of workers that do so.
    """
    machine = Machine(sockets=2, cores_per_cache=CPUS[-1] // 2 + 1, is_interleaved=True, gpu_nodes=(1, 0))
    machine.write(tmp_path / "sys")
    (tmp_path / "train.py").write_text(ON_TWO_NODES)
    mounts = [f"mount --bind {tmp_path}/sys/{folder} /sys/{folder}" for folder in ("devices/system/node", "bus")]
    driver = {
        "LD_LIBRARY_PATH": str(make_driver(tmp_path / "driver")),
        "FAKE_GPUS": "gg",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    python = [sys.executable, str(tmp_path / "train.py"), str(storage), shown]
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{" && ".join(mounts)} && exec "$@"', "sh", *python],
        env={**os.environ, **driver},
        check=True,
        timeout=60,
    )
    rows = map(json.loads, (storage / "run" / "metrics.jsonl").read_text().splitlines())
    assert {row["rank"]: row["metrics"]["cpus"] for row in rows} == {
        rank: [cpu for cpu in CPUS if machine.node_of(cpu) == (rank + node_of_rank_0) % 2] for rank in (0, 1)
    }
