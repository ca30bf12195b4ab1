"""Hangs of many kinds, and slow runs that are healthy: ``python hang_cases.py NAME`` trains with one of them.

Four ranks train together. In step 1 they enter the case: a hang must be named within seconds, a slow run must not be
called one. tests/torch/test_hang_table.py and scripts/hang_table run them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import gc
import gzip
import hashlib
import http.server
import itertools
import json
import mmap
import multiprocessing
import os
import pickle
import pty
import queue
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy
import pandas
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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


@stuck()
def takes_a_lock_twice() -> None:
    """A lock that the thread holds already."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


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


@stuck(r"threading\.wait")
def waits_for_an_event() -> None:
    """threading.Event.wait()."""
    threading.Event().wait()


@stuck(r"_base\.result")
def waits_for_a_future() -> None:
    """The result of a future that nobody sets."""
    Future[int]().result()


@stuck(r"threading\.join")
def joins_a_thread_that_is_stuck() -> None:
    """A thread that is stuck in a queue."""
    thread = threading.Thread(target=queue.Queue[int]().get, daemon=True)
    thread.start()
    thread.join()


@stuck(r"subprocess\.\w+")
def waits_for_an_idle_process() -> None:
    """A child process that does nothing."""
    subprocess.run(["sleep", str(FOREVER_S)], check=False)


@stuck(r"subprocess\.wait")
def waits_for_a_process_whose_pipe_is_full() -> None:
    """A child process that writes to a pipe that nobody reads."""
    subprocess.Popen(["head", "-c", "1000000", "/dev/zero"], stdout=subprocess.PIPE).wait()


@stuck()
def reads_a_silent_socket() -> None:
    """A server that accepts, and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.sendall(b"GET")
    client.recv(1)


@stuck()
def reads_from_a_disk_that_does_not_answer() -> None:
    """A file that never comes (a pipe without a writer: a frozen disk cannot be cleaned up)."""
    folder = tempfile.mkdtemp()
    os.mkfifo(f"{folder}/file")
    with open(f"{folder}/file", "rb") as file:
        file.read()


@stuck()
def waits_for_a_file_lock() -> None:
    """flock() of a file that another process has locked."""
    path = tempfile.mkstemp()[1]
    holder = f"import fcntl, time; file = open({path!r}); fcntl.flock(file, 2); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@stuck(r"runners\.run")
def awaits_a_future() -> None:
    """asyncio.run() of something that never happens."""

    async def wait() -> None:
        await asyncio.Event().wait()

    asyncio.run(wait())


@stuck(r"connection\.recv")
def reads_a_connection() -> None:
    """multiprocessing's Connection.recv()."""
    ends = multiprocessing.Pipe()
    ends[0].recv()


def do_nothing_forever(_: int = 0) -> None:
    time.sleep(FOREVER_S)


@stuck(r"pool\.map")
def waits_for_a_pool() -> None:
    """multiprocessing.Pool.map() whose workers are stuck."""
    multiprocessing.get_context("fork").Pool(2).map(do_nothing_forever, [1, 2])


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


def stop_oneself(index: int) -> int:
    if index > 4:
        os.kill(os.getpid(), signal.SIGSTOP)
    return index


@stuck(r"dataloader\.__next__")
def waits_for_a_stopped_data_loader() -> None:
    """A DataLoader whose worker was stopped."""
    for _ in DataLoader(Images(stop_oneself), num_workers=1):
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


@hang(
    r"all ranks have been waiting for each other .*: ranks 0, 2, 3 in barrier .*, rank 1 in all_reduce .*\n"
    r".*do not match: ranks 0, 2, 3 called barrier #2.*rank 1 called all_reduce #2"
)
def leaves_a_barrier_out(rank: int) -> None:
    """barrier() on all ranks but one."""
    if rank != 1:
        dist.barrier()


@hang(r"all ranks have been waiting for each other .*\n.*rank 1 never reached all_reduce #2 .*")
def uses_another_group(rank: int) -> None:
    """all_reduce() in another group on one rank."""
    group = dist.new_group([0, 1])
    if rank == 1:
        dist.all_reduce(tensor(), group=group)


@hang(r"all ranks have been waiting for each other .*\n.*(never reached|do not match)")
def makes_a_group_alone(rank: int) -> None:
    """new_group() on one rank only."""
    if rank == 1:
        dist.new_group([0, 1, 2, 3])


