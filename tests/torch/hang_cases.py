"""Hangs of many kinds, and slow runs that are healthy: ``python hang_cases.py NAME`` trains with one of them.

Four ranks train together. In step 1 they enter the case: a hang must be named within seconds, a slow run must not be
called one. tests/torch/test_hang_table.py and scripts/hang_table run them.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import hashlib
import mmap
import multiprocessing
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import distrain
from distrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from distrain.torch import TorchConfig, TorchTrainer

if TYPE_CHECKING:
    from collections.abc import Callable

WITHIN_S = 10.0
"""Seconds in which a hang must be named."""
HEALTHY_S = 12.0
"""Seconds for which a healthy run is slow."""
FOREVER_S = 600.0
WAIT = r"; ranks 0, 2, 3 wait for it in all_reduce \(hang_cases\.py:\d+\)\n.*rank 1 never reached all_reduce #2 "


@dataclass(frozen=True, slots=True)
class Case:
    """One case. ``says``: a pattern of the line that names the hang; None for a healthy run."""

    run: Callable[[int], object]
    says: str | None
    debug_rank: int | None = None

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def description(self) -> str:
        return (self.run.__doc__ or "").strip().rstrip(".")


CASES: dict[str, Case] = {}


def stuck(where: str = "", *, verb: str = "been stuck") -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Make a case in which rank 1 is stuck in a function, and the others wait for it.

    where: a pattern of the library function that it called.
    """

    def add(function: Callable[[], object]) -> Callable[[], object]:
        place = rf"{function.__name__} \(hang_cases\.py:\d+\)"
        says = rf"rank 1 has {verb} in {place}{f', in {where}' if where else ''} for .*{WAIT}"
        functools.update_wrapper(run := lambda rank: function() if rank == 1 else None, function)
        CASES[function.__name__] = Case(run, says)
        return function

    return add


def hang(says: str, **options: Any) -> Callable[[Callable[[int], object]], Callable[[int], object]]:
    """Make a case whose ranks do different things."""

    def add(function: Callable[[int], object]) -> Callable[[int], object]:
        CASES[function.__name__] = Case(function, says, **options)
        return function

    return add


def healthy(function: Callable[[int], object]) -> Callable[[int], object]:
    """Make a case that is slow, and no hang."""
    CASES[function.__name__] = Case(function, None)
    return function


def tensor() -> torch.Tensor:
    return torch.ones(512, 512)


# -- one rank is stuck -----------------------------------------------------------------------------------------------


@stuck()
def sleeps() -> None:
    """time.sleep()."""
    time.sleep(FOREVER_S)


@stuck(verb="looped without any change")
def spins() -> None:
    """An endless loop."""
    is_ready = False
    while not is_ready:
        pass


@stuck()
def polls_for_a_file() -> None:
    """A loop that looks for a file every 50 ms."""
    while not os.path.exists("/nonexistent/ready"):
        time.sleep(0.05)


@stuck(r"queue\.get")
def reads_an_empty_queue() -> None:
    """queue.get() of a queue that nobody fills."""
    queue.Queue[int]().get()


@stuck(r"subprocess\.\w+")
def waits_for_an_idle_process() -> None:
    """A child process that does nothing."""
    subprocess.run(["sleep", str(FOREVER_S)], check=False)


@stuck()
def reads_a_silent_socket() -> None:
    """A server that accepts, and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.sendall(b"GET")
    client.recv(1)


@stuck(r"runners\.run")
def awaits_a_future() -> None:
    """asyncio.run() of something that never happens."""

    async def wait() -> None:
        await asyncio.Event().wait()

    asyncio.run(wait())


def do_nothing_forever(_: int = 0) -> None:
    time.sleep(FOREVER_S)


class Images(Dataset[int]):
    """``item``: called for each."""

    def __init__(self, item: Callable[[int], int]) -> None:
        self._item = item

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return self._item(index)


def never(index: int) -> int:
    if index > 4:
        do_nothing_forever()
    return index


@stuck(r"dataloader\.__next__")
def waits_for_a_data_loader() -> None:
    """A DataLoader whose worker is stuck in the dataset."""
    for _ in DataLoader(Images(never), num_workers=1):
        pass


@hang(
    r"rank 1 has not answered for .*: stopped \(SIGSTOP\).*; "
    r"ranks 0, 2, 3 wait for it in all_reduce \(hang_cases\.py:\d+\)"
)
def is_stopped(rank: int) -> None:
    """A rank that was stopped (SIGSTOP)."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


