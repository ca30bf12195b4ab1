"""TorchTrainer on the CPU, with real processes: the process group, its environment, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import distrain
from distrain.hosts.host_info import usable_cpus
from distrain.torch import TorchConfig, TorchTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

START_METHODS = ("forkserver", "spawn")
UserScript = Callable[..., "subprocess.CompletedProcess[str]"]


def fit(
    train: Callable[..., Any],
    storage: Path,
    *,
    workers: int = 2,
    start_method: Any = "forkserver",
    config: Mapping[str, Any] | None = None,
    torch_config: TorchConfig | None = None,
    max_failures: int = 0,
) -> distrain.Result:
    return TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=torch_config,
        scaling_config=distrain.ScalingConfig(num_workers=workers, start_method=start_method),
        run_config=distrain.RunConfig(
            storage_path=storage, failure_config=distrain.FailureConfig(max_failures=max_failures)
        ),
    ).fit()


def reports(result: distrain.Result) -> list[dict[str, Any]]:
    """Every report of every rank and attempt."""
    lines = (Path(result.path) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def last_by_rank(result: distrain.Result) -> dict[int, dict[str, Any]]:
    return {line["rank"]: line["metrics"] for line in reports(result)}


# -- the process group -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", START_METHODS)
def test_ranks_share_a_gloo_process_group(storage: Path, start_method: str) -> None:
    def train() -> None:
        import torch
        from torch import distributed as dist

        total = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(total)
        distrain.report(
            {
                "total": total,
                "rank": dist.get_rank(),
                "size": dist.get_world_size(),
                "backend": dist.get_backend(),
                "elastic": dist.is_torchelastic_launched(),
            }
        )

    ranks = last_by_rank(fit(train, storage, workers=3, start_method=start_method))
    assert ranks == {
        rank: {"total": 111.0, "rank": rank, "size": 3, "backend": "gloo", "elastic": True} for rank in range(3)
    }


def test_a_single_worker_has_a_process_group_too(storage: Path) -> None:
    def train() -> dict[str, Any]:
        import torch
        from torch import distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total)
        dist.barrier()
        return {"total": total.item(), "size": dist.get_world_size(), "backend": dist.get_backend()}

    assert fit(train, storage, workers=1).return_value == {"total": 1.0, "size": 1, "backend": "gloo"}


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


@pytest.mark.parametrize(
    ("settings", "error", "field"),
    [
        ({"backend": 3}, TypeError, "backend"),
        ({"backend": ""}, (TypeError, ValueError), "backend"),
        ({"init_method": "file"}, ValueError, "init_method"),
        ({"init_method": None}, ValueError, "init_method"),
        ({"timeout_s": 0}, ValueError, "timeout_s"),
        ({"timeout_s": -1.0}, ValueError, "timeout_s"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s"),
        ({"timeout_s": True}, TypeError, "timeout_s"),
        ({"timeout_s": "10"}, TypeError, "timeout_s"),
    ],
)
def test_a_bad_torch_config_names_the_field(settings: dict[str, Any], error: type[Exception], field: str) -> None:
    with pytest.raises(error, match=f"TorchConfig.{field}"):
        TorchConfig(**settings)


def test_something_else_than_a_torch_config_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch_config must be a distrain\.torch\.TorchConfig"):
        TorchTrainer(print, torch_config={"backend": "gloo"})  # type: ignore[arg-type]


# -- environment -----------------------------------------------------------------------------------------------------

# Of torchrun's own machinery: where its workers write their error, and what its agent handles.
TORCHRUN_INTERNALS = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}

PRINT_ENVIRONMENT = """
import json, os, sys
with open(os.path.join(sys.argv[1], os.environ["RANK"] + ".json"), "w") as file:
    json.dump(dict(os.environ), file)
