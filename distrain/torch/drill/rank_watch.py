"""The rows, replicas and gradients of a rank that trains with torch, so that ranks can be compared. Runs in: worker.

Ranks are compared within a *place*: words that are equal where ranks must have the same numbers, as replicas do. A
shard has a place of its own. Ranks with the same *share* must train on different rows.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from contextlib import suppress
from functools import wraps
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, dataloader

from distrain.system.text import is_users_file
from distrain.torch.drill.digests import after, digest, digests, keywords_of, parameters_of, sampler_of
from distrain.torch.reproducibility import seed_random_numbers
from distrain.worker.places import outwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MOST_ROWS = 4096
_FORK = get_context("fork")
_READS_S = 30.0
"""The longest time to read two rows."""


class RankWatch:
    """Notes the rows of each batch, replicas at each step, and the first gradients, with the lines that made them.

    probe: hears it, a :class:`distrain.drilling.probe.Probe`. optimizers: returns the living ones.
    """

    def __init__(self, probe: Any, optimizers: Callable[[], list[Optimizer]]) -> None:
        self._probe, self._optimizers = probe, optimizers
        self._is_new_batch = self._is_new_step = True
        self._steps = 0
        self._names: dict[int, str] = {}
        """Of parameters of modules that were trained, by their ids."""
        self._sites: dict[int, str] = {}
        self._loaders: dict[int, str] = {}
        """The lines that made modules and, by the dataset, loaders. A library may make the loader anew."""
        self._made: dict[str, str] = {}
        """The line that made the model of a parameter."""
        self._places: dict[int, str] = {}
        self._model = ""
        self._norms: list[str] = []
        self._wrapped: list[DistributedDataParallel] = []
        self._synced: bool | None = None
        """False if DDP did not reduce gradients after its last forward()."""
        self._unsynced_at = self._reduced_at = ""
        self._unclipped: dict[str, Any] = {}
        self._reading: dict[str, Any] = {}
        after(nn.Module, "__init__", lambda made, *_: self._sites.update({id(made): _site(made)}))
        after(DistributedDataParallel, "__init__", self._note_wrapped)
        after(DistributedDataParallel, "forward", self._note_forward)
        after(DistributedDataParallel, "no_sync", lambda *_: setattr(self, "_unsynced_at", _site()))
        DataLoader.__init__ = self._making(DataLoader.__init__)  # type: ignore[method-assign]
        iterators: Any = dataloader._BaseDataLoaderIter
        after(iterators, "__init__", self._note_pass)
        after(iterators, "_reset", self._note_pass)
        after(iterators, "_next_index", lambda made, index, *_: made.distrain_rows.append(index))
        after(iterators, "__next__", self._note_batch)
        nn.modules.module.register_module_forward_pre_hook(self._at_call)
        register_optimizer_step_post_hook(self._at_step_end)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            clip = self._clipping(getattr(nn.utils, name))
            setattr(nn.utils, name, clip)
            setattr(nn.utils.clip_grad, name, clip)
        reduce = distributed.all_reduce

        @wraps(reduce)
        def all_reduce(*arguments: Any, **options: Any) -> Any:
            self._reduced_at = _site() or self._reduced_at
            return reduce(*arguments, **options)

        distributed.all_reduce = all_reduce
        functional: Any = nn.functional
        attention = functional.scaled_dot_product_attention
        functional.dropout = lambda data, *_, **__: data
        functional.scaled_dot_product_attention = (
            lambda query, key, value, attn_mask=None, dropout_p=0.0, *more, **options: attention(
                query, key, value, attn_mask, 0.0, *more, **options
            )
        )

    # -- loaders --------------------------------------------------------------------------------------------------

    def _making(self, make: Callable[..., None]) -> Callable[..., None]:
        @wraps(make)
        def making(loader: Any, dataset: Any, batch_size: Any = 1, *more: Any, **options: Any) -> None:
            rows = self._probe.order.rows
            if rows and options.get("batch_sampler") is None and isinstance(batch_size, int) and rows % batch_size == 0:
                batch_size = rows  # of this rank, as that of several ranks together
            make(loader, dataset, batch_size, *more, **options)
            self._loaders.setdefault(id(dataset), _site())

        return making

    def _note_pass(self, iterator: Any, _: Any, loader: Any, *__: Any) -> None:
        data, sampler = loader.dataset, sampler_of(loader)
        number = vars(loader).get("distrain_passes", 0)
        vars(loader)["distrain_passes"] = number + 1
        names = ("epoch", "seed", "initial_seed", "shuffle", "num_replicas", "num_repeats")
        values = {name: value for name in names if isinstance(value := getattr(sampler, name, None), int)}
        iterator.distrain_rows = deque(maxlen=2 + 2 * loader.num_workers * (loader.prefetch_factor or 0))
        iterator.distrain_pass = {"pass": number, "sampler": values, "site": self._loaders.get(id(data), "")}
        if "distrain_data" not in vars(loader):
            vars(loader)["distrain_data"] = _fingerprint(data)
        iterator.distrain_data = vars(loader)["distrain_data"]

    def _note_batch(self, iterator: Any, *_: Any) -> None:
        data, rows = iterator.distrain_data, iterator.distrain_rows
        self._is_new_batch = True
        index = rows.popleft() if data and rows else None
        named = [f"{data}:{one}" for one in index] if isinstance(index, list) else None
        self._reading = iterator.distrain_pass | {"index": named}

    # -- steps ----------------------------------------------------------------------------------------------------

    def _at_call(self, module: nn.Module, inputs: Any) -> None:
        if not (self._is_new_batch and module.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        trained = {id(one) for each in self._optimizers() for one in parameters_of(each)}
        named = {_plain(name): one for name, one in module.named_parameters()}
        if trained.isdisjoint(map(id, named.values())):
            return
        self._is_new_batch = False
        self._name(module, next((site for one in module.modules() if (site := self._sites.get(id(one)))), ""))
        keywords = keywords_of(sys._getframe(1))
        try:
            with torch.no_grad():
                self._note_call(module, named, tree_leaves((inputs, keywords)))
        except Exception as error:  # of a kind of tensor or wrapper that nobody has thought of
            self._probe.note("blind", why=f"{type(error).__name__}: {error}")

    def _note_call(self, module: nn.Module, named: dict[str, nn.Parameter], inputs: list[Any]) -> None:
        self._model = digest([(name, tuple(one.shape)) for name, one in sorted(named.items())])
        self._norms = [name for name, one in module.named_modules() if _is_unsynced(one)]
        share = self._share(module, named)
        joined = any(one._join_config.enable for one in self._wrapped)
        self._probe.note("rows", step=self._steps, rows=_rows(inputs), share=share, joined=joined, **self._reading)
        if self._is_new_step:
            self._is_new_step = False
            self._note_replicas(module)

    def _note_replicas(self, module: nn.Module) -> None:
        tensors: dict[str, torch.Tensor] = {}
        optimizers: dict[str, torch.Tensor] = {}
        rates: dict[str, float] = {}
        for each in self._optimizers():
            kind = type(each).__name__
            rates |= {f"{kind}.{index}|": float(group["lr"]) for index, group in enumerate(each.param_groups)}
            for one in parameters_of(each):
                if name := self._names.get(id(one)):
                    place = self._place(one)
                    tensors[f"{name}|{place}"] = one
                    found = [(key, value) for key, value in each.state.get(one, {}).items() if torch.is_tensor(value)]
                    optimizers |= {f"{kind}.{key} of {name}|{place}": value for key, value in found}
        left_out = {
            id(value)
            for one in (*module.modules(), *self._wrapped)
            if isinstance(one, nn.modules.batchnorm._NormBase)
            or (isinstance(one, DistributedDataParallel) and one.broadcast_buffers)  # in forward()
            for value in one.buffers()
        }
        buffers = {
            f"{_plain(name)}|{self._place(one)}": one for name, one in module.named_buffers() if id(one) not in left_out
        }
        values = {"parameters": digests(tensors), "optimizer": digests(optimizers), "buffers": digests(buffers)}
        made = {} if self._steps else self._made
        self._probe.note("replicas", step=self._steps, values=values | {"learning rate": rates}, made=made)

    def _at_step_end(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_new_step:  # by another optimizer, such as that inside of ZeroRedundancyOptimizer
            return
        self._is_new_step = self._is_new_batch = True
        gradients = self._gradients(parameters_of(optimizer))
        self._probe.note(
            "gradients",
            step=self._steps,
            values=gradients,
            whole=self._unclipped or gradients,
            rates=[float(group["lr"]) for group in optimizer.param_groups],
            unsynced_at=self._unsynced_at if self._synced is False else "",
            reduced_at="" if self._wrapped else self._reduced_at,
            norms=self._norms,
        )
        self._unclipped = {}
        self._steps += 1

    def _gradients(self, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
        with torch.no_grad():
            named = {f"{name}|{self._place(one)}": one.grad for one in parameters if (name := self._names.get(id(one)))}
            return digests({name: value for name, value in named.items() if value is not None and not value.is_sparse})

    def _clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(clip)
        def clipping(parameters: Any, *arguments: Any, **options: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if not self._unclipped:
                self._unclipped = self._gradients(parameters)
                self._probe.note("clip", step=self._steps, values=self._unclipped, site=_site())
            return clip(parameters, *arguments, **options)

        return clipping

    # -- replicas -------------------------------------------------------------------------------------------------

    def _note_wrapped(self, made: DistributedDataParallel, *_: Any) -> None:
        self._wrapped.append(made)
        for name, one in made.module.named_parameters():
            ranks = self._own if name in made.parameters_to_ignore else _ranks_of(made.process_group)
            self._places[id(one)] = str(ranks)
        self._name(made.module, _site())

    def _name(self, module: nn.Module, site: str) -> None:
        used = {*self._names.values()}
        for name, one in module.named_parameters():
            if id(one) not in self._names:
                plain = _plain(name)
                self._names[id(one)] = known = f"{plain} ({len(used)})" if plain in used else plain
                self._made[known] = site

    def _note_forward(self, made: DistributedDataParallel, *_: Any) -> None:
        self._synced = bool(made.require_backward_grad_sync)

    @property
    def _own(self) -> list[int]:
        return [self._probe.rank]

    def _place(self, tensor: torch.Tensor) -> str:
        """Return the words that a parameter or buffer shares with those that must be equal on other ranks."""
        if (mesh := getattr(tensor, "device_mesh", None)) is not None:
            at = zip(tensor.placements, mesh.get_coordinate() or (), strict=False)  # type: ignore[attr-defined]
            return str([None if placement.is_replicate() else here for placement, here in at])
        if _is_divided(tensor) or (id(tensor) not in self._places and _has_stages()):
            return str(self._own)
        return self._places.get(id(tensor), self._model)

    def _share(self, module: nn.Module, named: dict[str, nn.Parameter]) -> str:
        """Return the words that this rank shares with those that must read other rows."""
        ranks = set()
        each: Any
        for each in (*self._wrapped, *module.modules()):
            if is_fsdp := type(each).__name__ == "FullyShardedDataParallel":
                self._places |= {id(one): str(self._own) for one in each.parameters()}
            if is_fsdp or isinstance(each, DistributedDataParallel):
                ranks |= set(_ranks_of(each.process_group))
            elif hasattr(each, "_get_fsdp_state") and (group := each._get_fsdp_state()._fsdp_param_group):
                ranks |= set(group.mesh_info.mesh.mesh.flatten().tolist())
        if not ranks and (any(map(_is_divided, named.values())) or _has_stages()):
            ranks = {self._probe.rank}
        return str(sorted(ranks)) if ranks else self._model


def _ranks_of(group: Any) -> list[int]:
    return list(distributed.get_process_group_ranks(group))


def _is_divided(tensor: torch.Tensor) -> bool:
    """Return whether a parameter has another part on each rank, as a DTensor or one of Megatron's has."""
    return hasattr(tensor, "device_mesh") or bool(getattr(tensor, "tensor_model_parallel", False))


