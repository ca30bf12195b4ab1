"""The PyTorch backend: it sets up the process group and destroys it. Runs in: coordinator (without torch), worker.

The methods import torch when they run, in the worker. The coordinator only reads the settings.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from distrain.api import current
from distrain.api.backend import BackendConfig
from distrain.api.ray_names import checks_arguments
from distrain.system.arguments import check_fields, check_seconds, check_type
from distrain.system.imports import require
from distrain.worker import flight_recorder
from distrain.worker.places import may_contain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distrain.api.context import TrainContext

_group_numbers = itertools.count()
_DEBUGGING_TIMEOUT_S = 24 * 3600.0
_PROBE_INTERVAL_S = 0.002
_PROBE_TIMEOUT_S = 2.0
_TRAINED_ALONE = """\
ranks trained independently: no collective was ever called, so each has a model of its own. prepare_model() or \
DistributedDataParallel trains one model; with Lightning, Trainer(strategy=TrainDDPStrategy()). If this is what you \
want, call distrain.collective.barrier() once"""
_FIRST_STEPS = 20
"""Optimizer steps after which ranks that never communicated are told so."""
_MEETING = re.compile(
    r"\b((send|recv|broadcast|scatter|gather|reduce)\w*\(|isend|irecv|\w*barrier|all_?(reduce|gather|to_all)|reduce_scatter|"
    r"average_parameters|DistributedDataParallel|DDP|FSDP|FullyShardedDataParallel|fully_shard|distribute_\w+|prepare)"
)
"""The words in the user's code which show that ranks are meant to communicate."""
_CURES = {
    "initialize the default process group twice": "TorchTrainer has set up the process group before train_func: leave "
    "init_process_group() out. DataParallelTrainer sets up none, and `distrain run script.py` none for a script that "
    "does it itself",
    "find_unused_parameters=True": "with prepare_model: prepare_model(model, parallel_strategy_kwargs="
    '{"find_unused_parameters": True})',
    "Found no NVIDIA driver|No CUDA GPUs are available|not compiled with CUDA enabled": "move models and batches to "
    "distrain.torch.get_device(), the device of each rank, instead of .cuda(). Workers have GPUs only with "
    "ScalingConfig(use_gpu=True), or --use-gpu",
    "^AttributeError: 'DistributedDataParallel' object has no attribute": "prepare_model() has wrapped your model: it "
    "is model.module",
    "ProcessGroupNCCL is only supported with GPUs": "leave TorchConfig.backend out, which means gloo, or ask for GPUs "
    "with ScalingConfig(use_gpu=True)",
    "Unable to find address for: ": "this host lacks that network interface; correct GLOO_SOCKET_IFNAME, or unset it",
    "can only torch.load from a file": "get_checkpoint() returns None in a new run, else a Checkpoint, whose files are "
    "in a directory: `with checkpoint.as_directory() as folder: torch.load(f'{folder}/model.pt')`",
}
_MEETING_ELSEWHERE = {"horovod", "mpi4py"}
"""Packages with collectives of their own."""


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class TorchConfig(BackendConfig):
    """Settings of ``torch.distributed``'s process group.

    backend: process group backend. By default nccl for workers with a GPU each, else gloo, also where workers share a
        GPU, which NCCL refuses. Combined ones such as ``"cpu:gloo,cuda:nccl"`` work, too. A backend of another package
        must be registered with ``torch.distributed.Backend`` when train_func is imported.
    timeout_s: seconds after which a collective gives up.

    >>> TorchConfig(backend="gloo", timeout_s=600).backend
    'gloo'
    """

    framework: ClassVar[str] = "torch"
    preload: ClassVar[tuple[str, ...]] = ("torch", "torch.distributed", "distrain.torch.config", "encodings.idna")
    """Connecting to rank 0 needs the last one."""
    cures: ClassVar[Mapping[str, str]] = MappingProxyType(_CURES)

    backend: str | None = None
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        check_fields(self, check_type, "backend", kind=str, optional=True)
        check_fields(self, check_seconds, "timeout_s", above_zero=True)

    def for_debugging(self) -> TorchConfig:
        """Let collectives wait for a day."""
        return replace(self, timeout_s=max(self.timeout_s, _DEBUGGING_TIMEOUT_S))

    def setup(self, context: TrainContext) -> None:
        """Choose the device and join the process group, also for a single worker, so that scripts need no special case.

        Raises ValueError for nccl among workers that share a GPU, RuntimeError if there is a process group already.
        """
        torch = require("torch")
        from torch import distributed

        if distributed.is_initialized():
            raise RuntimeError(
                "this process has a process group already: destroy it before fit(), or call train_func itself"
            )
        for name, value in _accelerate_variables(context).items():
            os.environ.setdefault(name, value)
        if context.devices:
            torch.cuda.set_device(context.devices[0])
        backend = self._backend(context)
        if context.world_rank:
            _await_store(self.timeout_s)
        _join_group(backend, _nccl_device(context, backend), timedelta(seconds=self.timeout_s))

    def _backend(self, context: TrainContext) -> str:
        if not context.shares_gpu:
            return self.backend or ("nccl" if context.devices else "gloo")
        if self.backend is None:
            if context.world_rank == 0:
                print("distrain: workers share a GPU, which NCCL cannot do; using gloo", file=sys.stderr)
            return "gloo"
        if "nccl" in self.backend:
            raise ValueError(
                f"TorchConfig.backend={self.backend!r}: NCCL cannot be used by workers that share a GPU; leave it "
                'out, use "gloo", or give every worker its own GPU'
            )
        return self.backend

    def gather(self, value: Any) -> list[Any]:
        from torch import distributed

        values: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(values, value)
        return values

    def portable(self, data: dict[str, Any]) -> dict[str, Any]:
        from distrain.torch.checkpoint import portable

        plain: dict[str, Any] = portable(data)
        return plain

    def at_begin(self, context: TrainContext) -> None:
        """Count the first steps of optimizers, to see whether the ranks train together. Watch if they stay equal."""
        session = current.session
        if session is not None and session.divergence and context.world_size > 1:
            from distrain.torch.divergence import DivergenceCheck

            session.check_replicas = DivergenceCheck(session, *session.divergence).at_report
        if context.local_world_size > 1 and "torch" in sys.modules:
            save_in_one_step(tempfile.gettempdir())
        steps = itertools.count(1)

        def after_step(*_: object) -> None:
            with contextlib.suppress(Exception):  # of a property of the user's, for example
                if next(steps) == _FIRST_STEPS and not may_contain(_MEETING, sys._getframe(1)):
                    self.at_end(context)

        if context.world_rank == 0 and context.world_size > 1 and "torch.optim" in sys.modules:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            register_optimizer_step_post_hook(after_step)

    def at_report(self) -> None:
        current.session.check_replicas()

    def at_end(self, context: TrainContext) -> None:
        """Say once if the ranks have trained models, but never together."""
        session = current.session
        if session is None or session.collectives or session.has_prepared_model:
            return
        with contextlib.suppress(Exception):  # torch does not promise what it looks at
            if context.world_rank == 0 and context.world_size > 1 and _has_trained_alone():
                print(f"distrain: {context.world_size} {_TRAINED_ALONE}", file=sys.stderr)
                session.has_prepared_model = True

    def teardown(self, context: TrainContext) -> object:
        """Leave the process group, so that peers that wait for this rank fail at once. Scripts may have a group, too.

        Returns the group's store, which rank 0 serves for all ranks.
        """
        if "torch.distributed" not in sys.modules:
            return None
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            return None
        store: object = distributed.distributed_c10d._get_default_store()
        distributed.destroy_process_group()
        return store