"""


def environments(command: list[str], folder: Path) -> list[dict[str, str]]:
    """What two workers started by ``command`` have in their environment beside our own."""
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


def test_a_lone_worker_computes_on_all_usable_cpus(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> list[Any]:
        import torch

        return [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert fit(train, storage, workers=1).return_value == [usable_cpus(), str(usable_cpus())]


def test_the_users_number_of_threads_wins(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> list[Any]:
        import torch

        return [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]]

    threads = usable_cpus()  # ours would be half of that
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    assert fit(train, storage, workers=2).return_value == [threads, str(threads)]


# -- training --------------------------------------------------------------------------------------------------------

TRAIN_SOURCE = '''
"""A torchrun script; under TorchTrainer its train() runs with prepare_*."""
import os, sys
import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(96, 8, generator=generator), torch.randn(96, 4, generator=generator))


def loop(model, loader):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
    return losses


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4))


def train(config):
    import distrain.torch
    model = distrain.torch.prepare_model(build())
    loader = distrain.torch.prepare_data_loader(DataLoader(data(), batch_size=8, shuffle=True))
    write(config["folder"], loop(model, loader))


def write(folder, losses):
    with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
        file.write(" ".join(losses))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = loop(
        DistributedDataParallel(build()),
        DataLoader(data(), batch_size=8, sampler=DistributedSampler(data())),
    )
    write(sys.argv[1], losses)
    dist.barrier()
    dist.destroy_process_group()
'''


@pytest.mark.slow
def test_losses_are_those_of_torchrun_to_the_last_bit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN_SOURCE)
    launch = ["-m", "distrain.launch", "--num-workers", "2", "--storage-path", str(tmp_path / "runs")]
    commands = {
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), "torchrun"],
        "script": [*launch, str(script), "script"],
        "function": [*launch, "--set", "folder=function", f"{script}:train"],
    }
    losses = {}
    for name, command in commands.items():
        (tmp_path / name).mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, timeout=60)
        assert run.returncode == 0 or name == "torchrun"  # which aborts now and then at the end
        losses[name] = [(tmp_path / name / rank).read_text().split() for rank in "01"]
    assert [len(rank) for rank in losses["torchrun"]] == [18, 18]
    assert losses["script"] == losses["torchrun"]
    assert losses["function"] == losses["torchrun"]


def test_ranks_that_end_without_destroying_their_group_do_not_abort(tmp_path: Path) -> None:
    """Under torchrun 10 to 30 % of such processes die of SIGABRT when the interpreter goes down."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN_SOURCE.replace("    dist.destroy_process_group()\n", ""))
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "distrain.launch", "--num-workers", "4", "--storage-path", str(runs)]
    run = subprocess.run([*command, str(script), str(tmp_path)], capture_output=True, text=True, timeout=60)
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("start_method", START_METHODS)
def test_fit_needs_torch_only_in_the_workers(
    user_script: UserScript, no_torch_environment: dict[str, str], start_method: str
) -> None:
    run = user_script(TRAIN_WITHOUT_TORCH, start_method, env=no_torch_environment)
    assert (run.returncode, run.stdout) == (0, "sum 2.0\n"), run.stderr
    assert all(Path(no_torch_environment["HOOKED"], role).exists() for role in ("agent", "user"))


def test_the_command_line_needs_torch_only_in_the_workers(tmp_path: Path, no_torch_environment: dict[str, str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); print(d.get_rank())")
    command = [sys.executable, "-m", "distrain.launch", "--num-workers", "2", "--storage-path", str(tmp_path / "runs")]
    run = subprocess.run([*command, str(script)], env=no_torch_environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["[rank 0] 0", "[rank 1] 1"]
    assert all(Path(no_torch_environment["HOOKED"], role).exists() for role in ("agent", "user"))


# -- resources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"num_workers": 2, "use_gpu": True}, ["GPU", "0", "2", "leave out use_gpu=True"]),
        ({"num_workers": 3, "resources_per_worker": {"CPU": usable_cpus()}}, ["CPU", f"{usable_cpus() * 3:g}"]),
        ({"num_workers": 1, "resources_per_worker": {"memory": 2**60}}, ["memory"]),
    ],
)
def test_asking_for_more_than_there_is_fails_before_anything_starts(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: dict[str, Any], words: list[str]
) -> None:
    started = tmp_path / "started"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    trainer = TorchTrainer(
        started.touch,
        scaling_config=distrain.ScalingConfig(**scaling),
        run_config=distrain.RunConfig(storage_path=storage),
    )
    with pytest.raises(distrain.ResourcesError) as caught:
        trainer.fit()
    assert [word for word in words if word not in str(caught.value)] == []
    assert not started.exists()
