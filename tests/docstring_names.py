"""The names that examples in docstrings use, and the functions that run the examples in workers."""

from __future__ import annotations

import math
import tempfile
import textwrap
import traceback
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

import distrain

MODULES = (
    *("distrain", "distrain.collective", "distrain.data", "distrain.huggingface.transformers", "distrain.lightning"),
    *("distrain.jax", "distrain.session", "distrain.torch", "distrain.trackers"),
    *(("distrain.tensorflow", "distrain.tensorflow.keras") if find_spec("tensorflow") else ()),
)


def public_names() -> dict[str, Any]:
    """Every public name of every public module."""
    modules = map(import_module, MODULES)
    return {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}


def names_for_examples(example: str) -> dict[str, Any]:
    """All public names, those of the example's own module first."""
    others_first = sorted(public_names().items(), key=lambda item: example.startswith(item[0].rpartition(".")[0]))
    names = {name.rpartition(".")[2]: value for name, value in others_first if name != "distrain.data.range"}
    return {**names, "__name__": "__main__", "distrain": distrain, "torch": torch, "train_func": train_and_report}


def names_in_worker() -> dict[str, Any]:
    """Stand-ins for the user's own objects."""
    import datasets
    import lightning.pytorch as pl
    import numpy as np
    import pandas as pd
    import transformers
    from torch.utils.data import DataLoader, TensorDataset

    model, inputs, labels = torch.nn.Linear(8, 2), torch.randn(6, 8), torch.zeros(6, dtype=torch.long)
    dataset = TensorDataset(inputs, labels)
    output_dir = tempfile.mkdtemp()
    return {
        "DataLoader": DataLoader,
        "arguments": transformers.TrainingArguments(output_dir=output_dir, use_cpu=True, report_to="none"),
        "checkpoint": distrain.Checkpoint.from_dict({"step": 1}),
        "dataset": dataset,
        "datasets": datasets,
        "download": lambda folder: folder,
        "inputs": inputs,
        "labels": labels,
        "loader": DataLoader(dataset, batch_size=3),
        "loss": 0.5,
        "math": math,
        "step": 1,
        "loss_function": torch.nn.functional.cross_entropy,
        "metrics": {"loss": 0.5},
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "np": np,
        "pd": pd,
        "pl": pl,
        "rows": distrain.data.range(100).map(lambda row: {"x": float(row["id"])}),
        "shard": distrain.get_dataset_shard("train"),
        "transformers": transformers,
    }


def train_and_report() -> None:
    distrain.report({"loss": 0.5}, distrain.Checkpoint.from_dict({"step": 1}))


def run_examples(config: dict[str, Any]) -> dict[str, str]:
    """In a worker: run every example, and return the tracebacks of those that fail."""
    import lightning.pytorch  # noqa: F401 - here the forkserver sees it, and imports it once for all workers
    import transformers  # noqa: F401

    failures = {}
    for name, source in config["examples"].items():
        try:
            exec(compile(source, name, "exec"), {**names_for_examples(name), **names_in_worker()})
        except Exception:
            failures[name] = f"{name}:\n{textwrap.indent(source, '    ')}\n{traceback.format_exc()}"
    return failures


def validate(checkpoint: distrain.Checkpoint, split: str = "") -> dict[str, Any]:
    return {"split": split}
