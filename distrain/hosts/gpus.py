"""The GPUs that CUDA would show to a process of this host, from NVML; without torch and without a subprocess.

Runs in: agent.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from distrain.hosts.host import Gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def find_gpus(environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """Return the visible GPUs in order, and what is wrong with the driver or with other GPUs, empty if nothing is.

    Without a driver there are none, and nothing is wrong.
    """
    boards, problems = _present()
    return visible(boards, environment.get("CUDA_VISIBLE_DEVICES")), "; ".join(problems)


def visible(boards: Sequence[Sequence[Gpu]], listed: str | None) -> tuple[Gpu, ...]:
    """Return what ``listed``, a CUDA_VISIBLE_DEVICES, leaves of the boards, as PyTorch reads it too.

    The list ends at the first entry that is bad or of another kind than the first one. A list that names anything twice
    shows nothing.
    boards: for each physical GPU itself, or its MIG instances if it is split. Entries may be indices, UUIDs of GPUs or
    of MIG instances, or the beginning of such a UUID. A board that is split stands for all of its instances (CUDA shows
    one process only the first: every rank is given its own).
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
    kind = "GPU-" if listed.startswith("GPU-") else "MIG-" if listed.startswith("MIG-") else ""
    entries = []
    for part in listed.split(","):
        number = re.match(r"\s*\+?(\d+)", part, re.ASCII)
        entry = part if kind else str(int(number[1])) if number else ""
        if not entry or not entry.startswith(kind):
            break
        entries.append(entry)
    return entries


def _named(boards: Sequence[Sequence[Gpu]], entry: str) -> Sequence[Gpu]:
    if entry.isdigit():
        return boards[int(entry)] if int(entry) < len(boards) else ()
    if entry.startswith("GPU-"):
        matching = [board for board in boards if board and board[0].board.startswith(entry)]
    else:
        matching = [[gpu] for board in boards for gpu in board if gpu.is_mig and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else ()


# -- NVML ------------------------------------------------------------------------------------------------------------


def _present() -> tuple[list[list[Gpu]], list[str]]:
    """Return the boards in the order of their PCI addresses, and what is wrong."""
    try:
        import pynvml
    except ImportError:
        return [], ["GPUs cannot be counted without the package nvidia-ml-py; install it"]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return [], []
    except pynvml.NVMLError as error:
        hint = _INIT_HINTS.get(error.value, "nvidia-smi may tell more")
        return [], [f"the NVIDIA driver cannot be used: {_in_words(error)}; {hint}"]
    boards, problems = [], []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                boards.append(_board(pynvml, index))
            except pynvml.NVMLError_NoPermission:  # another container's or job's
                continue
            except pynvml.NVMLError as error:
                problems.append(f"GPU {index} cannot be used: {_in_words(error)}")
    finally:
        pynvml.nvmlShutdown()
    return boards, problems


def _in_words(error: Any) -> str:
    return f"{str(error).rstrip('.')} (NVML error {error.value})"


_INIT_HINTS = {
    9: "load its kernel module, or restart the host",
    18: "its libraries were updated since its kernel module was loaded; restart the host",
}


def _board(nvml: Any, index: int) -> list[Gpu]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = nvml.nvmlDeviceGetName(device), nvml.nvmlDeviceGetUUID(device)
    if not _is_split(nvml, device):
        return [Gpu(name=name, uuid=uuid, board=uuid)]
    return [Gpu(name=name, uuid=instance, board=uuid) for instance in _mig_uuids(nvml, device)]


def _is_split(nvml: Any, device: Any) -> bool:
    """Tell whether the GPU is in MIG mode. Without instances, nothing can run on it."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(device)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return False
    return bool(current)


def _mig_uuids(nvml: Any, device: Any) -> list[str]:
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            found.append(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index)))
        except nvml.NVMLError_NotFound:
            continue
    return found