@hang(r"waiting .* in all_reduce .*\n.*rank 0 never reached all_reduce #1 .*group of ranks 0.*")
def uses_groups_in_opposite_order(rank: int) -> None:
    """Two groups, in another order on one rank."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2, 3])]
    for group in groups if rank == 1 else groups[::-1]:
        if rank in (0, 1) or group is groups[1]:
            dist.all_reduce(tensor(), group=group)


@hang(r"rank 1 in recv \(hang_cases\.py:\d+\)")
def receives_what_nobody_sends(rank: int) -> None:
    """recv() without a send()."""
    if rank == 1:
        dist.recv(tensor(), 0)


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


# -- one rank is stuck: written later, when the limits of the detection were chosen -----------------------------------

SOMEWHERE = r"[\w.]+"


@stuck(r"subprocess\.\w+")
def waits_for_a_script_that_polls() -> None:
    """A shell script that looks for a file five times a second."""
    subprocess.run(["sh", "-c", "while ! test -e /nonexistent/ready; do sleep 0.2; done"], check=False)


@stuck(r"queue\.get")
def reads_a_queue_whose_producer_died() -> None:
    """queue.get(), and the thread that fills the queue has failed."""
    batches: queue.Queue[int] = queue.Queue()

    def produce() -> None:
        batches.put(1)
        raise ValueError("bad record")

    threading.Thread(target=produce).start()
    while True:
        batches.get()


@stuck(SOMEWHERE)
def asks_a_stopped_server() -> None:
    """An HTTP request to a server whose process is stopped."""
    code = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler); "
    code += "print(s.server_port, flush=True); s.serve_forever()"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    port = int(server.stdout.readline())
    server.send_signal(signal.SIGSTOP)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
        answer.read()


def kill_oneself(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@stuck(r"pool\.map")
def waits_for_a_pool_whose_worker_was_killed() -> None:
    """multiprocessing.Pool.map() whose worker was killed for its memory."""
    multiprocessing.get_context("fork").Pool(2).map(kill_oneself, [1])


@stuck(r"dataloader\.__next__")
def forks_a_data_loader_with_a_held_lock() -> None:
    """DataLoader workers that were forked while another thread held a lock they need."""
    lock = threading.Lock()

    def takes_the_lock(index: int) -> int:
        with lock:
            return index

    with lock:
        loader = iter(DataLoader(Images(takes_the_lock), num_workers=2, multiprocessing_context="fork"))
    next(loader)


@stuck(r"(popen_fork|process)\.\w+")
def joins_a_process_with_a_held_lock() -> None:
    """Process.join() of a forked process that needs a lock which was held over the fork."""
    lock = threading.Lock()
    with lock:
        process = multiprocessing.get_context("fork").Process(target=lock.acquire)
        process.start()
    process.join()


@stuck(r"(popen_fork|process)\.\w+")
def joins_a_process_whose_queue_is_full() -> None:
    """Process.join() before the queue of its result is read."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=results.put, args=(bytes(10_000_000),))
    process.start()
    process.join()


@stuck()
def opens_a_pipe_that_nobody_reads() -> None:
    """A named pipe that is opened to write, without a reader."""
    folder = tempfile.mkdtemp()
    os.mkfifo(f"{folder}/log")
    os.open(f"{folder}/log", os.O_WRONLY)


