"""The GPUs that CUDA would show to a process of this host, from NVML; without torch and without a subprocess.

Runs in: agent. NVML is called as its API reference says (docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from distrain.hosts import Gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["find_gpus", "visible"]

_LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-ml.so")
_TEXT_BYTES = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE."""


def find_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The visible GPUs in order; none without a driver."""
    return visible(_present(), environment.get("CUDA_VISIBLE_DEVICES"))


def visible(boards: Sequence[Sequence[Gpu]], listed: str | None) -> tuple[Gpu, ...]:
    """What ``listed``, a CUDA_VISIBLE_DEVICES, leaves of the boards; like CUDA, the list ends at the first bad entry.

    boards: for each physical GPU itself, or its MIG instances if it is split. Entries may be indices, UUIDs of GPUs or
    of MIG instances, or the beginning of such a UUID. A board that is split stands for all of its instances (CUDA shows
    one process only the first: every rank is given its own).
    """
    if listed is None:
        return tuple(gpu for board in boards for gpu in board)
    found: list[Gpu] = []
    for entry in (part.strip() for part in listed.split(",")):
        named = _named(boards, entry)
        if not named:
            break
        found += (gpu for gpu in named if gpu not in found)
    return tuple(found)


def _named(boards: Sequence[Sequence[Gpu]], entry: str) -> Sequence[Gpu]:
    if entry.isdigit():
        return boards[int(entry)] if int(entry) < len(boards) else ()
    if entry.startswith("GPU-"):
        return next((board for board in boards if board and board[0].board.startswith(entry)), ())
    if entry.startswith("MIG-"):
        return [gpu for board in boards for gpu in board if gpu.is_mig and gpu.uuid.startswith(entry)][:1]
    return ()


# -- NVML ------------------------------------------------------------------------------------------------------------


def _present() -> list[list[Gpu]]:
    for name in _LIBRARIES:
        try:
            nvml = ctypes.CDLL(name)
        except OSError:
            continue
        if nvml.nvmlInit_v2() != 0:
            return []
        try:
            return [_board(nvml, index) for index in range(_number(nvml.nvmlDeviceGetCount_v2))]
        finally:
            nvml.nvmlShutdown()
    return []


def _board(nvml: Any, index: int) -> list[Gpu]:
    device = ctypes.c_void_p()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
    name, uuid = _text(nvml.nvmlDeviceGetName, device), _text(nvml.nvmlDeviceGetUUID, device)
    instances = [Gpu(name=name, uuid=instance, board=uuid) for instance in _mig_uuids(nvml, device)]
    return instances or [Gpu(name=name, uuid=uuid, board=uuid)]


def _mig_uuids(nvml: Any, device: ctypes.c_void_p) -> list[str]:
    current, pending = ctypes.c_uint(0), ctypes.c_uint(0)
    if nvml.nvmlDeviceGetMigMode(device, ctypes.byref(current), ctypes.byref(pending)) != 0 or not current.value:
        return []
    found = []
    for index in range(_number(nvml.nvmlDeviceGetMaxMigDeviceCount, device)):
        instance = ctypes.c_void_p()
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index, ctypes.byref(instance)) == 0:
            found.append(_text(nvml.nvmlDeviceGetUUID, instance))
    return found


def _number(function: Any, *arguments: Any) -> int:
    number = ctypes.c_uint(0)
    function(*arguments, ctypes.byref(number))
    return number.value


def _text(function: Any, device: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    function(device, buffer, _TEXT_BYTES)
    return buffer.value.decode(errors="replace")