@hang(r"rank 1 has stopped in is_in_the_debugger \(hang_cases\.py:\d+\), and waits for you", debug_rank=1)
def is_in_the_debugger(rank: int) -> None:
    """breakpoint() on the rank that is debugged."""
    if rank == 1:
        breakpoint()


@hang(r"rank 1 has been stuck in rank_1 \(hang_cases\.py:\d+\) for .*; ranks 0, 2, 3 wait for it in all_reduce")
def waits_in_a_store(rank: int) -> None:
    """A key of the TCPStore that nobody sets."""

    def rank_1() -> None:
        dist.distributed_c10d._get_default_store().get("never set")

    if rank == 1:
        rank_1()


class Hook(torch.autograd.Function):
    """Is stuck in the backward pass of rank 1."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        print("begins", dist.get_rank(), flush=True)
        if dist.get_rank() == 1:
            do_nothing_forever()
        return gradients[0]


@hang(
    r"rank 1 has been stuck in do_nothing_forever \(hang_cases\.py:\d+\) for .*; ranks 0, 2, 3 wait for it in backward"
)
def is_stuck_in_a_backward_pass(rank: int) -> None:
    """DDP: a function of rank 1's backward pass is stuck."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    Hook.apply(model(torch.ones(4, 8))).sum().backward()


@hang(
    r"rank 1 has been stuck for .* in native code that holds the GIL, in rank_1 at hang_cases\.py:\d+; "
    r"ranks 0, 2, 3 wait for it in all_reduce"
)
def deadlocks_in_native_code(rank: int) -> None:
    """A mutex that native code takes twice, without giving up the GIL."""

    def rank_1() -> None:
        mutex, native = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
        native.pthread_mutex_lock(mutex)
        native.pthread_mutex_lock(mutex)

    if rank == 1:
        rank_1()


@stuck()
def sleeps_while_a_thread_runs_processes() -> None:
    """time.sleep(), while a thread starts a short process every second, as trackers do."""

    def monitor() -> None:
        while True:
            subprocess.run(["true"], check=True)
            time.sleep(1.0)

    threading.Thread(target=monitor, daemon=True).start()
    time.sleep(FOREVER_S)


@stuck(r"subprocess\.\w+")
def waits_for_a_script_that_polls() -> None:
    """A shell script that looks for a file five times a second."""
    subprocess.run(["sh", "-c", "while ! test -e /nonexistent/ready; do sleep 0.2; done"], check=False)


# -- collectives that do not match -----------------------------------------------------------------------------------


@hang(
    r"all ranks have been waiting for each other .*: ranks 0, 2, 3 in all_reduce .*, rank 1 in broadcast .*\n"
    r".*do not match: ranks 0, 2, 3 called all_reduce #2 .*rank 1 called broadcast #2"
)
def calls_another_collective(rank: int) -> None:
    """broadcast() on one rank, all_reduce() on the others."""
    if rank == 1:
        dist.broadcast(tensor(), 2)


@hang(
    r"all ranks have been waiting for each other .*: ranks 0, 2, 3 in backward .*, rank 1 in barrier .*\n"
    r".*do not match: ranks 0, 2, 3 called all_reduce #\d+ .*rank 1 called barrier #\d+"
)
def calls_a_barrier_alone(rank: int) -> None:
    """DDP: barrier() on one rank, backward() on the others."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    if rank == 1:
        dist.barrier()
    model(torch.ones(4, 8)).sum().backward()


@hang(r"all ranks have been waiting for each other .*\n.*rank 1 never reached all_reduce #2 .*")
def uses_another_group(rank: int) -> None:
    """all_reduce() in another group on one rank."""
    group = dist.new_group([0, 1])
    if rank == 1:
        dist.all_reduce(tensor(), group=group)


@hang(r"waiting .* in all_reduce .*\n.*rank 0 never reached all_reduce #1 .*group of ranks 0.*")
def uses_groups_in_opposite_order(rank: int) -> None:
    """Two groups, in another order on one rank."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2, 3])]
    for group in groups if rank == 1 else groups[::-1]:
        if rank in (0, 1) or group is groups[1]:
            dist.all_reduce(tensor(), group=group)


@hang(r"all ranks have been waiting for each other .*: ranks 0-3 in recv \(hang_cases\.py:\d+\)")
def receives_first_in_a_ring(rank: int) -> None:
    """A ring in which every rank receives before it sends."""
    dist.recv(tensor(), (rank + 1) % 4)
    dist.send(tensor(), (rank - 1) % 4)


