"""The Trainer of transformers, on the CPU, without a network. Real workers train with it in examples/."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

of_libraries = pytest.mark.sample(2, of="libraries on torch")


@of_libraries
def test_without_transformers_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None; import distrain.huggingface.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "install it with: pip install 'distrain[transformers]'" in done.stderr


@of_libraries
def test_the_trainer_takes_batches_of_a_dataset_of_distrain(tmp_path: Path) -> None:
    """Each pass is an epoch, of the rows of this worker. The batches are those of the dataset."""
    import torch
    from transformers import Trainer, TrainingArguments

    from distrain import data
    from distrain.data.iterator import DataIterator
    from distrain.data.passes import Worker
    from distrain.huggingface.transformers import prepare_trainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen: list[list[int]] = []

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            self.seen.append(x.tolist())
            return {"loss": ((self.weight - x) ** 2).mean(), "logits": x}

    def batches(rows: int) -> Any:
        numbers = data.range(rows).map_batches(lambda batch: {"x": batch["id"].astype("float32")})
        shard = DataIterator(numbers, name="x", worker=Worker(0, 2))
        return shard.iter_torch_batches(batch_size=2, device="cpu")

    model = Model()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, use_cpu=True, disable_tqdm=True, report_to="none", save_strategy="no"
    )
    trainer = prepare_trainer(Trainer(model, arguments, train_dataset=batches(8), eval_dataset=batches(4)))
    trainer.train()
    assert model.seen == [[0, 1], [2, 3], [0, 1]]
    trainer.evaluate()
    assert model.seen[3:] == [[0, 1]]