@stuck(SOMEWHERE)
def waits_for_a_lock_file() -> None:
    """FileLock of a cache folder that another process has locked."""
    path = tempfile.mkstemp()[1]
    code = (
        f"import time, filelock; lock = filelock.FileLock({path!r}); lock.acquire(); print(flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    filelock.FileLock(path).acquire()


@stuck()
def waits_for_a_locked_database() -> None:
    """A write to an SQLite database that another process has locked."""
    path = tempfile.mkdtemp() + "/runs.db"
    code = f"import sqlite3, time; c = sqlite3.connect({path!r}); c.execute('create table runs (x)'); "
    code += "c.execute('begin exclusive'); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    sqlite3.connect(path, timeout=FOREVER_S).execute("insert into runs values (1)")


@stuck(r"runners\.run")
def polls_in_asyncio() -> None:
    """asyncio code that looks for an answer ten times a second."""
    answers: list[int] = []

    async def wait() -> None:
        while not answers:
            await asyncio.sleep(0.1)

    asyncio.run(wait())


@stuck(r"threading\.wait")
def waits_for_an_event_again_and_again() -> None:
    """Event.wait(1.0) in a loop, and the thread that sets it has died."""
    ready = threading.Event()
    while not ready.wait(1.0):
        pass


@stuck(SOMEWHERE)
def submits_to_its_own_executor() -> None:
    """A task that waits for another task of the same ThreadPoolExecutor, which has one thread."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(lambda: executor.submit(time.time).result()).result()


@stuck()
def retries_to_connect() -> None:
    """A loop that tries to reach a server that is gone, ten times a second."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(address):
            return
        time.sleep(0.1)


@stuck()
def asks_at_a_terminal() -> None:
    """A question at a terminal that nobody answers."""
    with open(pty.openpty()[1]) as terminal:
        terminal.readline()


@stuck()
def sleeps_with_a_heartbeat() -> None:
    """time.sleep(), while a thread writes a line to a log twice a second."""

    def beat() -> None:
        with tempfile.TemporaryFile("w") as file:
            while True:
                file.write(f"{time.time()} {threading.active_count()}\n")
                file.flush()
                time.sleep(0.5)

    threading.Thread(target=beat, daemon=True).start()
    time.sleep(FOREVER_S)


@stuck()
def sleeps_with_a_monitor() -> None:
    """time.sleep(), while a thread reads the use of the machine every second, as trackers do."""

    def monitor() -> None:
        while True:
            for path in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    path.read_text().split()
            time.sleep(1.0)

    threading.Thread(target=monitor, daemon=True).start()
    time.sleep(FOREVER_S)


@hang(r"rank 1 has been stuck in wait_for_the_others \(hang_cases\.py:\d+\).*; ranks 0, 2, 3 wait for it in all_reduce")
def stops_early(rank: int) -> None:
    """One rank leaves the loop of steps, and sleeps."""

    def wait_for_the_others() -> None:
        time.sleep(FOREVER_S)

    for step in range(5):
        if rank == 1 and step == 3:
            break
        dist.all_reduce(tensor())
    if rank == 1:
        wait_for_the_others()


@hang(r"rank 1 has been stuck in polls_a_work \(hang_cases\.py:\d+\).*; ranks 0, 2, 3 wait for it in all_reduce")
def polls_a_work(rank: int) -> None:
    """irecv() of what nobody sends, and a loop that asks whether it has come."""
    work = dist.irecv(tensor(), 0) if rank == 1 else None
    while work and not work.is_completed():
        time.sleep(0.01)


# -- collectives that do not match: written later ----------------------------------------------------------------------


@hang(r"waiting for each other .*rank 0 in recv \(hang_cases\.py:\d+\).*rank 1 in barrier \(hang_cases\.py:\d+\)")
def receives_from_a_rank_in_a_barrier(rank: int) -> None:
    """recv() from a rank that is in a barrier."""
    if rank == 0:
        dist.recv(tensor(), 1)
    if rank == 1:
        dist.barrier()


@hang(r"waiting for each other .*ranks 0, 1 in recv \(hang_cases\.py:\d+\)")
def receives_first_on_both_ends(rank: int) -> None:
    """Two ranks that both receive before they send."""
    if rank < 2:
        dist.recv(tensor(), 1 - rank)
        dist.send(tensor(), 1 - rank)


@hang(r"waiting for each other .*rank 1 in send \(hang_cases\.py:\d+\)")
def sends_what_nobody_receives(rank: int) -> None:
    """send() of 100 MB without a recv()."""
    if rank == 1:
        dist.send(torch.ones(25_000_000), 0)


@hang(r"(?s)(op\.preamble\.length|waiting for each other .*rank 0 in gather_object).*all_gather #2")
def gathers_on_one_rank(rank: int) -> None:
    """gather_object() on rank 0 only."""
    if rank == 0:
        dist.gather_object({"loss": 1.0}, [None] * 4)


@hang(r"(?s)(op\.preamble\.length|have been waiting).*#\d+ ")
def has_fewer_batches_with_fsdp(rank: int) -> None:
    """FSDP2 with one batch fewer on one rank."""
    model = fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))
    for _ in range(2 if rank == 1 else 3):
        model(torch.ones(4, 8)).sum().backward()


@hang(r"rank 1 has been stuck in rank_1 \(hang_cases\.py:\d+\).*; ranks 0, 2, 3 wait for it in monitored_barrier")
def misses_a_monitored_barrier(rank: int) -> None:
    """monitored_barrier() on all ranks but one."""

    def rank_1() -> None:
        time.sleep(FOREVER_S)

    if rank == 1:
        rank_1()
    dist.monitored_barrier(timeout=timedelta(seconds=FOREVER_S))


@hang(r"rank 1 has been stuck in rank_1 \(hang_cases\.py:\d+\).*; ranks? .*wait.* for it in all_reduce")
def is_stuck_in_a_mesh(rank: int) -> None:
    """A 2 × 2 mesh: rank 0 waits for the stuck rank 1, ranks 2 and 3 wait for rank 0."""

    def rank_1() -> None:
        time.sleep(FOREVER_S)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if rank == 1:
        rank_1()
    dist.all_reduce(tensor(), group=mesh.get_group("shard"))


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
def computes_in_a_thread(rank: int) -> None:
    """The main thread waits for a thread that computes."""
    if rank == 0:
        thread = threading.Thread(target=computes_in_python, args=(0,))
        thread.start()
        thread.join()


