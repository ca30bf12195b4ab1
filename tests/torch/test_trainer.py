"""TorchTrainer on the CPU, with real processes: the process group, its environment, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import distrain
from distrain.hosts.host_info import usable_cpus
from distrain.torch import TorchConfig
from tests.torch.ranks import fit, last_by_rank, reports

sampled = pytest.mark.sample(4, of="training with torch")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

START_METHODS = ("forkserver", "spawn")
UserScript = Callable[..., "subprocess.CompletedProcess[str]"]


# -- the process group -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_a_worker_shares_nearly_all_memory_with_its_forkserver(storage: Path) -> None:
    def train() -> None:
        import torch

        torch.distributed.all_reduce(torch.ones(1))
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        own_mib = sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
        # The name of the whole module in the function would be a reason to import it.
        has_random = any(name.startswith("numpy.rando") for name in sys.modules)
        distrain.report({"own MiB": own_mib, "has numpy's random": has_random})

    for metrics in last_by_rank(fit(train, storage)).values():
        assert metrics["own MiB"] < 10
        assert not metrics["has numpy's random"]


@sampled
def test_torch_config_chooses_the_backend_and_how_long_a_collective_waits(storage: Path) -> None:
    def train() -> None:
        import torch
        from torch import distributed as dist

        assert dist.get_backend() == "cpu:gloo"
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        else:
            time.sleep(60)

    started = time.monotonic()
    with pytest.raises(distrain.WorkerGroupError, match=r"[Tt]imed out") as caught:
        fit(train, storage, torch_config=TorchConfig(backend="cpu:gloo", timeout_s=1))
    assert caught.value.culprit == 0
    assert time.monotonic() - started < 20


# -- environment -----------------------------------------------------------------------------------------------------

# Of torchrun's own machinery: where its workers write their error, and what its agent handles.
TORCHRUN_INTERNALS = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}

PRINT_ENVIRONMENT = """
import json, os, sys
with open(os.path.join(sys.argv[1], os.environ["RANK"] + ".json"), "w") as file:
    json.dump(dict(os.environ), file)
"""


def environments(command: list[str], folder: Path) -> list[dict[str, str]]:
    """The variables that two workers started by ``command`` have beside our own."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(PRINT_ENVIRONMENT)
    clean = {name: os.environ[name] for name in ("PATH", "HOME", "DISTRAIN_RUN_IDS") if name in os.environ}
    subprocess.run(
        [sys.executable, *command, str(script), str(folder)], env=clean, check=True, capture_output=True, timeout=60
    )
    return [
        {name: value for name, value in json.loads((folder / f"{rank}.json").read_text()).items() if name not in clean}
        for rank in (0, 1)
    ]


@sampled
def test_workers_have_every_variable_that_torchrun_sets(tmp_path: Path) -> None:
    theirs = environments(["-m", "torch.distributed.run", "--nproc-per-node", "2"], tmp_path / "torchrun")
    launch = ["-m", "distrain.launch", "--nproc-per-node", "2", "--storage-path", str(tmp_path / "runs")]
    ours = environments(launch, tmp_path / "distrain")

    for rank in (0, 1):
        assert theirs[rank].keys() - TORCHRUN_INTERNALS - ours[rank].keys() == set()
        same = {name for name in theirs[rank] if name.endswith(("RANK", "SIZE")) or name.startswith("ROLE")}
        same |= {"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"}
        assert {name: ours[rank][name] for name in same} == {name: theirs[rank][name] for name in same}
        assert ours[rank]["NODE_RANK"] == "0"
        assert ours[rank]["OMP_NUM_THREADS"] == str(max(1, usable_cpus() // 2))
    assert ours[0]["TORCHELASTIC_RUN_ID"] == ours[1]["TORCHELASTIC_RUN_ID"] != ""


def test_a_lone_worker_has_a_process_group_and_all_usable_cpus(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> list[Any]:
        import torch
        from torch import distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total)
        return [total.item(), dist.get_backend(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert fit(train, storage, workers=1).return_value == [1.0, "gloo", usable_cpus(), str(usable_cpus())]


# -- training --------------------------------------------------------------------------------------------------------

KEEPS_ITS_GROUP = """
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 4))
for _ in range(10):
    model(torch.randn(8, 8)).sum().backward()
dist.barrier()
"""


@sampled
def test_ranks_that_end_without_destroying_their_group_do_not_abort(tmp_path: Path) -> None:
    """Under torchrun 10 to 30 % of such processes die of SIGABRT when the interpreter goes down."""
    script = tmp_path / "train.py"
    script.write_text(KEEPS_ITS_GROUP)
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "distrain.launch", "--num-workers", "4", "--storage-path", str(runs)]
    run = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    assert "terminate called" not in run.stderr
    assert "SIGABRT" not in run.stderr


# -- random numbers --------------------------------------------------------------------------------------------------


def draw() -> None:
    """Report random numbers of every source; the first attempt fails once all ranks have reported."""
    import random

    import numpy
    import torch
    from torch import distributed as dist

    drawn = {"torch": torch.rand(1), "numpy": numpy.random.rand(), "python": random.random()}
    torch.manual_seed(3)
    distrain.report({**drawn, "seeded": torch.rand(1)})
    dist.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("a second attempt, please")


@sampled
def test_random_numbers_differ_over_ranks_attempts_and_start_methods_unless_seeded(storage: Path) -> None:
    drawn = []
    for start_method in START_METHODS:
        result = fit(draw, storage, start_method=start_method, max_failures=1)
        drawn += [line["metrics"] for line in reports(result)]
    assert len(drawn) == len(START_METHODS) * 2 * 2
    for source in ("torch", "numpy", "python"):
        assert len({metrics[source] for metrics in drawn}) == len(drawn), source
    assert len({metrics["seeded"] for metrics in drawn}) == 1


# -- without torch in our own processes ------------------------------------------------------------------------------

# Every interpreter that is not the forkserver or a worker gets a torch that cannot be imported, and says so.
NO_TORCH = """
import os, sys
program = sys.orig_argv[sys.orig_argv.index("-c") + 3] if "-c" in sys.orig_argv else "user"
if program in ("agent", "user"):
    class NoTorch:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torch":
                raise ImportError(f"{program} must not import torch")
    sys.meta_path.insert(0, NoTorch())
    open(os.path.join(os.environ["HOOKED"], program), "a").close()
"""

TRAIN_WITHOUT_TORCH = """
import sys
from distrain import RunConfig, ScalingConfig
from distrain.torch import TorchConfig, TorchTrainer

def train():
    import torch
    from torch import distributed as dist
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        torch_config=TorchConfig(timeout_s=30),
        scaling_config=ScalingConfig(num_workers=2, start_method=sys.argv[1]),
        run_config=RunConfig(storage_path="runs"),
    )
    print("sum", trainer.fit().return_value)
    assert "torch" not in sys.modules
"""


@pytest.fixture
def no_torch_environment(tmp_path: Path) -> dict[str, str]:
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(NO_TORCH)
    return {**os.environ, "PYTHONPATH": str(hook), "HOOKED": str(hook)}


@sampled
@pytest.mark.parametrize("start_method", START_METHODS)
def test_fit_needs_torch_only_in_the_workers(
    user_script: UserScript, no_torch_environment: dict[str, str], start_method: str
) -> None:
    run = user_script(TRAIN_WITHOUT_TORCH, start_method, env=no_torch_environment)
    assert (run.returncode, run.stdout) == (0, "sum 2.0\n"), run.stderr
    assert all(Path(no_torch_environment["HOOKED"], role).exists() for role in ("agent", "user"))
