"""Goes away: what was here is in device, model and data. Runs in: worker."""

from __future__ import annotations

from distrain.torch.data import prepare_data_loader
from distrain.torch.device import get_device, get_devices
from distrain.torch.model import prepare_model

__all__ = ["get_device", "get_devices", "prepare_data_loader", "prepare_model"]
