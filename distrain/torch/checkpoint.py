"""PyTorch models and optimizers in checkpoints, without DistributedDataParallel. Runs in: anywhere with torch.

A :class:`TorchCheckpoint` has a model. A checkpoint of :func:`snapshot`, for which a worker calls ``report()``, has the
state of several objects, whose tensors are copied only once.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Collection, Mapping, MutableMapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from distrain.api.current import session_of
from distrain.errors import CheckpointError
from distrain.storage.checkpoint import Checkpoint
from distrain.storage.names import DICT_FILE
from distrain.system import pickling
from distrain.system.scratch import directory_of

if TYPE_CHECKING:
    from typing_extensions import Self

_PREFIXES = ("_orig_mod.", "module.", "_orig_mod.")
"""Prefixes of a state_dict's keys: torch.compile, DistributedDataParallel, and a compiled model inside that."""
_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Those that were found so far."""
_STATES, _WORLD_SIZE = "distrain.states", "distrain.world_size"


class TorchCheckpoint(Checkpoint):
    """A checkpoint that holds one model: its ``state_dict()``, or the whole model, pickled.

    To read one that was reported: ``TorchCheckpoint(result.checkpoint.path).get_model(model)``.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> checkpoint = TorchCheckpoint.from_state_dict(model.state_dict())
    >>> checkpoint.get_model(torch.nn.Linear(2, 1))
    Linear(in_features=2, out_features=1, bias=True)
    """

    MODEL_FILENAME = "model.pt"

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], *, preprocessor: None = None) -> Self:
        """Make a checkpoint of a ``state_dict()``, without the ``module.`` prefix of a DistributedDataParallel.

        The file is in a temporary directory that is deleted with this object: report it, or copy it with
        ``to_directory``. ``preprocessor`` is a parameter of Ray AIR.

        Raises TypeError for anything but a dict, ValueError for a sharded one.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"TorchCheckpoint.from_state_dict takes a dict, got {type(state_dict).__name__}")
        return cls._saved(_without_prefix(state_dict))

    @classmethod
    def from_model(cls, model: nn.Module, *, preprocessor: None = None) -> Self:
        """Make a checkpoint of the whole model, pickled, without a DistributedDataParallel around it.

        Loading it needs the model's class, unless that was defined in the script itself. Prefer
        :meth:`from_state_dict`.

        Raises TypeError for anything but a module, ValueError for a sharded one (FSDP).
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"TorchCheckpoint.from_model takes a torch.nn.Module, got {type(model).__name__}")
        return cls._saved(unwrapped(model))

    def get_model(self, model: nn.Module | None = None) -> nn.Module:
        """Return the model, on the CPU: ``model`` with the weights of the checkpoint, or the one that was pickled.

        Everything but a ``state_dict`` is unpickled: read only checkpoints that you trust. A checkpoint made by
        :meth:`from_dict` has its model under the key ``"model"``.

        Raises CheckpointError if there is no model in the checkpoint, ValueError if it has a ``state_dict`` only and no
        ``model`` is given, RuntimeError from torch if the weights do not fit.
        """
        with self.as_directory() as folder:
            file = Path(folder) / self.MODEL_FILENAME
            if file.is_file():
                saved = _load(file)
            elif (Path(folder) / DICT_FILE).is_file() and "model" in (data := self.to_dict()):
                saved = data["model"]  # as in Ray AIR
            else:
                raise CheckpointError(
                    f"{self.path or self} has no {self.MODEL_FILENAME}, and no dict with a "
                    '"model": it was not made by TorchCheckpoint; use as_directory()'
                )
        if isinstance(saved, nn.Module):
            if model is None:
                return saved
            saved = saved.state_dict()
        if model is None:
            raise ValueError(
                f"{self.path} has the weights of a model, and not the model itself: call get_model(MyModel()), which "
                "loads the weights into your model"
            )
        inner = unwrapped(model)
        inner.load_state_dict(_without_prefix(saved, inner.state_dict().keys()))
        return model

    @classmethod
    def _saved(cls, content: Any) -> Self:
        _check_whole(content)
        checkpoint = directory_of(cls, "distrain-checkpoint-")
        torch.save(content, Path(checkpoint.path) / cls.MODEL_FILENAME, pickle_module=pickling)
        return checkpoint


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # a whole model
        return torch.load(file, map_location="cpu", weights_only=False)


def portable(data: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a dict checkpoint that a single process can load.

    The copy has models without DistributedDataParallel and ``torch.compile``, and ``state_dict``s without their
    prefixes. ``data`` stays as it is. Raises ValueError for sharded models.
    """
    return {key: _portable_value(value) for key, value in data.items()}


def _portable_value(value: Any) -> Any:
    _check_whole(value)
    if isinstance(value, nn.Module):
        return unwrapped(value)
    if isinstance(value, Mapping):
        return _without_prefix(value)
    return value


def _check_whole(value: Any) -> None:
    if is_sharded(value):
        raise ValueError(
            "the model is sharded (FSDP), and this rank has only its part of it. On every rank call "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True, cpu_offload=True)), or get_state_dict() with the optimizer, and save the result of "
            "rank 0"
        )


def is_sharded(value: Any) -> bool:
    """Return whether there are DTensors in models, dicts and lists."""
    leaves = chain.from_iterable(x.parameters() if isinstance(x, nn.Module) else [x] for x in tree_leaves(value))
    return any(isinstance(leaf, torch.Tensor) and hasattr(leaf, "device_mesh") for leaf in leaves)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile."""
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return model if inner is None else unwrapped(inner)


def _without_prefix(state_dict: Mapping[str, Any], names: Collection[str] = ()) -> Mapping[str, Any]:
    """Return a copy without the prefixes that wrappers give to all keys, if every value is a tensor.

    Other dicts are returned as they are. ``module.`` may also be the name of a submodule, so it is removed only if a
    wrapped model of this process has these keys, or if that gives the keys in ``names``: those of the model to load.
    """
    if not state_dict or not all(isinstance(value, torch.Tensor) for value in state_dict.values()):
        return state_dict
    for prefix in _PREFIXES:
        if not all(isinstance(key, str) and key.startswith(prefix) for key in state_dict):
            continue
        if names and not state_dict.keys().isdisjoint(names):
            break
        if names or prefix != "module." or _is_wrapped(state_dict):
            clone: Any = copy.copy(state_dict) if isinstance(state_dict, MutableMapping) else dict(state_dict)
            if hasattr(state_dict, "_metadata"):
                clone._metadata = copy.copy(state_dict._metadata)
            consume_prefix_in_state_dict_if_present(clone, prefix)
            state_dict = clone
    return state_dict


def _is_wrapped(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a DistributedDataParallel of this process has these keys. Searches for such models once."""
    if not any(state_dict.keys() <= wrapper.state_dict().keys() for wrapper in _wrappers):
        _wrappers.update(each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    return any(state_dict.keys() <= wrapper.state_dict().keys() for wrapper in _wrappers)


# -- the state of several objects ------------------------------------------------------------------------------------


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