@hang(r"(?s)op\.preamble\.length.*called all_reduce #\d \(512 × 512, float32\) of the default group")
def has_another_shape(rank: int) -> None:
    """all_reduce() of another shape on one rank."""
    dist.all_reduce(torch.ones(256, 512) if rank == 1 else tensor())


@hang(r"(?s)rank 1 had finished train_func.*rank 1 has finished train_func without all_reduce #2 \(512")
def finishes_early(rank: int) -> None:
    """A rank that returns from train_func before the others."""
    if rank == 1:
        raise SystemExit(0)


@hang(
    r"(?s)(op\.preamble\.length|have been waiting).*all_reduce #\d+ \((72|512 × 512), float32\)"
    r"|op\.preamble\.length.*rank 1 in all_reduce at "
)
def has_fewer_batches(rank: int) -> None:
    """DDP with one batch fewer on one rank. If gloo aborts another rank, the flight recorders may come too late."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(2 if rank == 1 else 3):
        model(torch.ones(4, 8)).sum().backward()


@hang(r"waiting for each other .*rank 1 in send \(hang_cases\.py:\d+\)")
def sends_what_nobody_receives(rank: int) -> None:
    """send() of 100 MB without a recv()."""
    if rank == 1:
        dist.send(torch.ones(25_000_000), 0)


@hang(
    r"rank 1 has been stuck in rank_1 \(hang_cases\.py:\d+\).*; rank 0 waits for it in all_reduce .*"
    r"; ranks 2, 3 wait for it in recv"
)
def is_stuck_in_a_pipeline(rank: int) -> None:
    """Stages that receive from the stage before: rank 1 is stuck in its stage."""

    def rank_1() -> None:
        time.sleep(FOREVER_S)

    if rank:
        dist.recv(tensor(), rank - 1)
    if rank == 1:
        rank_1()
    if rank < 3:
        dist.send(tensor(), rank + 1)


# -- slow, and healthy -----------------------------------------------------------------------------------------------


def for_a_while() -> Any:
    end = time.monotonic() + HEALTHY_S
    return iter(lambda: time.monotonic() < end, False)


@healthy
def computes_in_native_code(rank: int) -> None:
    """Matrix products of one rank."""
    x = torch.rand(900, 900)
    for _ in for_a_while() if rank == 0 else ():
        torch.linalg.svd(x)


@healthy
def computes_in_python(rank: int) -> None:
    """A loop in Python."""
    if rank == 0:
        total, end = 0, time.monotonic() + HEALTHY_S
        while time.monotonic() < end:
            total += 1


@healthy
def computes_in_a_child(rank: int) -> None:
    """A child process that computes, as a compiler does."""
    if rank == 0:
        code = f"import time; end = time.monotonic() + {HEALTHY_S}\nwhile time.monotonic() < end: pass"
        subprocess.run([sys.executable, "-c", code], check=True)


@healthy
def pages_memory_in(rank: int) -> None:
    """Memory that comes back from a file page by page, as from swap."""
    if rank == 0:
        with tempfile.TemporaryFile() as file:
            file.truncate(64 << 20)
            with mmap.mmap(file.fileno(), 0) as memory:
                for _ in for_a_while():
                    memory.madvise(mmap.MADV_DONTNEED)
                    for at in range(0, len(memory), mmap.PAGESIZE * 64):
                        memory[at]
                        time.sleep(0.001)
                    memory[0] = random.randrange(256)
                    memory.flush()


def compute(index: int) -> int:
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        hashlib.sha256(bytes(1000)).digest()
    return index


@healthy
def waits_for_a_busy_data_loader(rank: int) -> None:
    """A DataLoader whose worker takes 3 s for an image."""
    if rank == 0:
        for number, _ in enumerate(DataLoader(Images(compute), num_workers=1)):
            if number == 3:
                break


@healthy
def has_no_cpu(rank: int) -> None:
    """A rank whose CPU others take."""
    if rank == 0:
        os.sched_setaffinity(0, {0})
        os.nice(19)
        code = f"import os, time; os.sched_setaffinity(0, {{0}}); end = time.monotonic() + {HEALTHY_S}\n"
        greedy = subprocess.Popen([sys.executable, "-c", code + "while time.monotonic() < end: pass"])
        os.setpriority(os.PRIO_PROCESS, greedy.pid, 19)
        for _ in for_a_while():
            sum(range(1000))


@healthy
def uploads_a_checkpoint(rank: int) -> None:
    """report() with a checkpoint that takes long to copy."""
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            for number in range(20):
                Path(folder, str(number)).write_bytes(os.urandom(1 << 20) * 20)
        distrain.report({"x": 1}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


@healthy
def reduces_much(rank: int) -> None:
    """all_reduce() of 400 MB, again and again."""
    large = torch.ones(25_000_000)
    for _ in range(12):
        dist.all_reduce(large)


@healthy
def steps_slowly(rank: int) -> None:
    """Steps of half a second that sleep, as with a GPU or a simulator elsewhere."""
    for _ in range(24):
        time.sleep(0.5)
        dist.all_reduce(tensor())


@healthy
def was_stopped_and_then_computes(rank: int) -> None:
    """A rank that was stopped for 3 s, and then works for long, in functions that take their time."""
    if rank == 0:
        subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"])
        time.sleep(0.5)
        computes_in_python(rank)


def drip(server: socket.socket, every_s: float) -> None:
    with server.accept()[0] as connection:
        for _ in range(int(HEALTHY_S / every_s)):
            time.sleep(every_s)
            connection.sendall(bytes(4000))


def dripping_server(every_s: float) -> Any:
    """Start a server in a process of its own, and return its address."""
    server = socket.create_server(("127.0.0.1", 0))
    multiprocessing.get_context("fork").Process(target=drip, args=(server, every_s), daemon=True).start()
    return server.getsockname()


@healthy
def downloads_from_a_dripping_server(rank: int) -> None:
    """A download of 4 kB every second."""
    if rank == 0:
        with socket.create_connection(dripping_server(1.0)) as connection:
            while connection.recv(4000):
                pass


@healthy
def keeps_the_gil(rank: int) -> None:
    """A regular expression that takes 12 s, and keeps the GIL."""
    if rank == 0:
        end = time.monotonic() + 1.0
        length = 22
        while time.monotonic() < end:
            began = time.monotonic()
            re.match(r"(a|aa)+$", "a" * length + "b")
            took = time.monotonic() - began
            length += 1
        for _ in range(20):
            if took > HEALTHY_S:
                break
            took, length = took * 1.618, length + 1
        re.match(r"(a|aa)+$", "a" * (length - 1) + "b")


# -- the run ---------------------------------------------------------------------------------------------------------


def train(config: dict[str, Any]) -> None:
    rank = dist.get_rank()
    dist.all_reduce(tensor())
    print(f"begins {rank}", flush=True)
    CASES[config["case"]].run(rank)
    dist.all_reduce(tensor())


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run said about its case. seconds: after its beginning; None if it said nothing."""

    seconds: float | None
    text: str


