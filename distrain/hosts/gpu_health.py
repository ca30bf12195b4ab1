"""The health of this host's GPUs, as NVML reports it. Runs in: agent."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.hosts.cgroup import text_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """The state of one GPU. What a GPU or its driver does not tell has the value of a healthy and idle one.

    index: its number for nvidia-smi.
    memory_bytes, free_bytes: 0 if unknown.
    processes: those that use it, such as ``python (pid 4711)``.
    memory_errors: number of uncorrectable ones since the driver was loaded.
    repair: ``pending`` if it replaces faulty memory at its next reset; ``failed`` if it cannot; else empty.
    slowed_by: what keeps its clocks down, such as ``heat``.
    celsius: temperature of the chip; 0 if unknown.
    """

    index: int
    uuid: str
    memory_bytes: int = 0
    free_bytes: int = 0
    processes: Sequence[str] = ()
    memory_errors: int = 0
    repair: str = ""
    slowed_by: Sequence[str] = ()
    celsius: int = 0


def gpu_health(uuids: Collection[str]) -> list[GpuHealth]:
    """Return the health of the GPUs with these UUIDs; of none if there is no usable driver. Raises nothing."""
    try:
        import pynvml
    except ImportError:
        return []
    found = []
    with contextlib.suppress(pynvml.NVMLError):  # the driver does not answer
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                with contextlib.suppress(pynvml.NVMLError):  # lost, or of another container: find_gpus() reports that
                    device = pynvml.nvmlDeviceGetHandleByIndex(index)
                    if (uuid := pynvml.nvmlDeviceGetUUID(device)) in uuids:
                        found.append(_health(pynvml, index, uuid, device))
        finally:
            pynvml.nvmlShutdown()
    return found


def _health(nvml: Any, index: int, uuid: str, device: Any) -> GpuHealth:
    def ask(default: Any, question: Callable[..., Any], *arguments: int) -> Any:
        try:
            return question(device, *arguments)
        except (nvml.NVMLError, nvml.NVMLLibraryMismatchError):  # this product, driver or mode does not know it
            return default

    memory = ask(None, nvml.nvmlDeviceGetMemoryInfo)
    *_, rows_pending, rows_failed = ask((0, 0, 0, 0), nvml.nvmlDeviceGetRemappedRows)  # since Ampere; pages before
    is_pending = rows_pending or ask(False, nvml.nvmlDeviceGetRetiredPagesPendingStatus)
    return GpuHealth(
        index=index,
        uuid=uuid,
        memory_bytes=memory.total if memory is not None else 0,
        free_bytes=memory.free if memory is not None else 0,
        processes=[_describe(process) for process in ask([], nvml.nvmlDeviceGetComputeRunningProcesses)],
        memory_errors=ask(
            0, nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        repair="failed" if rows_failed else "pending" if is_pending else "",
        slowed_by=_slowdowns(nvml, ask(0, nvml.nvmlDeviceGetCurrentClocksThrottleReasons)),
        celsius=ask(0, nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
    )


def _slowdowns(nvml: Any, reasons: int) -> list[str]:
    """Return the reasons for low clocks that aren't part of normal work, as a power limit or an idle GPU is.

    NVML gives HwSlowdown together with each of the more exact reasons of the hardware.
    """
    exact = {
        "heat": nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "the power supply": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    found = [name for name, mask in exact.items() if reasons & mask]
    return found or ["its hardware"] * bool(reasons & nvml.nvmlClocksThrottleReasonHwSlowdown)


def _describe(process: Any) -> str:
    name = text_in(Path(f"/proc/{process.pid}/comm"))  # empty if it belongs to another container, or has just ended
    return f"{name or 'a process'} (pid {process.pid})"
