"""The modules that make batches for a framework. They are above this package: imported when needed. Runs in: worker."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from distrain.system.imports import require

_MAKERS = {"torch": "distrain.torch.batches", "tensorflow": "distrain.tensorflow.data"}


def batches_of(framework: str) -> Any:
    """Return the module for a framework. Raises ImportError if the framework is not installed."""
    require(framework)
    return import_module(_MAKERS[framework])
