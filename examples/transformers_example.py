"""Train a language model with the Trainer of Hugging Face's transformers, and continue it in a second run.

    pip install 'transformers[torch]'
    python examples/transformers_example.py

A Trainer inside the training function finds the process group. A callback reports each checkpoint that the Trainer
saves. The model is a tiny Llama without pretrained weights. The text is from the manual in Python's `help()`, one token
per byte. So nothing is downloaded.
"""

import argparse
import os
import tempfile
from pydoc_data import topics
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported; the workers inherit it

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import distrain
from distrain.huggingface.transformers import TrainReportCallback, prepare_trainer
from distrain.torch import TorchTrainer

CONTEXT = 64
"""Number of bytes in one example."""


class Pieces(Dataset):
    """A text, cut into pieces of equal length. The model shifts the labels itself."""

    def __init__(self, text: str) -> None:
        data = torch.tensor(list(text.encode()))
        self.pieces = data[: len(data) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def build_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
        )
    )


def train_func(config: dict[str, Any]) -> None:
    text = "".join(topics.topics.values())
    torch.manual_seed(0)
    trainer = Trainer(
        model=build_model(),
        args=TrainingArguments(
            output_dir=config["output_dir"],
            max_steps=config["steps"],
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=30,
            save_steps=30,
            save_total_limit=1,
            ddp_find_unused_parameters=False,
            use_cpu=not config["use_gpu"],
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=Pieces(text[:200_000]),
        eval_dataset=Pieces(text[-10_000:]),
        callbacks=[TrainReportCallback()],
    )
    trainer = prepare_trainer(trainer)
    checkpoint = distrain.get_checkpoint()
    if checkpoint is None:
        trainer.train()
    else:
        with checkpoint.as_directory() as folder:
            saved = os.path.join(folder, TrainReportCallback.CHECKPOINT_NAME)
            trainer.train(resume_from_checkpoint=saved)


def run(args: argparse.Namespace, steps: int, resume_from: distrain.Checkpoint | None = None) -> distrain.Result:
    with tempfile.TemporaryDirectory() as output_dir:  # distrain stores the checkpoints
        result = TorchTrainer(
            train_func,
            train_loop_config={"steps": steps, "use_gpu": args.use_gpu, "output_dir": output_dir},
            scaling_config=distrain.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
            resume_from_checkpoint=resume_from,
        ).fit()
    metrics = result.metrics
    print(f"after step {metrics['step']}: training loss {metrics['loss']:.3f}, test loss {metrics['eval_loss']:.3f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2, help="number of training processes (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="give every worker a GPU")
    args = parser.parse_args()
    first = run(args, steps=60)
    second = run(args, steps=120, resume_from=first.checkpoint)
    with second.checkpoint.as_directory() as folder:
        model = LlamaForCausalLM.from_pretrained(os.path.join(folder, TrainReportCallback.CHECKPOINT_NAME))
    prompt = torch.tensor([list(b"The value of ")])
    print(bytes(model.generate(prompt, max_new_tokens=40, do_sample=False)[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
