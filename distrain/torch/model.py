"""prepare_model: move a model to its device, and train it on all workers together. Runs in: worker."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from distrain.torch.amp import autocast_forward
from distrain.torch.device import get_device
from distrain.worker.session import session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def prepare_model(
    model: nn.Module,
    move_to_device: bool | str | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Move the model to this worker's device and, with more than one worker, train it together with the others.

    move_to_device: False leaves the model where it is; a device (or its name) moves it there.
    parallel_strategy: ``"ddp"`` wraps the model in DistributedDataParallel, unless it has nothing to train. ``"fsdp"``
        shards its parameters in place by FSDP2's ``fully_shard``, on GPUs and (with torch later than 2.6) on the CPU.
        None leaves each rank a model of its own.
    parallel_strategy_kwargs: further arguments of DistributedDataParallel or of ``fully_shard`` (``mesh``,
        ``reshard_after_forward``, ``mp_policy``, ``offload_policy``, ...).

    ::

        model = prepare_model(torch.nn.Linear(8, 2))

    Under ``"fsdp"`` each child of the outermost ``ModuleList``, ``Sequential`` and ``ModuleDict`` of the model (usually
    its blocks) is gathered for its own computation only; the rest of the model is gathered as a whole. For other
    groups, call ``fully_shard`` first: modules that are sharded already stay as they are. All ranks start from the
    weights of rank 0, as under DDP. The model is moved and sharded block by block, also with ``move_to_device=False``,
    so it need not fit on one GPU. Make the optimizer afterwards. ``state_dict()`` then holds DTensors; to save a whole
    one, call on *every* rank ::

        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state_dict = get_model_state_dict(model, options=options)  # empty on all ranks but 0

    Raises ValueError for an unknown strategy, TypeError for anything but a module and for unknown options, RuntimeError
    outside of a worker, and for ``"fsdp"`` on the CPU with an older torch.
    """
    session = session_of("torch.prepare_model")
    session.has_prepared_model = True
    context = session.context
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare_model takes a torch.nn.Module, got {type(model).__name__}")
    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ValueError(f'prepare_model: parallel_strategy must be "ddp", "fsdp" or None, got {parallel_strategy!r}')
    kwargs = dict(parallel_strategy_kwargs or {})
    device = get_device() if isinstance(move_to_device, bool) else torch.device(move_to_device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    model = autocast_forward(model)
    alone = context.world_size == 1
    if parallel_strategy == "fsdp" and not alone:
        return _fully_sharded(model, device, kwargs)
    if move_to_device is not False:
        model = model.to(device)
    if parallel_strategy is None or alone:
        return model
    return _data_parallel(model, kwargs)


# -- DDP ---------------------------------------------------------------------------------------------------------------


def _data_parallel(model: nn.Module, kwargs: dict[str, Any]) -> nn.Module:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model  # DDP refuses a model without trained parameters
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and (device := devices.pop()).type == "cuda":
        kwargs = {"device_ids": [device], "output_device": device, **kwargs}
    return DistributedDataParallel(model, **kwargs)


# -- FSDP2 -------------------------------------------------------------------------------------------------------------

_BROADCAST_BYTES = 250 * 2**20
"""Most bytes to broadcast at a time, as in DDP."""


def _fully_sharded(model: nn.Module, device: torch.device, kwargs: dict[str, Any]) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):  # fully_shard calls it
        raise RuntimeError(
            f'parallel_strategy="fsdp": torch {torch.__version__} shards on GPUs only; later versions also on the CPU'
        )
    fully_shard, sharded = _fsdp2()
    if isinstance(model, sharded):
        return model
    mesh = kwargs.pop("mesh", None)
    if mesh is None:
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for module in [*_blocks(model, sharded), model]:
        _copy_from_rank_zero(module, device)
        fully_shard(module, mesh=mesh, **kwargs)
    return model


def _fsdp2() -> tuple[Callable[..., Any], type]:
    """Return ``fully_shard``, and the class that it gives to every module."""
    try:
        from torch.distributed.fsdp import FSDPModule, fully_shard
    except ImportError:  # torch 2.4 and 2.5
        from torch.distributed._composable.fsdp import FSDPModule, fully_shard  # type: ignore[attr-defined]
    return fully_shard, FSDPModule


def _blocks(model: nn.Module, sharded: type) -> Iterator[nn.Module]:
    """Yield the modules that are gathered separately.

    A block that shares a parameter with the rest of the model is left out, because both would have to change it.
    """
    uses = _uses(model)
    for block in _children_of_containers(model):
        within = _uses(block)
        if within and not isinstance(block, sharded) and all(uses[key] == times for key, times in within.items()):
            yield block


def _children_of_containers(module: nn.Module) -> Iterator[nn.Module]:
    holds_blocks = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    for child in module.children():
        if holds_blocks and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # those have no forward()
            yield child
        else:
            yield from _children_of_containers(child)


def _uses(module: nn.Module) -> Counter[int]:
    """Count how often each parameter occurs in the module."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _copy_from_rank_zero(module: nn.Module, device: torch.device) -> None:
    """Move tensors that are not sharded yet to the device, and give them the values of rank 0.

    FSDP2 does not: each rank would keep its part of its own random weights.
    """
    tensors: list[torch.Tensor] = [
        tensor
        for tensor in chain(module.parameters(), module.buffers())
        if not tensor.is_meta and not hasattr(tensor, "device_mesh")  # DTensors are sharded already
    ]
    for tensor in tensors:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
    if tensors:
        group = distributed.distributed_c10d._get_default_group()
        values = [tensor.detach() for tensor in tensors]
        distributed._broadcast_coalesced(group, values, _BROADCAST_BYTES, 0)  # type: ignore[attr-defined]
