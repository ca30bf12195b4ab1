"""Stand-ins for CUDA, so that trainers written for GPUs run on CPUs without a change.

Put this directory first in PYTHONPATH. "CUDA" tensors stay on the CPU, NCCL becomes gloo, and there are as many
devices as ranks: LOCAL_WORLD_SIZE, or RANKS for a script that launches its own. Autocast has no effect, and BatchNorm
is not synchronized.
"""

import os
import sys
from contextlib import nullcontext
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace


class _WhenTorchIsImported(MetaPathFinder):
    def find_spec(self, name, *_):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_replace(module):
            execute(module)
            replace_cuda(module)

        spec.loader.exec_module = execute_and_replace
        return spec


def is_cuda(device=None):
    return type(device) is int or str(device).startswith("cuda")


def replace_cuda(torch):
    from torch.overrides import TorchFunctionMode

    distributed = torch.distributed

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            options = dict(options or {})
            if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return arguments[0]
            if function is torch.Tensor.to and is_cuda(*arguments[1:2]):
                arguments = (arguments[0], "cpu", *arguments[2:])
            if is_cuda(options.get("device")):
                options["device"] = "cpu"
            return function(*arguments, **options)

    def changed(owner, name, change):
        original = getattr(owner, name)

        def call(*arguments, **options):
            change(options)
            return original(*arguments, **options)

        setattr(owner, name, call)

    def with_gloo(options):
        options["backend"] = "gloo"
        options.pop("device_id", None)

    def start(backend=None, *arguments, _original=distributed.init_process_group, **options):
        with_gloo(options)
        _original(options.pop("backend"), *arguments, **options)

    count = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("RANKS") or 1)
    fake = {
        "is_available": True,
        "device_count": count,
        "current_device": int(os.environ.get("LOCAL_RANK", "0")),
        "is_bf16_supported": False,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "max_memory_allocated": 0,
        "memory_allocated": 0,
        "max_memory_reserved": 0,
        "memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "get_device_name": "CPU",
        "get_device_capability": (8, 0),
        "get_device_properties": SimpleNamespace(name="CPU", total_memory=1 << 34, major=8, minor=0),
        "stream": nullcontext(),
    }
    for name, value in fake.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    torch.accelerator.is_available = torch.cuda.is_available
    torch.accelerator.device_count = torch.cuda.device_count
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    torch.accelerator.set_device_index = torch.cuda.set_device
    distributed.init_process_group = distributed.distributed_c10d.init_process_group = start
    changed(distributed, "new_group", with_gloo)
    changed(distributed, "barrier", lambda options: options.pop("device_ids", None))
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda *_: None
    torch.nn.SyncBatchNorm.convert_sync_batchnorm = lambda module, *_: module
    ddp = torch.nn.parallel.DistributedDataParallel
    changed(ddp, "__init__", lambda options: [options.pop(name, None) for name in ("device_ids", "output_device")])
    changed(torch.utils.data.DataLoader, "__init__", lambda options: options.pop("pin_memory", None))
    changed(torch, "load", lambda options: options.update(map_location="cpu"))
    sys.modules["torch._six"] = six = ModuleType("torch._six")  # of old versions of torch
    six.inf, six.string_classes, six.container_abcs = torch.inf, (str, bytes), __import__("collections").abc
    OnCpu().__enter__()


sys.meta_path.insert(0, _WhenTorchIsImported())
