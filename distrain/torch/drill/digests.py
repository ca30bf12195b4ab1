"""Digests of tensors, and help for hooks. Runs in: worker."""

from __future__ import annotations

import zlib
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from distrain.worker.places import outwards

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch import nn
    from torch.optim.optimizer import Optimizer


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return the sum and the norm of each tensor. A third number means that they are those of this rank's part."""
    found = {}
    for name, tensor in tensors.items():
        is_part = hasattr(tensor, "device_mesh")
        local: Any = getattr(tensor, "_local_tensor", tensor)
        values = (torch.view_as_real(local) if local.is_complex() else local).detach().double()
        found[name] = [float(values.sum()), float(torch.linalg.vector_norm(values)), *([0.0] if is_part else [])]
    return found


def digest(leaves: list[Any]) -> str:
    """Return a checksum of tensors and texts."""
    checksum = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            local = leaf.to_local() if hasattr(leaf, "to_local") else leaf
            data: Any = local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        else:
            data = str(leaf).encode()
        checksum = zlib.crc32(data, checksum)
    return f"{checksum:08x}"


def after(kind: Any, name: str, then: Callable[..., None]) -> None:
    """Have ``then(object, result, *arguments)`` called after each call of a method."""
    method = getattr(kind, name)

    @wraps(method)
    def both(self: Any, *arguments: Any, **options: Any) -> Any:
        result = method(self, *arguments, **options)
        then(self, result, *arguments)
        return result

    setattr(kind, name, both)


def keywords_of(frame: FrameType) -> dict[str, Any]:
    """Return the keyword arguments of the module that is being called, of which torch tells a hook nothing."""
    for function in outwards(frame):
        if function.f_code.co_name in ("_call_impl", "inner") and (found := function.f_locals.get("kwargs")):
            return dict(found)
    return {}


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer has."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def sampler_of(loader: Any) -> Any:
    """Return the sampler at the bottom of a loader, below those that a library has put around it."""
    for name in ("batch_sampler", "batch_sampler", "sampler"):
        inner = getattr(loader, name, None)
        loader = loader if inner is None else inner
    return loader
