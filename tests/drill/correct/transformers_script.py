"""Train with the Trainer of transformers; distrain's callback reports the checkpoints, and another one each step.

    python tests/drill/correct/transformers_script.py

The model is a tiny GPT-2 with dropout and random weights, so nothing is downloaded. An epoch has eight steps, and every
fourth step saves.
"""

import os
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported; the workers inherit it

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import distrain
from distrain.huggingface.transformers import TrainReportCallback, prepare_trainer
from distrain.torch import TorchTrainer


class Sequences(Dataset):
    """Sequences that count up, each from another number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 50
        return {"input_ids": tokens, "labels": tokens}


class LossCallback(TrainerCallback):
    """Report the loss of each step."""

    def on_log(self, args, state, control, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:  # not the summary at the end, which has times
            distrain.report({**logs, "step": state.global_step})


def build_model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2))


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    trainer = Trainer(
        model=build_model(),
        args=TrainingArguments(
            output_dir=config["output_dir"],
            max_steps=20,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            logging_steps=1,
            save_steps=4,
            save_total_limit=2,
            ddp_find_unused_parameters=False,
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=Sequences(),
        callbacks=[LossCallback(), TrainReportCallback()],
    )
    trainer = prepare_trainer(trainer)
    checkpoint = distrain.get_checkpoint()
    if checkpoint is None:
        trainer.train()
    else:
        with checkpoint.as_directory() as folder:
            trainer.train(resume_from_checkpoint=os.path.join(folder, TrainReportCallback.CHECKPOINT_NAME))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as output_dir:  # distrain stores the checkpoints
        result = TorchTrainer(
            train_func,
            train_loop_config={"output_dir": os.path.abspath(output_dir)},
            scaling_config=distrain.ScalingConfig(num_workers=2),
            run_config=distrain.RunConfig(
                storage_path="results", failure_config=distrain.FailureConfig(max_failures=3)
            ),
        ).fit()
    print(result.metrics)
