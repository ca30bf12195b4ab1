"""A GPU, or /dev/shm, without memory: what train_func's exception says, and which evidence is kept."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import cloudpickle
import pytest
import torch

import distrain
from distrain.torch import TorchTrainer
from distrain.worker import user_code

if TYPE_CHECKING:
    from pathlib import Path

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

HINT = "drop it onto https://pytorch.org/memory_viz"


def failing(train: Any, storage: Path, *, workers: int = 1, use_gpu: bool = False, retries: int = 0) -> Any:
    trainer = TorchTrainer(
        train,
        scaling_config=distrain.ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=distrain.RunConfig(
            storage_path=storage,
            name="run",
            failure_config=distrain.FailureConfig(max_failures=retries, retry_same_failure=True),
        ),
    )
    with pytest.raises(distrain.TrainingFailedError) as raised:
        trainer.fit()
    return raised.value


def snapshot(*segments: int, history: int = 0) -> dict[str, Any]:
    return {"segments": [*segments], "device_traces": [[*range(history)], []]}


def test_the_snapshot_of_the_latest_attempt_is_kept_and_named(storage: Path) -> None:
    """Only the call of CUDA is replaced."""

    def train() -> None:
        torch.cuda.memory._snapshot = lambda: snapshot(distrain.get_context().attempt)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    text = str(failing(train, storage, retries=1))
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in text.splitlines()[0]
    _, file = sorted((storage / "run").glob("evidence/*/memory/*"))
    assert f"distrain: what fills the GPU is in {file}: {HINT}" in text
    assert file.parent.parent.name == "attempt_1"
    assert pickle.loads(file.read_bytes())["segments"] == [1]


def test_a_long_history_is_left_out_and_a_huge_snapshot_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "_LARGEST_SNAPSHOT", 1000)
    storage = SimpleNamespace(experiment_fs_path="runs/run")
    context: Any = SimpleNamespace(attempt=0, world_rank=1, get_storage=lambda: storage)
    error = torch.cuda.OutOfMemoryError("no")

    def kept(segments: int, history: int) -> Any:
        session: Any = Mock(context=context)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot(*range(segments), history=history))
        where = user_code._gpu_memory(session, error)
        if where is None:
            return None
        assert f"runs/run/evidence/attempt_0/memory/rank_1.pickle: {HINT}" in where
        return pickle.loads(session.send.call_args.kwargs["body"])

    assert kept(1, 2) == {"segments": [0], "device_traces": [[0, 1], []]}
    assert kept(1, 1000) == {"segments": [0], "device_traces": [[], []]}
    assert kept(1000, 1) is None


@pytest.mark.gpu
def test_a_real_gpu_that_is_too_small(storage: Path) -> None:
    def train() -> None:
        torch.cuda.memory._record_memory_history(max_entries=100)
        kept = torch.ones(3 << 20, device="cuda")
        kept.new_empty(1 << 50, dtype=torch.uint8)

    error = failing(train, storage, use_gpu=True)
    [file] = (storage / "run").glob("evidence/attempt_0/memory/rank_0.pickle")
    assert f"{file}: {HINT}" in str(error)
    segments = pickle.loads(file.read_bytes())["segments"]
    blocks = [block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
    [frames] = [block["frames"] for block in blocks if block["requested_size"] == 12 << 20]
    assert any(frame["filename"] == __file__ for frame in frames)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a mount namespace")
def test_a_data_loader_without_shared_memory_is_told_what_helps(storage: Path) -> None:
    script = storage.parent / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "list(DataLoader(torch.ones(8, 4 << 20), batch_size=4, num_workers=1))\n"
    )
    run = f"{sys.executable} -m distrain run --storage-path {storage} {script}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=16m tmpfs /dev/shm && exec {run}"],
        capture_output=True,
        text=True,
        cwd=storage.parent,
    )
    if "mount: " in done.stderr:
        pytest.skip("nothing can be mounted here")
    assert "distrain: /dev/shm " in done.stderr
    assert "of its 16 MiB are used now; give the container more (docker run --shm-size=8g" in done.stderr