_SAYS_HANG = re.compile(
    r"^distrain: .*(been stuck|without any change|not answered|have been waiting|has finished|has stopped in)"
)


def watch(name: str, storage: Path) -> Seen:
    """Run a case until it is called a hang, has failed, or is over. Return the first lines that name a hang."""
    command = [sys.executable, __file__, name, str(storage)]
    limit_s = WITHIN_S + 15.0 if CASES[name].says else 4 * HEALTHY_S
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    lines: list[str] = []
    began = found = None
    killer = threading.Timer(limit_s + 20.0, process.send_signal, [signal.SIGTERM])
    killer.start()
    try:
        for line in process.stdout:
            now = time.monotonic()
            lines.append(line)
            if "begins" in line and found is None:
                began = now
                killer.cancel()
                killer = threading.Timer(limit_s, process.send_signal, [signal.SIGTERM])
                killer.start()
            if found is None and began is not None and (_SAYS_HANG.search(line) or "distrain: training failed" in line):
                found = (now - began, len(lines) - 1)
                killer.cancel()
                killer = threading.Timer(0.5, process.send_signal, [signal.SIGTERM])
                killer.start()
    finally:
        killer.cancel()
        process.stdout.close()
        process.wait()
    return Seen(None, "".join(lines)) if found is None else Seen(found[0], "".join(lines[found[1] :]))


def main(name: str, storage: str) -> None:
    case = CASES[name]
    TorchTrainer(
        train,
        train_loop_config={"case": name},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=4),
        run_config=RunConfig(
            name=name,
            storage_path=storage,
            stop_grace_s=1.0,
            debug_rank=case.debug_rank,
            failure_config=FailureConfig(max_failures=0),
        ),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
