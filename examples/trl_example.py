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
from peft import AutoPeftModelForCausalLM, LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import distrain
from distrain.huggingface.transformers import TrainReportCallback
from distrain.torch import TorchTrainer

STEPS, SAVE_EVERY = 40, 20
NUMBERS = "zero one two three four five six seven eight nine ten".split()
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
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(make_tokenizer()), max_position_embeddings=16, **sizes))
