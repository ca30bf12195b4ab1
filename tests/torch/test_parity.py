"""prepare_model and prepare_data_loader train, to the last bit, as a script made by hand does under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import distrain
from distrain.torch import TorchTrainer

if TYPE_CHECKING:
    from pathlib import Path

sampled = pytest.mark.sample(1, of="equal numbers")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

WORKERS = 2

TRAIN = '''
def losses():
    """Of every step, exactly, on this rank."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.manual_seed(7)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model, loader = prepared(model, data, DataLoader, DistributedSampler, DistributedDataParallel)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item().hex())
    return found
'''

BY_HAND = """
def prepared(model, data, loader, sampler, wrap):
    return wrap(model), loader(data, batch_size=8, sampler=sampler(data, shuffle=True, seed=7))
"""

BY_DISTRAIN = """
def prepared(model, data, loader, sampler, wrap):
    from distrain.torch import prepare_data_loader, prepare_model
    return prepare_model(model), prepare_data_loader(loader(data, batch_size=8, shuffle=True))
"""

SCRIPT = """
import json, pathlib, sys
from torch import distributed
distributed.init_process_group("gloo")
pathlib.Path(sys.argv[1], f"{distributed.get_rank()}.json").write_text(json.dumps(losses()))
distributed.destroy_process_group()
"""


def under_torchrun(folder: Path) -> list[list[str]]:
    script = folder / "train.py"
    script.write_text(BY_HAND + TRAIN + SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(WORKERS),
        str(script),
        str(folder),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, timeout=100, capture_output=True)  # may abort at its very end
    found: list[list[str]] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    return found


def train_func() -> list[Any]:
    from torch import distributed

    names: dict[str, Any] = {}
    exec(BY_DISTRAIN + TRAIN, names)
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, names["losses"]())
    return gathered


@sampled
def test_losses_are_bit_equal_to_those_under_torchrun(tmp_path: Path, storage: Path) -> None:
    torchrun = under_torchrun(tmp_path)
    trainer = TorchTrainer(
        train_func,
        scaling_config=distrain.ScalingConfig(num_workers=WORKERS),
        run_config=distrain.RunConfig(storage_path=storage, worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}),
    )
    assert torchrun[0] != torchrun[1]  # each rank has data of its own
    assert len(torchrun[0]) == 18
    assert trainer.fit().return_value == torchrun
