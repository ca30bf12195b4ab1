"""PyTorch on distrain. Torch itself is imported when a name that needs it is first used. Runs in: anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.api.ray_names import explain
from distrain.system.imports import lazy_names

if TYPE_CHECKING:
    from distrain.torch.amp import accelerate as accelerate
    from distrain.torch.amp import backward as backward
    from distrain.torch.amp import prepare_optimizer as prepare_optimizer
    from distrain.torch.checkpoint import TorchCheckpoint as TorchCheckpoint
    from distrain.torch.checkpoint import restore as restore
    from distrain.torch.checkpoint import snapshot as snapshot
    from distrain.torch.config import TorchConfig as TorchConfig
    from distrain.torch.data import gather_for_metrics as gather_for_metrics
    from distrain.torch.data import prepare_data_loader as prepare_data_loader
    from distrain.torch.device import get_device as get_device
    from distrain.torch.device import get_devices as get_devices
    from distrain.torch.model import prepare_model as prepare_model
    from distrain.torch.reproducibility import enable_reproducibility as enable_reproducibility
    from distrain.torch.trainer import TorchTrainer as TorchTrainer

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__, explain=explain)
