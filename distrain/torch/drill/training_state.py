"""The state of a training with torch at the beginning of each step, as a few numbers for each part. Runs in: worker.

A step begins with the first call of a module in training mode after an optimizer's step. The parts are found without
help of the script: optimizers, schedulers and scalers when they are made, everything else in the variables of the
functions that are being called.
"""

from __future__ import annotations

import os
import random
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import dataloader

from distrain.system.imports import when_imported
from distrain.system.text import is_users_file
from distrain.torch.drill.digests import after, digest, digests, keywords_of, parameters_of, sampler_of
from distrain.torch.drill.rank_watch import RankWatch
from distrain.torch.reproducibility import seed_random_numbers
from distrain.worker.places import outwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    Part = dict[str, Any]
    """A part of the state: numbers, or digests, by name."""

_USERS_MODULES = ("__main__", "__mp_main__")
_DEEPEST = 2
"""The most attributes between a variable and a part."""


class TrainingWatch:
    """Notes the state at the beginning of each step, what is saved, and what does not fit when it is loaded.

    probe: hears it, a :class:`distrain.drilling.probe.Probe`. seed: of the random numbers.
    """

    def __init__(self, probe: Any, seed: int) -> None:
        seed_random_numbers(seed)
        self._probe = probe
        self._pid = os.getpid()
        self._is_new_step = True
        self._made: dict[str, list[ref[Any]]] = {"optimizer": [], "scheduler": [], "scaler": []}
        self._loader: Part = {}
        """Of the loader that was read last: the epoch of its sampler, and the batches read."""
        kinds = (("optimizer", Optimizer), ("scheduler", LRScheduler), ("scaler", torch.amp.GradScaler))
        for name, kind in kinds:
            after(kind, "__init__", lambda made, *_, name=name: self._made[name].append(ref(made)))
        nn.modules.module.register_module_forward_pre_hook(self._at_call)
        register_optimizer_step_post_hook(self._at_step_end)
        after(torch.amp.GradScaler, "update", self._at_step_end)  # a scaler leaves out steps
        after(nn.Module, "load_state_dict", self._note_load)
        iterators: Any = dataloader._BaseDataLoaderIter
        after(iterators, "__init__", self._note_loop)
        after(iterators, "_reset", self._note_loop)  # of persistent workers
        after(iterators, "__next__", self._note_batch)
        torch.save = self._saving(torch.save)
        when_imported("safetensors.torch", self._watch_safetensors)
        when_imported("torch.distributed.checkpoint.filesystem", self._watch_dcp)
        if probe.order.act == "ranks":
            RankWatch(probe, lambda: self._living("optimizer"))

    # -- what happens ---------------------------------------------------------------------------------------------

    def _at_step_end(self, *_: Any) -> None:
        self._probe.steps_done += not self._is_new_step
        self._is_new_step = True

    def _note_load(self, module: nn.Module, keys: Any, *_: Any) -> None:
        if keys.missing_keys or keys.unexpected_keys:
            self._probe.note("misfit", missing=keys.missing_keys[:3], unexpected=keys.unexpected_keys[:3])

    def _note_loop(self, iterator: Any, _: Any, loader: Any, *__: Any) -> None:
        iterator.distrain_drill = {"epoch": getattr(sampler_of(loader), "epoch", None), "batch": 0}
        iterator.distrain_skipped = getattr(loader.batch_sampler, "skip_batches", 0)  # by accelerate

    def _note_batch(self, iterator: Any, *_: Any) -> None:
        self._loader = iterator.distrain_drill
        self._loader["batch"] = iterator.distrain_skipped + iterator._num_yielded  # which other libraries set

    def _saving(self, save: Callable[..., None]) -> Callable[..., None]:
        @wraps(save)
        def saving(data: Any, target: Any, *more: Any, **options: Any) -> None:
            save(data, target, *more, **options)
            self._probe.note("save", path=str(target))

        return saving

    def _watch_safetensors(self) -> None:
        module = sys.modules["safetensors.torch"]
        vars(module)["save_file"] = self._saving(module.save_file)

    def _watch_dcp(self) -> None:
        writer = sys.modules["torch.distributed.checkpoint.filesystem"].FileSystemWriter
        after(writer, "finish", lambda made, *_: self._probe.note("save", path=str(made.path)))

    def _at_call(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or not (self._is_new_step and module.training and torch.is_grad_enabled()):
            return
        if os.getpid() != self._pid or self._trained().isdisjoint(map(id, module.parameters())):
            return  # a worker of a loader, or a module of another kind, such as a transform
        self._is_new_step = False
        frame = sys._getframe(1)
        try:
            with torch.no_grad():
                state = self._state(module, inputs, frame)
        except Exception as error:  # of a kind of tensor or variable that nobody has thought of
            state = {"blind": f"{type(error).__name__}: {error}"}
        self._probe.count("step", **state)

    # -- the state ------------------------------------------------------------------------------------------------

    def _living(self, kind: str) -> list[Any]:
        return [one for made in self._made[kind] if (one := made()) is not None]

    def _trained(self) -> set[int]:
        """Return the ids of the parameters that optimizers have."""
        return {id(one) for each in self._living("optimizer") for one in parameters_of(each)}

    def _state(self, module: nn.Module, inputs: Any, frame: FrameType) -> Part:
        """Return all parts of the state, by what they are."""
        optimizers = self._living("optimizer")
        trained = [one for each in optimizers for one in parameters_of(each)]
        found = _Found(trained)
        found.add("", module, 0)
        for function in outwards(frame):
            found.look_into(function)
        names = {identity: name for name, identity in reversed(found.names)}
        of_models: dict[str, torch.Tensor] = {}
        for index, one in enumerate(trained):
            name = names.get(id(one), "parameter")
            of_models[f"{name} ({index})" if name in of_models else name] = one
        return {
            "model": digests(of_models),
            "optimizer": digests(_tensors_of(optimizers)),
            "lr": {name: [_as_floats(group["lr"]) for group in each.param_groups] for name, each in _named(optimizers)},
            "scheduler": _states(self._living("scheduler")),
            "scaler": _states(self._living("scaler")),
            "buffers": digests(found.buffers),
            "averages": digests(found.averages),
            "random": {**_random_states(), **found.generators},
            "counters": found.counters,
            "loader": dict(self._loader),
            "data": {"inputs": digest(tree_leaves((inputs, keywords_of(frame))))},
        }


class _Found:
    """The parts that are found in variables. ``trained``: the parameters that optimizers have."""

    def __init__(self, trained: Sequence[torch.Tensor]) -> None:
        self._trained = {*map(id, trained)}
        self._addresses = {*map(_address, trained)}
        self._seen: set[int] = set()
        self.names: list[tuple[str, int]] = []
        """Names of trained parameters, and their ids."""
        self.buffers: dict[str, torch.Tensor] = {}
        self.averages: dict[str, torch.Tensor] = {}
        """Tensors that belong to no trained model but have the names of its parameters."""
        self.generators: Part = {}
        self.counters: dict[str, int] = {}

    def look_into(self, function: FrameType) -> None:
        """Look at the variables of a function that is being called."""
        is_users = is_users_file(function.f_code.co_filename)
        for name, value in list(function.f_locals.items()):
            if is_users and type(value) is int and not name.startswith("_"):
                self.counters.setdefault(name, value)
            self.add(name, value, 0)

    def add(self, name: str, value: Any, depth: int) -> None:
        """Look at a value, and at what is in it."""
        if id(value) in self._seen or isinstance(value, (type, torch.Tensor)):
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._add_module(name, value)
        elif isinstance(value, dict):
            self._add_mapping(name, value)
        elif isinstance(value, torch.Generator):
            self.generators[name] = digest([value.get_state()])
        elif type(value).__name__ == "Generator" and type(value).__module__.startswith("numpy"):
            self.generators[name] = digest([repr(value.bit_generator.state)])
        elif depth < _DEEPEST and _is_users(value):
            for key, one in list(vars(value).items()):
                if type(one) is int and not key.startswith("_"):
                    self.counters.setdefault(f"{name}.{key}", one)
                self.add(f"{name}.{key}", one, depth + 1)

    def _add_module(self, name: str, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        replaced = {id(each) for one in module.modules() if _takes_buffers(one) for each in one.buffers()}
        buffers = {key: one for key, one in module.named_buffers() if id(one) not in replaced}
        self._seen |= {id(one) for one in module.modules()}
        if any(id(one) in self._trained for one in parameters.values()):
            self.names += [(key.removeprefix("module."), id(one)) for key, one in parameters.items()]
            for key, one in buffers.items():
                plain = key.removeprefix("module.")
                self.buffers[f"{name}.{plain}" if plain in self.buffers else plain] = one
        elif parameters and not isinstance(module, nn.modules.loss._Loss):
            self.averages |= {f"{name}.{key}": one for key, one in (parameters | buffers).items()}

    def _add_mapping(self, name: str, values: dict[Any, Any]) -> None:
        tensors = {
            f"{name}.{key}": one
            for key, one in values.items()
            if isinstance(one, torch.Tensor) and _address(one) not in self._addresses  # else the model's state_dict()
        }
        if {str(key).removeprefix("module.") for key in values} & {key for key, _ in self.names}:
            self.averages |= tensors


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the numbers, or of this rank's part of them."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr()


def _takes_buffers(module: nn.Module) -> bool:
    """Return whether forward() of a module is about to copy the buffers of another rank to this one."""
    copies = isinstance(module, nn.parallel.DistributedDataParallel) and module.broadcast_buffers
    return copies and torch.distributed.get_rank(module.process_group) > 0  # type: ignore[arg-type]


def _is_users(value: object) -> bool:
    """Return whether an object is of a class that is in no library."""
    name = type(value).__module__
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    is_users = name in _USERS_MODULES or (path != "" and is_users_file(path))
    return is_users and hasattr(value, "__dict__")


def _named(made: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield objects with the names of their classes, numbered if there are several."""
    for index, one in enumerate(made):
        number = sum(type(other) is type(one) for other in made[:index]) + 1
        yield f"{type(one).__name__} {number}" if number > 1 else type(one).__name__, one


def _tensors_of(optimizers: list[Optimizer]) -> dict[str, torch.Tensor]:
    """Return the state of optimizers, such as ``AdamW.exp_avg.0`` of the first parameter."""
    found = {}
    for name, optimizer in _named(optimizers):
        for index, parameter in enumerate(parameters_of(optimizer)):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, (torch.Tensor, int, float)):
                    found[f"{name}.{key}.{index}"] = torch.as_tensor(value)
    return found


def _states(made: list[Any]) -> Part:
    """Return the plain values in the states of schedulers or scalers."""
    return {
        f"{name}.{key}": _as_floats(value)
        for name, one in _named(made)
        for key, value in one.state_dict().items()
        if isinstance(value, (int, float, list, tuple))
    }


def _as_floats(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_floats(one) for one in value]
    return float(value) if isinstance(value, (int, float, torch.Tensor)) else type(value).__name__


def _random_states() -> Part:
    found = {"Python": digest([repr(random.getstate())]), "torch": digest([torch.get_rng_state()])}
    if "numpy" in sys.modules:
        found["NumPy"] = digest([repr(sys.modules["numpy"].random.get_state(legacy=False))])
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["CUDA"] = digest([torch.cuda.get_rng_state()])
    return found
