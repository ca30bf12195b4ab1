"""The state of a model and its optimizer in a checkpoint, whose tensors are copied only once. Runs in: worker."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from distrain.api.current import session_of
from distrain.errors import CheckpointError
from distrain.storage.checkpoint import Checkpoint
from distrain.torch.checkpoint import is_sharded, unwrapped

_STATES, _WORLD_SIZE = "distrain.states", "distrain.world_size"


def snapshot(*objects: Any, per_rank: bool = False, **values: Any) -> Checkpoint:
    """Make a checkpoint of the state of these objects, for ``report()`` on every rank.

    objects: models, optimizers, schedulers, and whatever has ``state_dict()`` and ``load_state_dict()``.
    per_rank: keep the state of every rank, which may differ, as with FSDP; to be read by as many ranks. Otherwise the
        state of rank 0 is kept, as for a DistributedDataParallel model, and the other ranks hand in nothing.
    values: picklable values, which :func:`restore` returns.

    The tensors are copied when the checkpoint is reported: with ``CheckpointUploadMode.MEMORY`` directly into the
    memory of the host, and from a GPU while the next step runs.

    Raises ValueError for a sharded state without ``per_rank``, RuntimeError outside of a worker.

    ::

        distrain.report(
            {"loss": loss},
            checkpoint=snapshot(model, optimizer, step=step),
            checkpoint_upload_mode=distrain.CheckpointUploadMode.MEMORY,
        )
    """
    context = session_of("torch.snapshot").context
    states = [_plain(each).state_dict() for each in objects]
    if not per_rank and is_sharded(states):
        raise ValueError("snapshot(): each rank has a part of this state (FSDP); use per_rank=True")
    data = {_STATES: states, _WORLD_SIZE: context.world_size if per_rank else None, **values}
    is_kept = per_rank or context.world_rank == 0
    return Checkpoint.separated_from(data if is_kept else None, _name(context.world_rank if per_rank else 0))


def restore(checkpoint: Checkpoint, *objects: Any) -> dict[str, Any]:
    """Load a checkpoint of :func:`snapshot` into the same objects, in the same order, and return its ``values``.

    Tensors are loaded on the CPU; ``load_state_dict()`` moves them to where the objects have theirs.

    Raises CheckpointError if the checkpoint is no snapshot, or one of another number of ranks or objects.

    ::

        checkpoint = distrain.get_checkpoint()
        start = restore(checkpoint, model, optimizer)["step"] if checkpoint else 0
    """
    context = session_of("torch.restore").context
    data = checkpoint.read(_name(context.world_rank)) or checkpoint.read(_name(0))
    if data is None:
        raise CheckpointError(f"{checkpoint.path} was not made by distrain.torch.snapshot(); use as_directory()")
    states, world_size = data.pop(_STATES), data.pop(_WORLD_SIZE)
    if world_size not in (None, context.world_size):
        raise CheckpointError(
            f"{checkpoint.path} has the states of {world_size} ranks, and there are {context.world_size}; start as "
            "many workers, or save with torch.distributed.checkpoint, which reshards"
        )
    if len(states) != len(objects):
        raise CheckpointError(f"{checkpoint.path} has {len(states)} states; pass as many objects, not {len(objects)}")
    for leaf in tree_leaves(states):
        if hasattr(leaf, "device_mesh"):  # a DTensor, whose ``device`` is still that of its mesh
            leaf._local_tensor = leaf._local_tensor.to(leaf.device_mesh.device_type)
    for each, state in zip(objects, states, strict=True):
        _plain(each).load_state_dict(state)
    return dict(data)


def _plain(each: Any) -> Any:
    return unwrapped(each) if isinstance(each, nn.Module) else each


def _name(rank: int) -> str:
    return f"snapshot_{rank:05d}"
