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
    """Choose the precision in which models compute: mixed precision with ``amp=True``, else full precision.

    Call it once, before :func:`prepare_model`, :func:`prepare_optimizer` and :func:`backward`. Gradients are scaled
    until ``optimizer.step()``; clipping them in between needs a limit multiplied by the same scale.

    ::

        accelerate(amp=True)
        model = prepare_model(model)
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, labels in prepare_data_loader(loader):
            optimizer.zero_grad()
            backward(loss_function(model(inputs), labels))
            optimizer.step()

    Raises RuntimeError for a call that comes too late, a second call, and outside of a worker.
    """
    session = session_of("torch.accelerate")
    if session in _PRECISIONS:
        raise RuntimeError(
            "accelerate() comes too late: call it once, at the top of train_func, before prepare_model(), "
            "prepare_optimizer() and backward()"
        )
    _PRECISIONS[session] = _Precision(get_device() if amp else None)


def prepare_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer to use instead of ``optimizer``; make learning rate schedulers for it.

    With a scaled loss it skips steps whose gradients have overflowed. Otherwise it is ``optimizer`` itself. ::

        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)

    Raises TypeError for anything but a torch optimizer, RuntimeError outside of a worker.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"prepare_optimizer takes a torch optimizer, got {type(optimizer).__name__}")
    precision = _precision("prepare_optimizer")
    if precision.scaler is None or isinstance(optimizer, ScaledOptimizer):
        return optimizer
    return ScaledOptimizer(optimizer, precision.scaler)


def backward(loss: torch.Tensor) -> None:
    """Call ``loss.backward()``, with the loss scaled where float16 needs it. Raises RuntimeError outside of a worker.

    ::

        loss = loss_function(model(inputs), labels)
        backward(loss)
    """
    scaler = _precision("backward").scaler
    if scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        scaler.backward(loss)


def autocast_forward(model: nn.Module) -> nn.Module:
    """Make the model compute in mixed precision if :func:`accelerate` chose it. It can still be copied and pickled.

    Tensors of the lower precision that it returns become float32, as the loss is computed outside of its forward().
    """
    precision = _precision("prepare_model")
    if precision.device is not None:
        model.forward = _Autocast(model.forward, precision.device.type)
    return model


# -- the choice of a session -------------------------------------------------------------------------------------------


class _Precision:
    """The precision of one session.

    device: where models compute in mixed precision; None for full precision.
    scaler: scales the loss; None where it is not scaled.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.scaler = LossScaler(device.type) if device is not None and device.type == "cuda" else None


_PRECISIONS: WeakKeyDictionary[Session, _Precision] = WeakKeyDictionary()


def _precision(caller: str) -> _Precision:
    """Return the precision of this session. If none was chosen before, it is full precision from now on."""
    return _PRECISIONS.setdefault(session_of(f"torch.{caller}"), _Precision(None))


# -- the model ---------------------------------------------------------------------------------------------------------


class _Autocast:
    """A model's ``forward`` in mixed precision, set as an attribute of that one model."""

    def __init__(self, forward: Callable[..., Any], device_type: str) -> None:
        self._forward = forward
        self._device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(self._device_type)
        with torch.autocast(self._device_type, dtype=dtype):
            output = self._forward(*args, **kwargs)
        return map_leaves(output, lambda leaf: _widened(leaf, dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the model's own ``forward``: the loading program may lack distrain, and wants no autocast."""
        return itemgetter(0), ((self._forward,),)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Autocast:
        from copy import deepcopy

        return _Autocast(deepcopy(self._forward, memo), self._device_type)


def _widened(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype is dtype else leaf


# -- the optimizer -----------------------------------------------------------------------------------------------------


class LossScaler:
    """A GradScaler for any number of optimizers.

    The scale changes when the next loss arrives, not after a step, so all optimizers of one loss see the same scale.
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
                "accelerate(amp=True) call backward(loss) instead of loss.backward()"
            )
        self._stepped.add(id(optimizer))
        return self._scaler.step(optimizer, *args, **kwargs)


class ScaledOptimizer(Optimizer):
    """An optimizer whose gradients are scaled. Everything but ``step()`` is the wrapped optimizer's."""

    def __init__(self, optimizer: Optimizer, scaler: LossScaler) -> None:
        # Optimizer.__init__ is not called: it would make groups and state of its own.
        self._optimizer = optimizer
        self._scaler = scaler

    def __getattr__(self, name: str) -> Any:
        if name in ("_optimizer", "_scaler"):  # copy and pickle ask an object that has no attributes yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the wrapped optimizer: a scaler belongs to its process."""
        return itemgetter(0), ((self._optimizer,),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"

    def step(self, *args: Any, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Call the wrapped optimizer's step, unless a gradient is infinite or NaN.

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