@healthy
def evaluates(rank: int) -> None:
    """An evaluation on rank 0."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    with torch.no_grad():
        for _ in for_a_while() if rank == 0 else ():
            model(torch.rand(64, 512)).argmax(1).sum().item()


@healthy
def saves_a_checkpoint(rank: int) -> None:
    """torch.save() and fsync() on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in for_a_while() if rank == 0 else ():
            with open(f"{folder}/model.pt", "wb") as file:
                torch.save(torch.rand(4_000_000), file)
                os.fsync(file.fileno())


@healthy
def has_longer_batches(rank: int) -> None:
    """One rank has twice as much to do in every step."""
    for _ in range(6):
        end = time.monotonic() + (2.0 if rank == 0 else 1.0)
        while time.monotonic() < end:
            torch.rand(200, 200) @ torch.rand(200, 200)
        dist.all_reduce(tensor())


@healthy
def collects_garbage(rank: int) -> None:
    """gc.collect() with millions of objects."""
    objects = [[number] for number in range(500_000)] if rank == 0 else []
    for _ in for_a_while() if rank == 0 else ():
        gc.collect()
    del objects


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


class _Slow(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in for_a_while():
                self.wfile.write(bytes(4000))
                time.sleep(0.2)

    def log_message(self, *_: object) -> None:
        pass


@healthy
def downloads(rank: int) -> None:
    """A download at 20 kB/s."""
    if rank == 0:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/") as answer:
            answer.read()


@healthy
def reads_a_slow_pipe(rank: int) -> None:
    """Lines of a child process, one every second."""
    if rank == 0:
        command = f"for i in $(seq {HEALTHY_S:.0f}); do echo $i; sleep 1; done"
        process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE)
        assert process.stdout
        for _ in process.stdout:
            pass


@healthy
def begins_slowly(rank: int) -> None:
    """All ranks compute for long, as in a first batch."""
    x = torch.rand(900, 900)
    for _ in for_a_while():
        torch.linalg.svd(x)


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


def slowly() -> Any:
    """Return an iterator that takes a while, and no CPU."""
    return (time.sleep(0.7) for _ in for_a_while())


@healthy
def prints(rank: int) -> None:
    """A line now and then."""
    for _ in slowly() if rank == 0 else ():
        print("still here", flush=True)


@healthy
def writes_a_log(rank: int) -> None:
    """Lines in a file."""
    with tempfile.TemporaryFile("w", buffering=1) as log:
        for _ in slowly() if rank == 0 else ():
            log.write("still here\n")


@healthy
def draws_a_bar(rank: int) -> None:
    """A progress bar."""
    for done, _ in enumerate(slowly() if rank == 0 else ()):
        sys.stderr.write(f"\r{done} done")


@healthy
def receives_datagrams(rank: int) -> None:
    """UDP, a packet now and then."""
    if rank == 0:
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(("127.0.0.1", 0))
        code = f"import socket, time; s = socket.socket(2, 2); end = time.monotonic() + {HEALTHY_S}\n"
        code += f"while time.monotonic() < end: s.sendto(b'x', {receiver.getsockname()!r}); time.sleep(0.7)\n"
        code += f"s.sendto(b'end', {receiver.getsockname()!r})"
        with subprocess.Popen([sys.executable, "-c", code]):
            while receiver.recv(10) != b"end":
                pass


@healthy
def runs_short_processes(rank: int) -> None:
    """One short process after another, from Python and from the shell."""
    for number, _ in enumerate(slowly() if rank == 0 else ()):
        if number % 2:
            os.system("true")
        else:
            subprocess.run(["sleep", "0.3"], check=True)


@healthy
def computes_with_the_gil(rank: int) -> None:
    """Native code that computes, and lets no other thread run."""
    if rank == 0:
        for _ in for_a_while():
            sum(range(60_000_000))


@healthy
def was_stopped_and_then_computes(rank: int) -> None:
    """A rank that was stopped for 3 s, and then works for long, in functions that take their time."""
    if rank == 0:
        subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"])
        time.sleep(0.5)
        computes_in_python(rank)


# -- slow, and healthy: written later ----------------------------------------------------------------------------------


