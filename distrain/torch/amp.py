"""Automatic mixed precision, as three calls: accelerate(), prepare_optimizer(), backward(). Runs in: worker.

Models compute in bfloat16, whose range needs no scaling of the loss: :func:`accelerate` does all of the work. GPUs that
lack it (before Ampere) compute in float16, and the loss is scaled, so that small gradients do not vanish.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from operator import itemgetter
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from distrain.api import current
from distrain.system.log import say
from distrain.torch.device import get_device
from distrain.torch.nested import map_leaves
from distrain.worker.session import Session, session_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class _LossScaler(torch.amp.GradScaler):
    """A GradScaler whose scale changes when the next loss arrives: all optimizers of a loss see the same one."""

    _has_stepped = False

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        self._has_stepped = True
        return super().step(optimizer, *args, **kwargs)

    def scale(self, outputs: Any) -> Any:
        if self._has_stepped:
            self.update()
            self._has_stepped = False
        return super().scale(outputs)


_SCALERS: WeakKeyDictionary[Session, _LossScaler] = WeakKeyDictionary()
"""By session whose models compute in mixed precision: its scaler, which is disabled if they compute in bfloat16."""


def accelerate(amp: bool = False) -> None:
    """Choose the precision in which models compute: mixed precision with ``amp=True``, else full precision.

    Call it before the functions below. Where the loss is scaled, so are gradients until ``optimizer.step()``: to clip
    them in between, multiply the limit by the same scale.

    ::

        accelerate(amp=True)
        model = prepare_model(model)
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, labels in prepare_data_loader(loader):
            optimizer.zero_grad()
            backward(loss_function(model(inputs), labels))
            optimizer.step()

    Raises RuntimeError outside of a worker.
    """
    session = session_of("torch.accelerate")
    _SCALERS.pop(session, None)
    if amp:
        device = get_device()
        scaler = _SCALERS[session] = _LossScaler(device.type, enabled=_lacks_bfloat16(device))
        if scaler.is_enabled() and session.context.world_rank == 0:
            say("accelerate: GPUs of this kind lack bfloat16; models compute in float16, which needs backward(loss)")


def prepare_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer. If the loss is scaled, its ``step()`` skips gradients that have overflowed.

    ::

        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    Raises TypeError for anything but a torch optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"prepare_optimizer takes a torch optimizer, got {type(optimizer).__name__}")
    scaler = _scaler()
    if scaler and scaler.is_enabled():
        _scale_steps(optimizer, scaler)
    return optimizer


def backward(loss: torch.Tensor) -> None:
    """Call ``loss.backward()``, with the loss scaled if models compute in float16.

    ::

        loss = loss_function(model(inputs), labels)
        backward(loss)
    """
    scaler = _scaler()
    (scaler.scale(loss) if scaler else loss).backward()


def autocast_forward(model: nn.Module) -> nn.Module:
    """Make the model compute in mixed precision if :func:`accelerate` chose it. It can still be copied and pickled.

    Tensors of the lower precision that it returns become float32: the loss is computed outside of its forward().
    """
    session_of("torch.prepare_model")
    if scaler := _scaler():
        dtype = torch.float16 if scaler.is_enabled() else torch.bfloat16
        model.forward = _Autocast(model.forward, get_device().type, dtype)
    return model


def _scaler() -> _LossScaler | None:
    return _SCALERS.get(current.session) if current.session else None


def _lacks_bfloat16(device: torch.device) -> bool:
    """Return whether it could only emulate bfloat16, which is slow."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def _scale_steps(optimizer: Optimizer, scaler: _LossScaler) -> None:
    """Let ``step()`` of this one optimizer, and of no copy, go through the scaler."""
    inner = optimizer.step

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        outer, optimizer.step = optimizer.step, inner  # type: ignore[method-assign]
        try:
            return scaler.step(optimizer, *args, **kwargs)
        finally:
            optimizer.step = outer  # type: ignore[method-assign]

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign] # schedulers want a method


class _Autocast:
    """A model's ``forward`` in mixed precision, set as an attribute of that one model."""

    def __init__(self, forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> None:
        self._forward = forward
        self._device_type = device_type
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype):
            output = self._forward(*args, **kwargs)
        return map_leaves(output, partial(_widened, dtype=self._dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the model's own ``forward``: the loading program may lack distrain, and wants no autocast."""
        return itemgetter(0), ((self._forward,),)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Autocast:
        return _Autocast(deepcopy(self._forward, memo), self._device_type, self._dtype)


def _widened(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype is dtype else leaf
