"""PyTorch on distrain. Torch itself is imported when a name that needs it is first used. Runs in: anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.absent import explain

if TYPE_CHECKING:
    from distrain.torch.amp import accelerate, backward, prepare_optimizer
    from distrain.torch.checkpoint import TorchCheckpoint
    from distrain.torch.config import TorchConfig
    from distrain.torch.data import prepare_data_loader
    from distrain.torch.device import get_device, get_devices, local_rank_zero_first
    from distrain.torch.model import prepare_model
    from distrain.torch.reproducibility import enable_reproducibility
    from distrain.torch.trainer import TorchTrainer

_HOME_OF = {
    "TorchCheckpoint": "checkpoint",
    "TorchConfig": "config",
    "TorchTrainer": "trainer",
    "accelerate": "amp",
    "backward": "amp",
    "enable_reproducibility": "reproducibility",
    "get_device": "device",
    "get_devices": "device",
    "local_rank_zero_first": "device",
    "prepare_data_loader": "data",
    "prepare_model": "model",
    "prepare_optimizer": "amp",
}

__all__ = [
    "TorchCheckpoint",
    "TorchConfig",
    "TorchTrainer",
    "accelerate",
    "backward",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "local_rank_zero_first",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(explain(__name__, name))
    from importlib import import_module

    value = getattr(import_module(f"distrain.torch.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
