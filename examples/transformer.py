"""Train a small transformer from scratch to predict the next character of a text.

    python examples/transformer.py
    python examples/transformer.py --text book.txt --epochs 20 --use-gpu --num-workers 4

The default text is from the manual in Python's `help()`, so nothing is downloaded.
"""

import argparse
import math
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import distrain
from distrain.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model

CONTEXT = 64
"""Number of characters that the model sees at once."""


class Windows(Dataset):
    """Overlapping pieces of a text, as numbers. The target of each character is the next character."""

    def __init__(self, text: str, stride: int = CONTEXT // 2) -> None:
        self.alphabet = sorted(set(text))
        number = {character: index for index, character in enumerate(self.alphabet)}
        self.data = torch.tensor([number[character] for character in text])
        self.starts = range(0, len(text) - CONTEXT - 1, stride)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.data[self.starts[index] : self.starts[index] + CONTEXT + 1]
        return piece[:-1], piece[1:]


class LanguageModel(nn.Module):
    """A decoder: embeddings, layers of masked attention, and one score for each character of the alphabet."""

    def __init__(self, characters: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Parameter(torch.zeros(CONTEXT, width))
        for parameter in (self.embed.weight, self.place):
            nn.init.normal_(parameter, std=0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, characters)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        hidden = self.embed(characters) + self.place
        return self.scores(self.layers(hidden, mask=self.mask, is_causal=True))


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    windows = Windows(config["text"])
    loader = prepare_data_loader(DataLoader(windows, batch_size=32, shuffle=True, drop_last=True))
    model = prepare_model(LanguageModel(len(windows.alphabet)), parallel_strategy="ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)
        mean = torch.zeros((), device=get_device())
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            mean += loss.detach() / len(loader)
        dist.all_reduce(mean)
        distrain.report({"epoch": epoch, "loss": mean.item() / distrain.get_context().get_world_size()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2, help="number of training processes (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="give every worker a GPU")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the text (default: 3)")
    parser.add_argument("--text", type=Path, help="a file to learn from")
    args = parser.parse_args()
    text = args.text.read_text() if args.text else "".join(topics.topics.values())[:100_000]
    result = TorchTrainer(
        train_func,
        train_loop_config={"text": text, "epochs": args.epochs},
        scaling_config=distrain.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
    ).fit()
    print(f"loss of guessing: {math.log(len(set(text))):.3f}")
    print(f"loss of the model: {result.metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