def save_in_one_step(folder: str) -> None:
    """Have torch.save() replace a file of this directory in one step.

    Ranks that write to one path would otherwise mix their bytes, and torch.load() reads such a file without an error.
    """
    import torch

    save, folder = torch.save, os.path.realpath(folder)

    @functools.wraps(save)
    def replacing(obj: object, f: Any, *args: Any, **options: Any) -> None:
        if not isinstance(f, (str, os.PathLike)) or os.path.dirname(os.path.realpath(f)) != folder:
            save(obj, f, *args, **options)
            return
        with tempfile.TemporaryDirectory(dir=folder, prefix="distrain-save-") as own:
            written = os.path.join(own, os.path.basename(f))  # the archive has the name in it
            save(obj, written, *args, **options)
            os.replace(written, os.path.realpath(f))

    torch.save = replacing


def _has_trained_alone() -> bool:
    """Tell if this rank has computed gradients, and for certain never used a process group; False with an older torch.

    The flight recorder knows the collectives of all groups, also of those that are gone, but not all that gloo sends
    from rank to rank. The sequence number of a group counts these.
    """
    native = sys.modules.get("torch._C._distributed_c10d")
    is_recorded = hasattr(native, "_dump_fr_trace_json") and os.environ.get("TORCH_FR_BUFFER_SIZE") != "0"
    if not is_recorded or _MEETING_ELSEWHERE & sys.modules.keys():
        return False
    from torch import _C, distributed

    seen = {key for found in flight_recorder.recorded(entries=True) for key, value in found.items() if value}
    if "entries" in seen or not _C._autograd._get_sequence_nr():
        return False
    if not distributed.is_initialized():  # a script; it has made no group, or destroyed it
        return "pg_config" not in seen
    groups = list(distributed.distributed_c10d._world.pg_map)
    return len(groups) == 1 and not groups[0]._get_sequence_number_for_group()  # type: ignore[attr-defined]


def _await_store(timeout_s: float) -> None:
    """Wait until rank 0 listens, since torch pauses half a second or more after a refused connection.

    After the timeout torch tries, and raises its own error.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address, timeout=_PROBE_TIMEOUT_S).close()
        except OSError:
            time.sleep(_PROBE_INTERVAL_S)
        else:
            return


def _join_group(backend: str, device: str | None, timeout: timedelta) -> None:
    import torch
    from torch import distributed

    served, rank, world_size = next(distributed.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    # torchrun's store outlives a fit(): the next group of this process must not read the addresses of the last.
    store = distributed.PrefixStore(f"distrain/{next(_group_numbers)}", served)  # type: ignore[attr-defined]
    distributed.init_process_group(
        backend=backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if device is None else torch.device(device),
    )
    # Gloo connects every pair of ranks. A rank that finishes early must not break those that still connect, and rank 0,
    # which serves the store, not those that still wait: torch would print a long stack.
    for name in ("connected", "released"):
        if store.add(name, 1) == world_size:
            store.set(f"all {name}", "")
        if name == "connected" or rank == 0:
            store.wait([f"all {name}"], timeout)


def _accelerate_variables(context: TrainContext) -> dict[str, str]:
    """Return the variables that name the device to accelerate and transformers.

    Without them, both use a GPU if the host has one, and CPU workers do not find each other.
    """
    if not context.devices:
        return {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_CPU": "true"}
    first = context.devices[0]
    variables = {"ACCELERATE_TORCH_DEVICE": f"cuda:{first}"}
    if first != context.local_rank:
        variables["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # or DDP would get the GPU numbered LOCAL_RANK
    return variables


def _nccl_device(context: TrainContext, backend: str) -> str | None:
    """Return NCCL's GPU. NCCL's own guess from the rank is wrong on hosts with unequal slots."""
    return f"cuda:{context.devices[0]}" if context.devices and "nccl" in backend else None
