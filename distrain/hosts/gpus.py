"""GPUs that CUDA shows to processes of this host, read with NVML. Runs in: agent, coordinator."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from distrain.hosts.host import Gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def find_gpus(environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """Return the visible GPUs in order, and the problems of the driver or of other GPUs, empty if there are none.

    A host without a driver has no GPUs and no problem.
    """
    gpus, problems = _gpus_and_problems()
    return visible(gpus, environment.get("CUDA_VISIBLE_DEVICES")), "; ".join(problems)


def visible(gpus: Sequence[Gpu], listed: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES shows, read as PyTorch reads it.

    Entries are indices, UUIDs, or the first characters of a UUID. The list ends at the first entry that is bad or of
    another kind than the first one. A list that names anything twice shows nothing. A GPU that is split into MIG
    instances counts as one, as CUDA shows a process the first instance only.

    gpus: all that the host has.
    """
    if listed is None:
        return tuple(gpus)
    if listed.startswith("MIG-"):
        return tuple(replace(gpu, uuid=listed.partition(",")[0], pci="") for gpu in gpus[:1])
    entries = _entries(listed)
    found: list[Gpu] = []
    for entry in entries:
        named = _named(gpus, entry)
        if named is None:
            break
        found.append(named)
    return tuple(found) if len(set(entries)) == len(entries) and len(set(found)) == len(found) else ()


def _entries(listed: str) -> list[str]:
    parts = listed.split(",")
    if listed.startswith("GPU-"):
        return list(takewhile(lambda part: part.startswith("GPU-"), parts))
    return [str(int(part)) for part in takewhile(lambda part: part.isascii() and part.isdigit(), map(str.strip, parts))]


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdigit():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    matching = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


# -- NVML ------------------------------------------------------------------------------------------------------------


def _gpus_and_problems() -> tuple[list[Gpu], list[str]]:
    """Return the GPUs in the order of their PCI addresses, and problems."""
    try:
        import pynvml
    except ImportError:
        return [], ["GPUs cannot be counted without the package nvidia-ml-py; install it"]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return [], []
    except pynvml.NVMLError as error:
        hint = _INIT_HINTS.get(error.value, "nvidia-smi may show more")
        return [], [f"the NVIDIA driver cannot be used: {_describe(error)}; {hint}"]
    gpus, problems = [], []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_gpu(pynvml, index))
            except pynvml.NVMLError_NoPermission:  # it belongs to another container or job
                continue
            except pynvml.NVMLError as error:
                problems.append(f"GPU {index} cannot be used: {_describe(error)}")
    finally:
        pynvml.nvmlShutdown()
    return gpus, problems


def _describe(error: Any) -> str:
    return f"{str(error).rstrip('.')} (NVML error {error.value})"


_INIT_HINTS = {
    9: "load its kernel module, or restart the host",
    18: "its libraries were updated since its kernel module was loaded; restart the host",
}


def _gpu(nvml: Any, index: int) -> Gpu:
    device, pci = nvml.nvmlDeviceGetHandleByIndex(index), ""
    with contextlib.suppress(nvml.NVMLError):
        info = nvml.nvmlDeviceGetPciInfo(device)
        pci = f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"
    return Gpu(name=nvml.nvmlDeviceGetName(device), uuid=nvml.nvmlDeviceGetUUID(device), pci=pci)
