"""Automatic mixed precision, as three calls: accelerate(), prepare_optimizer(), backward(). Runs in: worker.

On a GPU the model computes in float16 and the loss is scaled, so that small gradients do not vanish; on the CPU it
computes in bfloat16, whose range needs no scaling. Without ``accelerate(amp=True)`` the other two change nothing.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from distrain.torch.device import get_device
from distrain.torch.nested import map_leaves
from distrain.worker.session import Session, session_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["accelerate", "autocast_forward", "backward", "prepare_optimizer"]


def accelerate(amp: bool = False) -> None:
    """Choose, for what is prepared from now on, whether models compute in mixed precision.

    Call it once, before :func:`prepare_model`, :func:`prepare_optimizer` and :func:`backward`. Gradients are scaled
    until ``optimizer.step()``; clipping them in between needs a limit multiplied by the same scale.

    Raises RuntimeError if it comes too late, a second time, or outside of a worker.
    """
    session = session_of("torch.accelerate")
    if session in _PRECISIONS:
        raise RuntimeError(
            "accelerate() comes too late: call it once, at the top of train_func, before prepare_model(), "
            "prepare_optimizer() and backward()"
        )
    _PRECISIONS[session] = _Precision(get_device() if amp else None)


def prepare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer to use in the place of ``optimizer``: with a scaled loss, one that skips steps whose gradients have
    overflowed; otherwise ``optimizer`` itself. Make learning rate schedulers for the one returned.

    Raises TypeError for anything but a torch optimizer, RuntimeError outside of a worker.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"prepare_optimizer takes a torch optimizer, got {type(optimizer).__name__}")
    precision = _precision("prepare_optimizer")
    if precision.scaler is None or isinstance(optimizer, ScaledOptimizer):
        return optimizer
    return ScaledOptimizer(optimizer, precision.scaler)


def backward(loss: torch.Tensor) -> None:
    """``loss.backward()``, with the loss scaled where that is needed. Raises RuntimeError outside of a worker."""
    scaler = _precision("backward").scaler
    if scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        scaler.backward(loss)


def autocast_forward(model: nn.Module) -> nn.Module:
    """Make the model compute in mixed precision, if that was asked for. It can still be copied and pickled.

    Tensors of the lower precision that it returns become float32, as the loss is computed outside of its forward().
    """
    precision = _precision("prepare_model")
    if precision.device is not None:
        model.forward = _Autocast(model.forward, precision.device.type)
    return model


# -- what was chosen ---------------------------------------------------------------------------------------------------


class _Precision:
    """Of one session. ``device`` is None for full precision, ``scaler`` where nothing is scaled."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.scaler = LossScaler(device.type) if device is not None and device.type == "cuda" else None


_PRECISIONS: WeakKeyDictionary[Session, _Precision] = WeakKeyDictionary()


def _precision(caller: str) -> _Precision:
    """What was chosen, which is full precision for good if nothing was."""
    return _PRECISIONS.setdefault(session_of(f"torch.{caller}"), _Precision(None))


# -- the model's side --------------------------------------------------------------------------------------------------


class _Autocast:
    """A model's ``forward``, in mixed precision; an attribute of that one model."""

    def __init__(self, forward: Callable[..., Any], device_type: str) -> None:
        self._forward = forward
        self._device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(self._device_type)
        with torch.autocast(self._device_type, dtype=dtype):
            output = self._forward(*args, **kwargs)
        return map_leaves(output, lambda leaf: _widened(leaf, dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the model's own ``forward``: who loads it may have no distrain, and wants no autocast."""
        return itemgetter(0), ((self._forward,),)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Autocast:
        from copy import deepcopy

        return _Autocast(deepcopy(self._forward, memo), self._device_type)


def _widened(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype is dtype else leaf


# -- the optimizer's side ----------------------------------------------------------------------------------------------


class LossScaler:
    """A GradScaler for any number of optimizers. It is brought up to date when the next loss arrives, and not after a
    step, so that all optimizers of one loss see the scale that it had.
    """

    def __init__(self, device_type: str) -> None:
        self._scaler = torch.amp.GradScaler(device_type)
        self._stepped: set[int] = set()
        self._scaled = False

    def backward(self, loss: torch.Tensor) -> None:
        if self._stepped:
            self._scaler.update()
            self._stepped.clear()
        self._scaled = True
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not self._scaled or id(optimizer) in self._stepped:
            raise RuntimeError(
                "optimizer.step() without a distrain.torch.backward(loss) since the last one: under "
                "accelerate(amp=True) call backward(loss) in the place of loss.backward()"
            )
        self._stepped.add(id(optimizer))
        return self._scaler.step(optimizer, *args, **kwargs)


class ScaledOptimizer(Optimizer):
    """An optimizer whose gradients are scaled. Everything but ``step()`` is the wrapped optimizer's."""

    def __init__(self, optimizer: Optimizer, scaler: LossScaler) -> None:
        # Not Optimizer.__init__: it would make groups and state of its own.
        self._optimizer = optimizer
        self._scaler = scaler

    def __getattr__(self, name: str) -> Any:
        if name in ("_optimizer", "_scaler"):  # not there yet: copy and pickle ask for attributes of an empty object
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the wrapped one: a scaler belongs to its process."""
        return itemgetter(0), ((self._optimizer,),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"

    def step(self, *args: Any, **kwargs: Any) -> float | None:  # type: ignore[override]
        """The wrapped optimizer's step, unless a gradient is infinite or NaN.

        Raises RuntimeError without a :func:`backward` since its last step, and for a closure.
        """
        return self._scaler.step(self._optimizer, *args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)
