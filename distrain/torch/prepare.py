"""What makes a single-process PyTorch script a distributed one. Runs in: worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from distrain.session import get_context

__all__ = ["get_device", "get_devices", "prepare_data_loader", "prepare_model"]


def get_devices() -> list[torch.device]:
    """The devices of this worker: its GPUs, or the CPU."""
    return [torch.device("cuda", index) for index in get_context().devices] or [torch.device("cpu")]


def get_device() -> torch.device:
    """The (first) device of this worker."""
    return get_devices()[0]


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Move the model to this worker's device and, with more than one worker, wrap it in DistributedDataParallel.

    move_to_device: False leaves it where it is, a device moves it there.
    parallel_strategy: ``"ddp"``, or None for no wrapping.
    parallel_strategy_kwargs: further arguments of DistributedDataParallel.
    """
    if parallel_strategy not in ("ddp", None):
        raise ValueError(f'prepare_model: parallel_strategy must be "ddp" or None, got {parallel_strategy!r}')
    device = move_to_device if isinstance(move_to_device, torch.device) else get_device()
    if move_to_device is not False:
        model = model.to(device)
    if parallel_strategy is None or get_context().get_world_size() == 1:
        return model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model  # nothing to synchronise, which DDP refuses
    kwargs: dict[str, Any] = {"device_ids": [device], "output_device": device} if device.type == "cuda" else {}
    return DistributedDataParallel(model, **{**kwargs, **(parallel_strategy_kwargs or {})})


def prepare_data_loader(
    data_loader: DataLoader[Any], add_dist_sampler: bool = True, move_to_device: bool = True
) -> DataLoader[Any]:
    """Give every worker its share of the data, and move batches to its device.

    With more than one worker the loader gets a DistributedSampler that shuffles if the loader did; call
    ``loader.sampler.set_epoch(epoch)`` before each epoch. A DistributedSampler of the user's is kept, an
    IterableDataset is left alone. All other options of the loader are kept.

    Raises ValueError for a loader with a custom sampler or batch_sampler: only its owner knows how to share it out;
    give it a DistributedSampler or pass ``add_dist_sampler=False``.
    """
    if not isinstance(data_loader, DataLoader):
        raise TypeError(f"prepare_data_loader takes a torch DataLoader, got {type(data_loader).__name__}")
    if add_dist_sampler and get_context().get_world_size() > 1 and _needs_sampler(data_loader):
        data_loader = _with_distributed_sampler(data_loader)
    device = get_device()
    if move_to_device and device.type != "cpu":
        return _DeviceLoader(data_loader, device)
    return data_loader


def _needs_sampler(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler):
        return False
    batch_sampler = getattr(loader.batch_sampler, "sampler", None)
    return not isinstance(batch_sampler, DistributedSampler)


def _with_distributed_sampler(loader: DataLoader[Any]) -> DataLoader[Any]:
    if not _is_plain(loader):
        raise ValueError(
            f"prepare_data_loader: the loader has a sampler of its own ({type(loader.sampler).__name__}, batch_sampler "
            f"{type(loader.batch_sampler).__name__}); use a DistributedSampler, or pass add_dist_sampler=False if it "
            "already gives each rank its share"
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=get_context().get_world_size(),
        rank=get_context().get_world_rank(),
        shuffle=isinstance(loader.sampler, RandomSampler),
    )
    options = {name: getattr(loader, name) for name in _KEPT_OPTIONS if hasattr(loader, name)}
    return DataLoader(loader.dataset, sampler=sampler, **options)


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether ``shuffle=`` is all that was said about the order."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        return False
    if type(loader.sampler) is RandomSampler:
        return not loader.sampler.replacement and len(loader.sampler) == len(loader.sampler.data_source)
    return type(loader.sampler) is SequentialSampler


# In the order of DataLoader's signature (torch 2.4 to 2.15), without those that a sampler replaces.
_KEPT_OPTIONS = (
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class _DeviceLoader(DataLoader[Any]):
    """A loader whose batches are on a device. Everything but the iteration is the wrapped loader's."""

    _loader: DataLoader[Any]
    _device: torch.device

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self.__dict__.update(loader.__dict__, _loader=loader, _device=device)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in self._loader:
            yield _moved(batch, self._device)

    def __len__(self) -> int:
        return len(self._loader)


def _moved(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device; dicts, lists, tuples and namedtuples are looked through."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: _moved(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
