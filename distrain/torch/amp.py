"""Automatic mixed precision by Ray's names: accelerate(), prepare_optimizer(), backward(). Runs in: worker.

Models compute in bfloat16, whose range needs no scaling of the loss: :func:`accelerate` does all of the work.
"""

from __future__ import annotations

from copy import deepcopy
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from distrain.system.log import warn
from distrain.torch.device import get_device, map_leaves
from distrain.worker.session import Session, session_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


_ACCELERATED: WeakSet[Session] = WeakSet()
"""The sessions whose models compute in mixed precision."""


def accelerate(amp: bool = False) -> None:
    """Choose the precision in which models compute: bfloat16 where that is safe with ``amp=True``, else full precision.

    Call it before :func:`prepare_model`. GPUs that lack bfloat16 (before Ampere) compute in full precision, with a
    warning: float16 needs ``torch.autocast`` and ``torch.amp.GradScaler`` in the script.

    ::

        accelerate(amp=True)
        model = prepare_model(model)

    Raises RuntimeError outside of a worker.
    """
    session = session_of("torch.accelerate")
    _ACCELERATED.discard(session)
    if not amp:
        return
    if not _lacks_bfloat16(get_device()):
        _ACCELERATED.add(session)
    elif session.context.world_rank == 0:
        warn(
            "accelerate(amp=True): no effect because GPUs of this kind lack bfloat16; for float16, use torch.autocast "
            "and torch.amp.GradScaler"
        )


def prepare_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer, which needs nothing in bfloat16.

    ::

        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    Raises TypeError for anything but a torch optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"prepare_optimizer takes a torch optimizer, got {type(optimizer).__name__}")
    return optimizer


def backward(loss: torch.Tensor) -> None:
    """Call ``loss.backward()``.

    ::

        loss = loss_function(model(inputs), labels)
        backward(loss)
    """
    loss.backward()  # type: ignore[no-untyped-call]


def autocast_forward(model: nn.Module) -> nn.Module:
    """Make the model compute in mixed precision if :func:`accelerate` chose it. It can still be copied and pickled.

    Tensors of the lower precision that it returns become float32: the loss is computed outside of its forward().
    """
    if session_of("torch.prepare_model") in _ACCELERATED:
        model.forward = _Autocast(model.forward, get_device().type)
    return model


def _lacks_bfloat16(device: torch.device) -> bool:
    """Return whether it could only emulate bfloat16, which is slow."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


class _Autocast:
    """A model's ``forward`` in mixed precision, set as an attribute of that one model."""

    def __init__(self, forward: Callable[..., Any], device_type: str) -> None:
        self._forward = forward
        self._device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, dtype=torch.bfloat16):
            output = self._forward(*args, **kwargs)
        return map_leaves(output, _widened)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the model's own ``forward``: the loading program may lack distrain, and wants no autocast."""
        return itemgetter(0), ((self._forward,),)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Autocast:
        return _Autocast(deepcopy(self._forward, memo), self._device_type)


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bfloat16 else leaf
