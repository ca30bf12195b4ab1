"""The program that measures a host for ``distrain check --deep``, and its connection to another one. Runs in: measurer.

The agent starts it with the workers' interpreter, and imports no torch itself.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from distrain import wire
from distrain.hosts.host import collective_variables
from distrain.system import process
from distrain.wire.channel import Channel
from distrain.worker.sniff_test import COPIED_BYTES, copies, products, rate

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

_SAMPLE_S = 0.25
_SHORT_SAMPLE_S = 0.08
_FILE_BYTES, _BLOCK_BYTES = 64 << 20, 4 << 20
_WRITING_S = 2.0
_SHM = "/dev/shm"  # noqa: S108
_LEAST_SENT_BYTES, _MOST_SENT_BYTES = 256 << 10, 32 << 20
_SENDING_S = 0.05
"""Messages grow until one takes so long."""
_PINGS = 20
_PAIR_TIMEOUT = timedelta(seconds=10)


def main(arguments: list[str]) -> None:
    """Run the measurer. ``arguments``: the pid of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_with_parent(int(arguments[0]))
    channel, measurer = Channel(*process.private_stdio()), _Measurer()
    while not channel.at_end:
        for frame in channel.wait(None):
            channel.send(measurer.answer(frame.message()))


class _Measurer:
    def __init__(self) -> None:
        self._store: Any = None
        """That of a pair in which this host is rank 0."""

    def answer(self, order: wire.Message) -> wire.Measured:
        """Carry out an order. A failure of a driver or of the network is an answer, too."""
        assert isinstance(order, wire.Measure)
        try:
            match order.what:
                case "start":
                    return wire.Measured(number=order.number, facts=_facts())
                case "listen":
                    return wire.Measured(number=order.number, port=self._listen(order.address))
                case "pair":
                    results = self._pair(order)
                case "disk":
                    results = _disk(order.folder)
                case _:
                    results = _with_busy({"compute": _compute, "memory": _memory, "shm": _shm}[order.what])
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            return wire.Measured(number=order.number, failed=f"{type(error).__name__}: {first_line}")
        return wire.Measured(number=order.number, results=results)

    def _listen(self, address: str) -> int:
        self._store = _store(address, 0, is_master=True)
        return int(self._store.port)

    def _pair(self, order: wire.Measure) -> dict[str, float]:
        if order.interface:
            os.environ.update(collective_variables(order.interface))
        store = _store(order.address, order.port, is_master=False) if order.rank else self._store
        backend, device = ("nccl", "cuda:0") if order.on_gpu else ("gloo", "cpu")
        distributed.init_process_group(backend, store=store, rank=order.rank, world_size=2, timeout=_PAIR_TIMEOUT)
        try:
            return _connection(order.rank, torch.device(device))
        finally:
            distributed.destroy_process_group()
            self._store = None


def _store(address: str, port: int, *, is_master: bool) -> Any:
    """Return one end of the store by which two hosts meet. ``port``: 0 for one that the system chooses."""
    kind: Any = distributed.TCPStore  # type: ignore[attr-defined]
    return kind(address, port, is_master=is_master, wait_for_workers=False, timeout=_PAIR_TIMEOUT)


# -- the host alone --------------------------------------------------------------------------------------------------


def _facts() -> dict[str, Any]:
    """Return what must be equal for two hosts to be compared."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), os.uname().machine
    )
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"cpu": f"{len(os.sched_getaffinity(0))} x {model}", "gpus": gpus}


def _with_busy(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return results, and as ``busy`` the share of CPU time that went to others: programs, containers, other VMs."""
    before, own = _cpu_seconds(), time.process_time()
    results = measure()
    own, after = time.process_time() - own, _cpu_seconds()
    used, total = (late - early for early, late in zip(before, after, strict=True))
    return {**results, "busy": max(0.0, used - own) / max(total, 0.01)}


def _cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds of this machine since it was started: those that were used, and all."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # and waiting for disks
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - idle) / per_second, sum(ticks) / per_second


def _compute() -> dict[str, float]:
    """Return TFLOP/s of float32 on the CPUs, and of float16 on the slowest GPU."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    results = {"cpu": products(torch, "cpu", _SAMPLE_S)}
    return results | ({"gpu": min(products(torch, gpu, _SAMPLE_S) for gpu in gpus)} if gpus else {})


def _memory() -> dict[str, float]:
    return {"memory": copies()}


def _shm() -> dict[str, float]:
    """Return GB/s of writing to a file in /dev/shm, and the size of that file system in bytes."""
    status = os.statvfs(_SHM)
    size = min(COPIED_BYTES // 2, status.f_bavail * status.f_frsize // 4)
    source = bytes(size)
    with tempfile.TemporaryFile(dir=_SHM, buffering=0) as file:
        speed = rate(lambda: 1e-9 * os.pwrite(file.fileno(), source, 0), _SHORT_SAMPLE_S)
    return {"shm": speed, "shm_bytes": float(status.f_blocks * status.f_frsize)}


def _disk(folder: str) -> dict[str, float]:
    """Return MB/s of writing a file, with fsync, and of reading it, in the storage if the host sees it."""
    block = os.urandom(_BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder if os.path.isdir(folder) else None, buffering=0) as file:
        began, written = time.perf_counter(), 0
        while written < _FILE_BYTES and time.perf_counter() - began < _WRITING_S:
            written += file.write(block)
        os.fsync(file.fileno())
        write_s = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it is read from memory
        file.seek(0)
        began, read = time.perf_counter(), 0
        while (data := file.read(_BLOCK_BYTES)) and time.perf_counter() - began < _WRITING_S:
            read += len(data)
        read_s = time.perf_counter() - began
    return {"disk_write": 1e-6 * written / write_s, "disk_read": 1e-6 * read / read_s}


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

    def once(act: Callable[[Any], object], size: int) -> float:
        data = torch.zeros(size // 4, device=device)
        return seconds(lambda: act(data))

    def rate(act: Callable[[Any], object]) -> float:
        size = _LEAST_SENT_BYTES
        while (spent := once(act, size)) < _SENDING_S and size < _MOST_SENT_BYTES:
            size *= 2
        return 1e-9 * size / min(spent, once(act, size))

    distributed.all_reduce(mark)  # connects
    return {
        "latency": 1e6 * min(seconds(lambda: send(mark, 0)) for _ in range(_PINGS)) / 2,
        "send": min(rate(lambda data: send(data, 0)), rate(lambda data: send(data, 1))),
        "all_reduce": rate(distributed.all_reduce),
    }
