"""PyTorch on distrain. Only ``prepare`` imports torch, when one of its names is first used. Runs in: anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distrain.torch.config import TorchConfig
    from distrain.torch.prepare import get_device, get_devices, prepare_data_loader, prepare_model
    from distrain.torch.trainer import TorchTrainer

_HOME_OF = {
    "TorchConfig": "config",
    "TorchTrainer": "trainer",
    "get_device": "prepare",
    "get_devices": "prepare",
    "prepare_data_loader": "prepare",
    "prepare_model": "prepare",
}

__all__ = ["TorchConfig", "TorchTrainer", "get_device", "get_devices", "prepare_data_loader", "prepare_model"]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'distrain.torch' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"distrain.torch.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
