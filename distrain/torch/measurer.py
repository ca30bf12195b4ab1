"""The program that measures a host for ``distrain check --deep``, and its connection to another one. Runs in: measurer.

The agent starts it with the workers' interpreter, and imports no torch itself.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from distrain import wire
from distrain.hosts.host import collective_variables
from distrain.hosts.host_info import usable_cpus
from distrain.system.text import size
from distrain.wire.child_link import channel_to_parent
from distrain.worker.sniff_test import measure, rate

if TYPE_CHECKING:
    from collections.abc import Callable

_FILE_BYTES, _BLOCK_BYTES, _SHM_BYTES = 64 << 20, 4 << 20, 32 << 20
_SHM_S = 0.08
_WRITING_S = 2.0
_SHM = "/dev/shm"  # noqa: S108
_LEAST_SHM_BYTES = 256 << 20
"""Size of /dev/shm below which DataLoader workers are likely to fail."""
_SENT_BYTES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
_SENDING_S = 0.01
"""Messages grow until one takes so long."""
_PINGS = 20
_PAIR_TIMEOUT = timedelta(seconds=10)
_store = partial(distributed.TCPStore, wait_for_workers=False, timeout=_PAIR_TIMEOUT)  # type: ignore[attr-defined]
"""Makes one end of a store by which two hosts meet. For port 0, the system chooses one."""
_KILLED_S = 25
"""Seconds after which a pair is given up, if NCCL has ignored its timeout."""


def main(arguments: list[str]) -> None:
    """Run the measurer. ``arguments``: the pid of the parent."""
    channel, measurer = channel_to_parent(arguments[0]), _Measurer()
    status = os.statvfs(_SHM)
    if (shm_bytes := status.f_blocks * status.f_frsize) < _LEAST_SHM_BYTES:
        text = f"its shared memory has only {size(shm_bytes)}, too little for DataLoader workers"
        channel.send(wire.Notice(text=f"{text}; start the container with --shm-size=8g or --ipc=host"))
    while not channel.at_end:
        for frame in channel.wait(None):
            channel.send(measurer.answer(frame.message()))


class _Measurer:
    def __init__(self) -> None:
        self._store: Any = None
        """By which this host meets its partners in pairs where it is rank 0."""

    def answer(self, order: wire.Message) -> wire.Measured:
        """Carry out an order. A failure of a driver or of the network is an answer, too."""
        assert isinstance(order, wire.Measure)
        try:
            if order.rank == 0 and order.address and self._store is None:
                self._store = _store(order.address, order.port, is_master=True)
            match order.what:
                case "start":
                    return wire.Measured(model=_model(), port=self._store.port if self._store else 0)
                case "host":
                    return _host(order.folder)
                case _:
                    return wire.Measured(results=self._pair(order))
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            return wire.Measured(failed=f"{type(error).__name__}: {first_line}")
        finally:
            signal.alarm(0)

    def _pair(self, order: wire.Measure) -> dict[str, float]:
        signal.alarm(_KILLED_S)
        if order.interface:
            os.environ.update(collective_variables(order.interface))
        store = _store(order.address, order.port, is_master=False) if order.rank else self._store
        own = distributed.PrefixStore(str(order.number), store)  # type: ignore[attr-defined]
        backend, device = ("nccl", "cuda:0") if order.on_gpu else ("gloo", "cpu")
        distributed.init_process_group(backend, store=own, rank=order.rank, world_size=2, timeout=_PAIR_TIMEOUT)
        try:
            return _connection(order.rank, torch.device(device))
        finally:
            distributed.destroy_process_group()


# -- the host alone --------------------------------------------------------------------------------------------------


def _gpus() -> list[str]:
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def _model() -> str:
    """Return what must be equal for two hosts to be compared."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cpus = f"{len(os.sched_getaffinity(0))} x {next(models, os.uname().machine)}"
    return ", ".join([cpus, *map(torch.cuda.get_device_name, _gpus())])


def _host(folder: str) -> wire.Measured:
    """Measure the host, and how much of its CPU time other programs use meanwhile."""
    others, total = _cpu_seconds()
    results = {"cpus": float(usable_cpus()), **dict(measure(torch, _gpus())), "shm": _shm(), **_disk(folder)}
    others_later, total_later = _cpu_seconds()
    return wire.Measured(results=results, busy=(others_later - others) / max(total_later - total, 0.01))


def _cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds of this machine since its start: of other programs, containers and VMs, and all."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    total, idle = (number / os.sysconf("SC_CLK_TCK") for number in (sum(ticks), ticks[3] + ticks[4]))
    return total - idle - time.process_time(), total


def _shm() -> float:
    """Return GB/s of writing to a file in /dev/shm."""
    source = bytes(_SHM_BYTES)
    with tempfile.TemporaryFile(dir=_SHM, buffering=0) as file:
        return rate(lambda: 1e-9 * os.pwrite(file.fileno(), source, 0), _SHM_S)


def _disk(folder: str) -> dict[str, float]:
    """Return MB/s of writing a file, with fsync, and of reading it, in the storage if the host sees it."""
    block = os.urandom(_BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder if os.path.isdir(folder) else None, buffering=0) as file:
        began = time.perf_counter()
        while file.tell() < _FILE_BYTES and time.perf_counter() - began < _WRITING_S:
            file.write(block)
        os.fsync(file.fileno())
        write_s, megabytes = time.perf_counter() - began, 1e-6 * file.tell()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it is read from memory
        file.seek(0)
        began = time.perf_counter()
        while file.read(_BLOCK_BYTES):
            pass
        return {"disk_write": megabytes / write_s, "disk_read": megabytes / (time.perf_counter() - began)}


# -- two hosts -------------------------------------------------------------------------------------------------------


def _connection(rank: int, device: Any) -> dict[str, float]:
    """Return GB/s of all_reduce and of messages, and µs of the way of a small message. Both hosts call this."""
    mark = torch.zeros(1, device=device)

    def send(data: Any, sender: int) -> None:
        if rank == sender:
            distributed.send(data, 1 - rank)
            distributed.recv(mark, 1 - rank)
        else:
            distributed.recv(data, 1 - rank)
            distributed.send(mark, 1 - rank)

    def seconds(act: Callable[[], object]) -> float:
        """Return the time that something takes by the clock of rank 0, which both hosts learn."""
        began = time.perf_counter()
        act()
        mark.item()  # waits for a GPU
        spent = torch.tensor([time.perf_counter() - began], device=device)
        distributed.broadcast(spent, 0)
        return float(spent.item())

    def speed(act: Callable[[Any], object]) -> float:
        for count in _SENT_BYTES:
            data = torch.zeros(count // 4, device=device)
            spent = min(seconds(lambda: act(data)) for _ in range(2))  # noqa: B023
            if spent > _SENDING_S:
                break
        return 1e-9 * count / spent

    distributed.all_reduce(mark)  # connects
    return {
        "latency": 1e6 * min(seconds(lambda: send(mark, 0)) for _ in range(_PINGS)) / 2,
        "send": min(speed(lambda data: send(data, 0)), speed(lambda data: send(data, 1))),
        "all_reduce": speed(distributed.all_reduce),
    }
