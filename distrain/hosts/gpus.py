"""GPUs that CUDA shows to processes of this host, read with NVML. Runs in: agent, coordinator."""

from __future__ import annotations

import contextlib
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from distrain.hosts.host import Gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def find_gpus(environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """Return the visible GPUs in order, and the problems of the driver or of other GPUs, empty if there are none.

    A host without a driver has no GPUs and no problem.
    """
    boards, problems = _boards_and_problems()
    return visible(boards, environment.get("CUDA_VISIBLE_DEVICES")), "; ".join(problems)


def visible(boards: Sequence[Sequence[Gpu]], listed: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES shows, read as PyTorch reads it.

    Entries are indices, UUIDs of GPUs or of MIG instances, or the first characters of a UUID. The list ends at the
    first entry that is bad or of another kind than the first one. A list that names anything twice shows nothing. An
    entry for a GPU that is split stands for all of its MIG instances. (CUDA shows a process only the first of them; so
    every rank gets its own.)

    boards: for each physical GPU, the GPU itself, or its MIG instances if it is split.
    """
    if listed is None:
        return tuple(gpu for board in boards for gpu in board)
    entries = _entries(listed)
    found: list[Gpu] = []
    for entry in entries:
        named = _named(boards, entry)
        if not named:
            break
        found += named
    return tuple(found) if len(set(entries)) == len(entries) and len(set(found)) == len(found) else ()


def _entries(listed: str) -> list[str]:
    parts = listed.split(",")
    if kind := next((kind for kind in ("GPU-", "MIG-") if listed.startswith(kind)), ""):
        return list(takewhile(lambda part: part.startswith(kind), parts))
    return [str(int(part)) for part in takewhile(lambda part: part.isascii() and part.isdigit(), map(str.strip, parts))]


def _named(boards: Sequence[Sequence[Gpu]], entry: str) -> Sequence[Gpu]:
    if entry.isdigit():
        return boards[int(entry)] if int(entry) < len(boards) else ()
    if entry.startswith("GPU-"):
        matching = [board for board in boards if board and board[0].board.startswith(entry)]
    else:
        matching = [[gpu] for board in boards for gpu in board if gpu.is_mig and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else ()


# -- NVML ------------------------------------------------------------------------------------------------------------


def _boards_and_problems() -> tuple[list[list[Gpu]], list[str]]:
    """Return the boards in the order of their PCI addresses, and problems."""
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
    boards, problems = [], []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                boards.append(_board(pynvml, index))
            except pynvml.NVMLError_NoPermission:  # it belongs to another container or job
                continue
            except pynvml.NVMLError as error:
                problems.append(f"GPU {index} cannot be used: {_describe(error)}")
    finally:
        pynvml.nvmlShutdown()
    return boards, problems


def _describe(error: Any) -> str:
    return f"{str(error).rstrip('.')} (NVML error {error.value})"


_INIT_HINTS = {
    9: "load its kernel module, or restart the host",
    18: "its libraries were updated since its kernel module was loaded; restart the host",
}


def _board(nvml: Any, index: int) -> list[Gpu]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid, pci = nvml.nvmlDeviceGetName(device), nvml.nvmlDeviceGetUUID(device), _pci_address(nvml, device)
    uuids = _mig_uuids(nvml, device) if _is_split(nvml, device) else [uuid]
    return [Gpu(name=name, uuid=own, board=uuid, pci=pci) for own in uuids]


def _pci_address(nvml: Any, device: Any) -> str:
    with contextlib.suppress(nvml.NVMLError):
        info = nvml.nvmlDeviceGetPciInfo(device)
        return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"
    return ""


def _is_split(nvml: Any, device: Any) -> bool:
    """Tell if the GPU is in MIG mode, where programs can use its instances only."""
    with contextlib.suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        current, _ = nvml.nvmlDeviceGetMigMode(device)
        return bool(current)
    return False


def _mig_uuids(nvml: Any, device: Any) -> list[str]:
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        with contextlib.suppress(nvml.NVMLError_NotFound):
            found.append(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index)))
    return found
