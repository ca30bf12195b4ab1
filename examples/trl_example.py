"""Fine-tune a language model with trl's SFTTrainer and a LoRA adapter of peft, and resume exactly.

    pip install 'transformers[torch]' trl peft
    python examples/trl_example.py

The Trainer finds the process group. A callback reports each checkpoint that it saves: the adapter, without the weights
of the model, which do not change. The second run starts from the checkpoint in the middle of the first one, and ends
with exactly the same loss. The model is a tiny Llama without pretrained weights, and the tokenizer is made here, one
token per word. So nothing is downloaded.
"""

import argparse
import os
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported; the workers inherit it

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import distrain
from distrain.huggingface.transformers import TrainReportCallback
from distrain.torch import TorchTrainer

STEPS, SAVE_EVERY = 24, 12
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SUMS = [(a, b) for a in range(6) for b in range(6)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "plus", "is", *NUMBERS]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_dataset() -> Dataset:
    """Return prompts and completions: only the completion counts for the loss."""
    return Dataset.from_list(
        [{"prompt": f"{NUMBERS[a]} plus {NUMBERS[b]} is", "completion": f" {NUMBERS[a + b]}"} for a, b in SUMS] * 20
    )


def make_model() -> LlamaForCausalLM:
    """Return the model to fine-tune. With a real one: `from_pretrained(...)`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vocabulary = {"vocab_size": len(make_tokenizer()), "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**vocabulary, **sizes, initializer_range=0.3))


def train_func(config: dict[str, Any]) -> None:
    trainer = SFTTrainer(
        model=make_model(),
        args=SFTConfig(
            output_dir=config["output_dir"],
            max_steps=STEPS,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=4,
            save_steps=SAVE_EVERY,
            save_total_limit=1,
            ddp_find_unused_parameters=False,
            use_cpu=not config["use_gpu"],
            bf16=False,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=make_dataset(),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        callbacks=[TrainReportCallback()],
    )
    checkpoint = distrain.get_checkpoint()
    if checkpoint is None:
        trainer.train()
    else:
        with checkpoint.as_directory() as folder:
            trainer.train(resume_from_checkpoint=os.path.join(folder, TrainReportCallback.CHECKPOINT_NAME))


def run(args: argparse.Namespace, resume_from: distrain.Checkpoint | None = None) -> distrain.Result:
    with tempfile.TemporaryDirectory() as output_dir:  # distrain stores the checkpoints
        return TorchTrainer(
            train_func,
            train_loop_config={"use_gpu": args.use_gpu, "output_dir": output_dir},
            scaling_config=distrain.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
            resume_from_checkpoint=resume_from,
        ).fit()


def answer(prompt: str, adapter: str) -> str:
    """Return the next word that the model says with an adapter."""
    tokenizer = make_tokenizer()
    model = PeftModel.from_pretrained(make_model(), adapter)
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    return tokenizer.decode(model.generate(input_ids=tokens, max_new_tokens=1)[0, -1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2, help="number of training processes (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="give every worker a GPU")
    args = parser.parse_args()
    straight = run(args)
    checkpoint, metrics = straight.best_checkpoints[0]
    print(f"after step {metrics['step']}: loss {metrics['loss']}")
    resumed = run(args, resume_from=checkpoint)
    print(f"after step {STEPS}: loss {straight.metrics['loss']!r}")
    print(f"resumed in the middle: loss {resumed.metrics['loss']!r}")
    assert resumed.metrics["loss"] == straight.metrics["loss"]
    with resumed.checkpoint.as_directory() as folder:
        adapter = os.path.join(folder, TrainReportCallback.CHECKPOINT_NAME)
        print(f"two plus three is {answer('two plus three is', adapter)}")


if __name__ == "__main__":
    main()
