"""The devices of this worker. Runs in: worker."""

from __future__ import annotations

import torch

from distrain.session import get_context


def get_devices() -> list[torch.device]:
    """Return the devices of this worker: its GPUs, or the CPU. Raises RuntimeError outside of a worker.

    ::

        ids = [device.index for device in get_devices()]
    """
    return [torch.device("cuda", index) for index in get_context().devices] or [torch.device("cpu")]


def get_device() -> torch.device:
    """Return the (first) device of this worker. Raises RuntimeError outside of a worker.

    ::

        inputs = inputs.to(get_device())
    """
    return get_devices()[0]