@healthy
def compiles(rank: int) -> None:
    """torch.compile() on one rank, without a cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    torch._inductor.config.force_disable_caches = True  # type: ignore[attr-defined]
    if rank == 0:
        layers = [[torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU()] for _ in range(10)]
        model = torch.compile(torch.nn.Sequential(*itertools.chain(*layers)))
        model(torch.ones(4, 64)).sum().backward()


@healthy
def validates_with_numpy(rank: int) -> None:
    """A validation with NumPy on rank 0."""
    scores = numpy.random.rand(2_000_000)
    for _ in for_a_while() if rank == 0 else ():
        numpy.argsort(scores)


def tokenize(text: str) -> int:
    return sum(len(re.findall(r"\w+|[^\w\s]", text)) for _ in range(20))


@healthy
def tokenizes_in_a_pool(rank: int) -> None:
    """Tokenization in a multiprocessing.Pool."""
    if rank == 0:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            for _ in for_a_while():
                pool.map(tokenize, ["The quick brown fox. " * 10_000] * 4)


@healthy
def reads_compressed_files(rank: int) -> None:
    """gzip files that are written and read."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in for_a_while() if rank == 0 else ():
            with gzip.open(f"{folder}/data.gz", "wb") as file:
                file.write(os.urandom(4 << 20) * 4)
            with gzip.open(f"{folder}/data.gz", "rb") as file:
                while file.read(1 << 20):
                    pass


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
def downloads_in_asyncio(rank: int) -> None:
    """A download of 4 kB every 3 s, with asyncio."""

    async def download() -> None:
        reader, _ = await asyncio.open_connection(*dripping_server(3.0))
        await reader.read()

    if rank == 0:
        asyncio.run(download())


@healthy
def saves_a_large_checkpoint(rank: int) -> None:
    """torch.save() of 800 MB and fsync() on rank 0."""
    if rank == 0:
        with tempfile.TemporaryFile() as file:
            torch.save(torch.rand(200_000_000), file)
            os.fsync(file.fileno())


@healthy
def writes_json(rank: int) -> None:
    """json.dumps() and pickle.dumps() of large objects, which keep the GIL."""
    if rank == 0:
        records = [{"id": number, "text": "word " * 10, "scores": [0.1 * number] * 5} for number in range(1_000_000)]
        json.dumps(records)
        json.dumps(records)
        pickle.dumps(records)


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


@healthy
def groups_a_table(rank: int) -> None:
    """A pandas groupby on rank 0."""
    if rank == 0:
        table = pandas.DataFrame({"key": numpy.random.randint(0, 50_000, 2_000_000), "x": numpy.random.rand(2_000_000)})
        for _ in for_a_while():
            table.groupby("key").x.agg(["mean", "std", "median"])


@healthy
def packs_in_a_child(rank: int) -> None:
    """tar and git in child processes."""
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(torch.__file__).parent
            for _ in for_a_while():
                subprocess.run(["tar", "czf", f"{folder}/t.tgz", "-C", str(source), "nn", "_dynamo"], check=True)
                subprocess.run(["git", "init", "-q", folder], check=True)
                subprocess.run(["git", "-C", folder, "add", "t.tgz"], check=True)


@healthy
def runs_many_short_processes(rank: int) -> None:
    """A shell script that starts one short process after another."""
    if rank == 0:
        end = f"end=$(($(date +%s) + {HEALTHY_S:.0f})); while [ $(date +%s) -lt $end ]; do"
        subprocess.run(["sh", "-c", f"{end} seq 20000 | gzip | wc -c > /dev/null; done"], check=True)


@healthy
def copies_in_a_child(rank: int) -> None:
    """dd with synchronous writes: a disk's work, and little of the CPU's."""
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            for _ in for_a_while():
                subprocess.run(
                    ["dd", "if=/dev/zero", f"of={folder}/copy", "bs=4k", "count=500", "oflag=dsync"],
                    check=True,
                    stderr=subprocess.DEVNULL,
                )


@healthy
def finds_a_learning_rate(rank: int) -> None:
    """A search for the learning rate on rank 0."""
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in for_a_while() if rank == 0 else ():
        model(torch.rand(32, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def spawns_data_loader_workers(rank: int) -> None:
    """DataLoader workers that are spawned, and import PyTorch, three times."""
    if rank == 0:
        for _ in range(3):
            for number, _ in enumerate(DataLoader(Images(compute), num_workers=2, multiprocessing_context="spawn")):
                if number == 1:
                    break


@healthy
def walks_a_tree(rank: int) -> None:
    """os.walk() of many files."""
    for _ in for_a_while() if rank == 0 else ():
        for folder, _, files in os.walk(Path(torch.__file__).parent):
            for file in files:
                os.stat(os.path.join(folder, file))


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