def _has_stages() -> bool:
    """Return whether there are stages of torch's pipeline parallelism."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    return module is not None and any(issubclass(type(one), module._PipelineStageBase) for one in gc.get_objects())


def _is_unsynced(module: nn.Module) -> bool:
    is_batchnorm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_batchnorm and module.training and not isinstance(module, nn.SyncBatchNorm)


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _site(made: Any = None) -> str:
    """Return the innermost line of the user's that is being executed, outside of the ``__init__`` of what is made."""
    for function in outwards(sys._getframe(1)):
        path, is_init = function.f_code.co_filename, function.f_code.co_name == "__init__"
        if is_users_file(path) and not (is_init and function.f_locals.get("self") is made):
            relative = os.path.relpath(path)
            return f"{path if relative.startswith('..') else relative}:{function.f_lineno}"
    return ""


def _rows(leaves: list[Any]) -> list[str]:
    """Return a digest of each row of a batch, whose tensors have equally many."""
    tensors = [one.detach().cpu() for one in leaves if isinstance(one, torch.Tensor) and one.dim()]
    size = len(tensors[0]) if tensors else 0
    alike = [one for one in tensors if len(one) == size]
    return [digest([one[index] for one in alike]) for index in range(min(size, _MOST_ROWS))]


def _fingerprint(data: Any) -> str:
    """Return what a dataset has in common with an equal one on another rank; empty if it has no indices.

    A child reads the rows: a file that a dataset opens for its first row must not be open when a loader forks workers.
    """
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        return ""

    def read() -> None:
        found = ""
        with suppress(Exception):  # it may be anything
            torch.set_num_threads(1)  # a child has none of the others
            seed_random_numbers(0)  # of augmentations
            found = digest([len(data), *tree_leaves((data[0], data[len(data) - 1]))])
        theirs.send(found)

    ours, theirs = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=read)
    child.start()
    found: str = ours.recv() if ours.poll(_READS_S) else ""
    child.kill()
    child.join()
    return found
