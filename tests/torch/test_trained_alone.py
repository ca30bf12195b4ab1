"""Ranks that train each for itself are told so, once; ranks that communicate in any way are not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import distrain
from distrain import DataParallelTrainer, RunConfig, ScalingConfig, TrainingFailedError
from distrain.torch import TorchConfig
from distrain.torch.config import flight_recorder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    len(flight_recorder.recorded(entries=False)) == 0 or not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
    reason="this torch records no collectives of gloo",
)
LINE = "distrain: 2 ranks trained independently: no collective was ever called"


def _gradients(model: torch.nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def alone() -> None:
    _gradients(torch.nn.Linear(2, 1))


def makes_a_group() -> None:
    alone()
    distributed.new_group([0, 1])


def leaves_its_group() -> None:
    alone()
    distributed.all_reduce(torch.ones(1))
    distributed.destroy_process_group()


def wraps_its_model() -> None:
    _gradients(DistributedDataParallel(torch.nn.Linear(2, 1)))


def means_to() -> None:
    alone()
    distrain.collective.barrier()


def prepares_a_model_of_its_own() -> None:
    from distrain.torch import prepare_model

    _gradients(prepare_model(torch.nn.Linear(2, 1), parallel_strategy=None))


def only_infers() -> None:
    with torch.no_grad():
        torch.nn.Linear(2, 1)(torch.ones(1, 2))


def fails() -> None:
    alone()
    raise ValueError("on purpose")


def _steps(model: torch.nn.Module, number: int = 30, optimizers: int = 1) -> None:
    chosen = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(optimizers)]
    for _ in range(number):
        _gradients(model)
        for optimizer in chosen:
            optimizer.step()


def averages_late() -> None:
    model = torch.nn.Linear(2, 1)
    _steps(model)
    for parameter in model.parameters():
        distributed.all_reduce(parameter.data)


class Trainer:
    def fit(self) -> None:
        _steps(torch.nn.Linear(2, 1))
        self.finish()

    def finish(self) -> None:
        value = torch.ones(1)
        _ = distributed.send(value, 1) if distributed.get_rank() == 0 else distributed.recv(value, 0)


def meets_late_in_a_method() -> None:
    Trainer().fit()


def accumulates_gradients() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    with model.no_sync():
        _steps(model)


SILENT = [
    averages_late, meets_late_in_a_method, accumulates_gradients, makes_a_group, leaves_its_group, wraps_its_model,
    means_to, prepares_a_model_of_its_own, only_infers, fails,
]  # fmt: skip


def log_of(function: object, storage: Path) -> str:
    """The output of the ranks."""
    trainer = DataParallelTrainer(
        function,  # type: ignore[arg-type]
        backend_config=TorchConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=storage),
    )
    with contextlib.suppress(TrainingFailedError):
        trainer.fit()
    return "".join(log.read_text() for log in (storage / "run" / "logs" / "attempt_0").glob("*.log"))


def test_ranks_that_train_alone_are_told_so_once(tmp_path: Path) -> None:
    assert log_of(alone, tmp_path).count(LINE) == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("function", SILENT)
def test_ranks_that_communicate_or_mean_to_be_alone_are_not(function: object, tmp_path: Path) -> None:
    assert LINE not in log_of(function, tmp_path)


@pytest.mark.parametrize(("group", "is_told"), [("", True), ("all_reduce(torch.ones(1)); ", False)])
def test_a_script_is_told_only_if_it_has_made_no_group(tmp_path: Path, group: str, is_told: bool) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch.distributed import *\ntorch.nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()\n"
        + (f"init_process_group('gloo'); {group}destroy_process_group()\n" if group else "")
    )
    command = [sys.executable, "-m", "distrain", "run", "--num-workers", "2", "--storage-path", "runs", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert (LINE in done.stdout + done.stderr) == is_told


@pytest.mark.parametrize(("more", "is_told"), [("", True), ("def average(x): torch.distributed.all_reduce(x)", False)])
def test_ranks_are_told_early_unless_a_file_of_the_user_names_a_collective(
    tmp_path: Path, more: str, is_told: bool
) -> None:
    (tmp_path / "helpers.py").write_text(f"import torch\n{more}\n")
    (tmp_path / "train.py").write_text(
        "import sys, torch, helpers\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(30):\n    model(torch.ones(1, 2)).sum().backward()\n    optimizer.step()\n"
        "print('30 steps', file=sys.stderr)\n"
    )
    command = [sys.executable, "-m", "distrain", "run", "--num-workers", "2", "--storage-path", "runs", "train.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=True)
    [log] = (tmp_path / "runs").glob("*/logs/attempt_0/rank_0.log")
    text = log.read_text()
    assert (text.index(LINE) < text.index("30 steps")) == is_told, text
