"""The Trainer of transformers in real workers, on the CPU, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import distrain
from distrain.torch import TorchTrainer

of_libraries = pytest.mark.sample(2, of="libraries on torch")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

DIES_AT_STEP = 25


def train_with_a_failure(config: dict[str, Any]) -> None:
    """Forty steps, saved every ten; in the first attempt rank 1 dies at step 25. As for Ray, but for the import."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    import distrain.huggingface.transformers

    class DieOnce(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marker = Path(config["died"])
            if state.global_step == DIES_AT_STEP and args.process_index == 1 and not marker.exists():
                marker.touch()
                os._exit(7)

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
        )
    )
    pieces = (torch.arange(8) + torch.arange(64)[:, None]) % 16
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=config["output_dir"],
            max_steps=40,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_steps=5,
            save_steps=10,
            save_total_limit=1,
            ddp_find_unused_parameters=False,
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
    )
    trainer.add_callback(distrain.huggingface.transformers.RayTrainReportCallback())
    trainer.add_callback(DieOnce())
    trainer = distrain.huggingface.transformers.prepare_trainer(trainer)
    checkpoint = distrain.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint"))
    else:
        trainer.train()


@of_libraries
def test_a_run_goes_on_at_its_last_saved_step_when_a_rank_has_died(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = TorchTrainer(
        train_with_a_failure,
        train_loop_config={"died": str(tmp_path / "died"), "output_dir": str(tmp_path / "output")},
        scaling_config=distrain.ScalingConfig(num_workers=2),
        run_config=distrain.RunConfig(storage_path=storage, failure_config=distrain.FailureConfig(max_failures=1)),
    ).fit()
    assert (tmp_path / "died").exists()

    lines = [json.loads(line) for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines()]
    found = sorted((line["rank"], line["attempt"], line["metrics"]["step"]) for line in lines)
    assert found == [(rank, int(step > DIES_AT_STEP), step) for rank in (0, 1) for step in (10, 20, 30, 40)]
    losses = [line["metrics"]["loss"] for line in lines if line["rank"] == 0]
    assert losses[-1] < 0.8 * losses[0]
    assert result.metrics is not None
    assert result.metrics["epoch"] == 5.0

    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        saved = Path(folder, "checkpoint")
        assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= set(os.listdir(saved))
        assert json.loads((saved / "trainer_state.json").read_text())["global_step"] == 40
        assert not saved.is_symlink()


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
