"""The agent of a host: starts workers, relays their messages, and leaves nothing behind at the end. Runs in: agent.

It imports the standard library, distrain and psutil (for network interfaces) only; never the user's code, never torch.
It ends when its stdin ends, its parent dies, or the coordinator's lease expires.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.agent.forkserver_link import ForkServerLink
from distrain.agent.guard import beat, clear_cache, scheduler_signals, stand_guard
from distrain.agent.health_watch import HealthWatch
from distrain.agent.host_queries import HostQueries
from distrain.agent.host_setup import HostSetup
from distrain.agent.worker_pipes import WorkerPipes, WorkerRelay
from distrain.hosts.cgroup import OomKill
from distrain.hosts.claims import leave_claimed, share_claims
from distrain.hosts.cpu_topology import cpus_near
from distrain.hosts.host_info import hello_of, host_info, usable_cpus
from distrain.hosts.network import interface_variables, interfaces, machine_id, own_address
from distrain.hosts.shared_memory import BUS_ERROR, shared_memory_problem
from distrain.system import process, scratch
from distrain.system.loop import Loop
from distrain.transfer.order_link import OrderLink
from distrain.wire.channel import Channel
from distrain.worker.standstill import idle_seconds_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.agent.memory_keeper import MemoryKeeper
    from distrain.hosts.host import Gpu

_THREAD_S = 0.3
"""Seconds in which a worker that continues to run gets its GIL, unless native code holds it."""
STACKS_TIMEOUT_S = 1.0
"""Seconds to wait for the stacks of workers that continue to run, and to watch what they get done."""
_IDLE_S = 0.05
"""A worker that gets nothing done uses less of a CPU in that time."""
LAST_STACKS_TIMEOUT_S = 0.05
"""Seconds to wait for the stacks of workers before they are killed."""
STACKS_QUIET_S = 0.003
"""Seconds to wait for more after the stacks of all workers look complete."""
_STACKS_PAUSE_S = 0.1
"""Seconds that a worker may pause while it writes its stacks: on a busy machine it waits for a core."""
_OUTERMOST = (b" in <module>\n", b"  ...\n")
"""The end of the main thread's stack, which faulthandler writes last. Dots stand for frames beyond the first 100."""
WAKE_S = 0.3
"""Seconds after a signal until workers are woken that may not have noticed it."""
FORKSERVER_TIMEOUT_S = 1.0
"""Seconds that the forkserver may be silent after it was told to kill workers, before it is killed itself."""
_FIRST_LEASE_S = 60.0
"""Seconds that the coordinator may be silent before it has sent its lease."""
_LEASE_MARGIN_S = 0.01
_READ_BYTES = 64 << 10
_OPEN_FILES = 1 << 20
"""Files that this process may open, if the hard limit allows it: each worker takes five pipes."""


def main(arguments: list[str]) -> None:
    """Run an agent, or only kill the processes of a lost run.

    arguments: the run id; then ``gpus`` to count GPUs, ``no-gpus``, or ``sweep`` to kill the processes of the run and
    end. Ids of lost agents may follow: their processes are killed before this agent sends its HELLO.
    """
    run_id, option, *lost = arguments
    if option == "sweep":
        process.sweep(run_id)
        scratch.remove_abandoned()
        clear_cache()
        return
    share_claims()
    parent_fd, scratch_path = process.open_pidfd(os.getppid()), scratch.claim()
    beats_fd = stand_guard(parent_fd, scratch_path)
    for leftover in lost:
        process.sweep(leftover)
    Agent(run_id, option == "gpus", parent_fd, beats_fd, scratch_path).run()


@dataclass(eq=False)
class Agent:
    """The supervisor of one host. :meth:`run` returns when the host is empty."""

    run_id: str
    with_gpus: bool
    parent_fd: int
    beats_fd: int
    scratch_path: str | None

    def __post_init__(self) -> None:
        self._loop = Loop()
        self._guard = os.getppid()
        self._up = Channel(*process.private_stdio())
        self._prepared: wire.Prepare | None = None
        self._threads = 0
        """CPU threads of each worker; 0 as long as none may start: there is no job yet, or this agent rests."""
        self._cpus: dict[int, list[int]] = {}
        """The CPUs of each rank that is bound."""
        self._job_fd = -1
        self._uploader: OrderLink | None = None
        """Once it has orders."""
        self._attempt = -1
        self._workers: dict[int, WorkerPipes] = {}
        self._started = False
        self._stopping: wire.Stop | None = None
        """The latest order to end the attempt."""
        self._takes_last_stacks = False
        self._worked: dict[int, float] = {}
        """By rank that is watched: the CPU seconds that it had used when its stacks were asked for."""
        self._rests = False
        self._forkserver = ForkServerLink(self._loop, self._on_forkserver, self._on_forkserver_death)
        self._queries = HostQueries(self._loop, self._up.queue)
        self._setup = HostSetup(self._loop, self._up.queue)
        self._memory: MemoryKeeper | None = None
        """Once there are checkpoints in memory."""
        self._watch = HealthWatch(self._loop, self._up.queue)
        self._relay = WorkerRelay(self._loop, self._up, self._on_broken_pipe)

    # -- the program ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the coordinator until it ends, then empty the host."""
        process.adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._loop.on_signals({signal.SIGTERM, *scheduler_signals()}, self._on_signal)
        hello = self._hello()
        self._up.queue(wire.MAGIC + wire.encode(hello))
        if hello.host["gpus"] and (problem := hello.host["driver_problem"]):
            self._notify(problem)
        self._up.attach(self._loop, self._on_frames)
        for fd in (self.parent_fd, process.open_pidfd(self._guard)):
            if fd >= 0:
                self._loop.on_readable(fd, self._loop.stop)
        process.raise_fd_limit(0, _OPEN_FILES)
        self._beat()
        try:
            self._loop.run()
        finally:
            self._leave()

    def _on_signal(self, number: int) -> None:
        if number in scheduler_signals():
            self._up.queue(wire.HostSignalled(signal=signal.Signals(number).name))
        else:
            self._loop.stop()

    def _hello(self) -> wire.Hello:
        info = leave_claimed(host_info(with_gpus=self.with_gpus))
        self._queries.gpus = info.gpus or ()
        return hello_of(
            replace(info, network=machine_id("net"), address=own_address()),
            interfaces=interfaces(),
            executable=sys.executable,
            package=str(process.own_package()),
        )

    def _fail(self, text: str) -> None:
        self._up.queue(wire.HostFailed(text=text))

    def _notify(self, text: str) -> None:
        self._up.queue(wire.Notice(text=text))

    @property
    def _is_local(self) -> bool:
        """True if the coordinator is known to run on this machine."""
        return self._prepared is not None and self._prepared.is_local

    def _beat(self) -> None:
        """Send signs of life to the coordinator and the guard, and check those of the coordinator and the forkserver.

        Each sign of life of the coordinator is answered at once, so that few timers wake this process.
        A coordinator on this machine may be silent, as it is after Ctrl-Z: its death is noticed by its pidfd.
        """
        lease_s = self._prepared.lease_s if self._prepared else _FIRST_LEASE_S
        silence_s = 0.0 if self._is_local else self._loop.silence_s(self._up.heard_at)
        if silence_s > lease_s:
            text = f"the coordinator was silent for {silence_s:.0f} s (lease: {lease_s:g} s): stopping the workers"
            self._up.queue(wire.HostFailed(text=text, leaves=True))
            self._loop.stop()
            return
        if not self._rests:  # nobody reads
            self._up.queue(wire.Ping())
        beat(self.beats_fd, lease_s)
        self._check_forkserver(lease_s)
        self._loop.call_in("beat", min(lease_s / 2, lease_s - silence_s + _LEASE_MARGIN_S), self._beat)

    def _leave(self) -> None:
        is_tidy = all(worker.exited for worker in self._workers.values() if worker.spawned)
        if is_tidy:
            self._forkserver.kill()
        else:
            self._forkserver.leave()
        process.end_descendants()
        if not is_tidy or self._setup.has_files:  # processes may have left the tree; stream servers never were in it
            # On the coordinator's machine, those of the whole run. Another host may be the same machine as a third one,
            # whose processes must live: there, only those with the id of this host.
            process.sweep(self.run_id if self._is_local else process.own_run_id())
        scratch.remove(self.scratch_path)
        self._setup.end()
        self._queries.release_port()
        self._up.flush()
        if self.beats_fd >= 0 and os.getppid() == self._guard:
            process.kill(self._guard, signal.SIGCONT)  # a guard that was stopped continues, and ends with this agent

    # -- the coordinator's messages -------------------------------------------------------------------------------

    def _on_frames(self, frames: list[wire.Frame]) -> None:
        if not frames:
            self._loop.stop()
        for frame in frames:
            if issubclass(wire.MESSAGES.get(frame.kind, wire.Message), wire.ToWorker):
                self._pass_down(frame)
            else:
                self._on_message(frame.message())

    def _on_message(self, message: wire.Message) -> None:
        match message:
            case wire.Ping() if self._rests:  # another run begins
                self._rests = False
                self._loop.cancel("rest")
                self._up.queue(self._hello())
            case wire.Ping():
                self._beat()
            case wire.SetUpHost():
                self._setup.begin(message)
            case wire.DeleteCheckpoints(directories=folders):
                self._setup.delete_checkpoints(folders)
            case wire.ToMemory() | wire.Upload(directory=""):
                self._keep(message)
            case wire.Prepare():
                self._prepare(self._setup.prepare(message))
            case wire.ProbeHost():
                self._queries.probe(self._setup.probe(message))
            case wire.ReservePort():
                self._queries.reserve(message)
            case wire.Start():
                self._queries.look_up(interface_variables, message.rendezvous, partial(self._try_to_start, message))
            case wire.Stop():
                self._stop(message)
            case wire.TakeStacks() if message.attempt == self._attempt and not self._stopping:
                self._ask_for_stacks(_THREAD_S)
                watched = self._processes() if message.watches else {}
                self._worked = {rank: idle_seconds_of(pid) for rank, pid in watched.items()}
                self._loop.call_in("stacks", STACKS_TIMEOUT_S, self._send_stacks)
            case wire.OpenStorage():
                self._order(message)
            case wire.Upload() if message.attempt >= self._attempt:  # this host may know an earlier one
                self._order(message)
            case wire.Close() if message.rests_s and self._forkserver.ready and not self._started:
                self._rest(message)
            case wire.Close():
                self._loop.stop()

    def _prepare(self, message: wire.Prepare) -> None:
        self._prepared = replace(message, body=b"")
        self._threads = max(1, usable_cpus() // max(1, message.workers))
        self._keep_job(message.body)
        if not self._forkserver.renew(self._prepared):
            self._start_forkserver()
        self._beat()
        if not process.sees_pids():
            text = "/proc belongs to another PID namespace, so processes that a worker starts can outlive it"
            self._notify(f"{text}; mount /proc in the container (unshare --mount-proc)")

    def _keep_job(self, body: bytes) -> None:
        """Keep a pickled job, in place of the former one, in a file that all workers can read."""
        if self._job_fd >= 0:
            os.close(self._job_fd)
        self._job_fd = os.memfd_create("distrain-job")
        with open(self._job_fd, "wb", closefd=False) as file:
            file.write(body)

    def _order(self, message: wire.OpenStorage | wire.Upload) -> None:
        if self._uploader is None:
            assert self._prepared is not None
            self._uploader = OrderLink(
                self._loop,
                self._up.queue,
                "uploader",
                flags=self._prepared.python_flags,
                environment=self._prepared.environment,
            )
        self._uploader.order(message, self._up.queue)

    def _keep(self, message: wire.ToMemory | wire.Upload) -> None:
        if self._memory is None:
            from distrain.agent.memory_keeper import MemoryKeeper

            self._memory = MemoryKeeper(self._loop, self._up.queue, scratch.memory_directory(self.scratch_path))
            self._memory.start(self._attempt, self._workers)
        self._memory.handle(message)

    def _pass_down(self, frame: wire.Frame) -> None:
        worker = self._workers.get(frame.header["rank"])
        if worker is not None and frame.header["attempt"] == self._attempt and not worker.exited:
            worker.channel.queue(frame.raw)

    # -- the forkserver -------------------------------------------------------------------------------------------

    def _start_forkserver(self) -> None:
        """Start a forkserver, and end the former one, which has no workers."""
        assert self._prepared is not None
        try:
            self._forkserver.start(self._prepared, self._threads)
        except OSError as error:
            self._fail(_why_no_forkserver(error, self._prepared.directory))

    def _check_forkserver(self, lease_s: float) -> None:
        """Kill a forkserver that was stopped: it would neither start workers nor report their deaths."""
        if not self._forkserver.ready:  # it is silent while it imports
            return
        silence_s = self._loop.silence_s(self._forkserver.heard_at)
        if silence_s > lease_s:
            self._notify(f"the forkserver was silent for {silence_s:.0f} s and is killed: was it stopped (SIGSTOP)?")
            self._forkserver.kill()
        elif silence_s > lease_s / 2:
            self._forkserver.send({"kind": "ping"})

    def _on_forkserver(self, packet: dict[str, Any]) -> None:
        match packet["kind"]:
            case "ready":
                if packet["reason"] is not None:
                    self._notify(
                        f"workers start as new interpreters, not as forks, which takes longer: {packet['reason']}. "
                        'ScalingConfig(start_method="spawn") hides this line'
                    )
                self._spawn_waiting()
            case "stale":
                if not (self._started and self._stopping):  # else it was killed
                    self._start_forkserver()
            case "spawned":
                self._workers[packet["rank"]].pid = packet["pid"]
            case "failed":
                self._end_worker(self._workers[packet["rank"]], lost=packet["text"])
            case "exited":
                self._on_exit(self._workers[packet["rank"]], packet)
            case "swept":
                if packet["stuck"]:
                    self._notify(f"these processes cannot be killed: {packet['stuck']}")
                self._send_idle()

    def _kill_descendants(self) -> None:
        """Kill what the workers have left. The forkserver and the uploader stay for the next attempt."""
        pids = [program.pid for program in (self._forkserver, self._uploader) if program is not None]
        trackers = process.kill_descendants([pid for pid in pids if pid is not None]).trackers
        if trackers:  # of workers whose forkserver has died
            self._loop.call_in("trackers", process.TRACKERS_S, partial(process.kill_trackers, trackers))

    def _on_forkserver_death(self, status: int) -> None:
        """Report the death of workers that died with the forkserver, and kill those that this process has adopted."""
        self._kill_descendants()
        if self._forkserver.is_renewing and not self._stopping:
            self._start_forkserver()
            return
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        for worker in self._workers.values():
            if not worker.exited:
                self._relay.drain(worker)
                text = f"the forkserver, its parent, has died ({how})"
                self._end_worker(worker, lost=text, by_us=self._stopping is not None)
        if self._started:
            self._send_idle()
        elif self._threads and not self._stopping and self._attempt < 0:  # later, an attempt starts one
            self._fail(f"the forkserver has died before the first worker ({how})")

    # -- between two runs -----------------------------------------------------------------------------------------

    def _rest(self, order: wire.Close) -> None:
        """Keep nothing of the run but the forkserver. No worker must be left."""
        self._forget_workers()
        if self._uploader is not None:
            self._uploader.close()
            self._uploader = None
        self._kill_descendants()
        scratch.clear(self.scratch_path)
        if self._memory is not None:
            self._memory.end()
            self._memory = None
        self._loop.cancel("stacks")
        self._keep_job(b"")
        self._attempt, self._stopping = -1, None
        self._rests, self._threads = True, 0
        self._loop.call_in("rest", order.rests_s, self._loop.stop)
        self._up.queue(order)

    # -- an attempt -----------------------------------------------------------------------------------------------

    def _forget_workers(self) -> None:
        self._watch.end()
        self._relay.clear()
        for worker in self._workers.values():
            worker.close(self._loop)
        self._workers = {}
        self._started = False

    def _try_to_start(self, message: wire.Start, network: Mapping[str, str] | None) -> None:
        if message.attempt <= self._attempt or not self._threads:  # it was stopped meanwhile, or cannot start any
            return
        try:
            self._start(message, network or {})
        except OSError as error:
            self._fail(f"cannot start {len(message.ranks)} workers: {error}{_LIMITS.get(error.errno or 0, '')}")
            self._forget_workers()  # none was started yet

    def _start(self, message: wire.Start, network: Mapping[str, str]) -> None:
        self._forget_workers()
        if self._uploader is None or self._uploader.is_idle:
            scratch.clear(self.scratch_path)  # of files that workers of the last attempt have left
        self._attempt = message.attempt
        if self._memory is not None:
            self._memory.start(message.attempt, [fields["rank"] for fields in message.ranks])
        self._started, self._stopping, self._takes_last_stacks = True, None, False
        for fields in message.ranks:
            spec = self._setup.worker(wire.WorkerSpec(**fields))
            spec = replace(spec, defaults={**network, **spec.defaults})
            worker = self._workers[spec.rank] = WorkerPipes(message.attempt, spec.rank)
            self._relay.add(worker)
            self._loop.on_readable(worker.stacks_fd, partial(self._read_stacks, worker))
            worker.channel.queue(spec)
        gpus = {fields["rank"]: self._gpus_of(fields["context"]["devices"]) for fields in message.ranks}
        assert self._prepared is not None
        self._cpus = {
            rank: cpus_near(near[0].pci) for rank, near in gpus.items() if self._prepared.binds_to_cpus and near
        }
        if self._forkserver.pid is None:
            self._forkserver.start(self._prepared, self._threads)
        self._spawn_waiting()
        self._watch.begin(message.attempt, message.ranks[0]["vitals_s"], self._processes, gpus)

    def _gpus_of(self, devices: Sequence[int]) -> list[Gpu]:
        """Return the GPUs of a rank, but no MIG instance. ``devices``: their numbers for CUDA."""
        gpus = self._queries.gpus
        return [gpus[number] for number in devices if number < len(gpus) and not gpus[number].is_mig]

    def _processes(self) -> dict[int, int]:
        return {worker.rank: worker.pid for worker in self._living() if worker.pid}

    def _spawn_waiting(self) -> None:
        if not (self._forkserver.ready and self._threads):
            return
        for worker in self._workers.values():
            if not worker.spawned and not worker.exited:
                order = {"kind": "spawn", "rank": worker.rank, "cpus": self._cpus.get(worker.rank)}
                try:
                    self._forkserver.send(order, (*worker.child_fds, self._job_fd))
                    worker.spawned = True
                except OSError as error:  # of descriptors on their way, a user may have no more than files
                    text = f"cannot start rank {worker.rank}: {error}{_LIMITS.get(error.errno or 0, '')}"
                    self._fail(text)
                    self._end_worker(worker, lost=text)
                worker.close_child_fds()

    def _on_broken_pipe(self, worker: WorkerPipes) -> None:
        self._signal(signal.SIGKILL, [worker])
        text = f"its code wrote to distrain's pipe; close only files that you opened: {worker.channel.broken}"
        self._end_worker(worker, lost=text)

    def _on_exit(self, worker: WorkerPipes, packet: dict[str, Any]) -> None:
        if worker.exited:
            return
        self._relay.drain(worker)
        code, peak = os.waitstatus_to_exitcode(packet["status"]), packet["max_rss_bytes"]
        oom = OomKill(*packet["oom"]) if packet["oom"] else None
        memory = "" if oom is None else self._watch.memory.in_words(worker.rank, peak, oom)
        if code == -signal.SIGBUS:
            memory = shared_memory_problem(BUS_ERROR) or ""
        self._end_worker(
            worker,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            by_us=packet["by_us"],
            max_rss_bytes=peak,
            oom=None if oom is None else bool(oom.limit_bytes),
            memory=memory,
        )

    def _end_worker(self, worker: WorkerPipes, **fields: Any) -> None:
        worker.exited = True
        self._relay.remove(worker)
        self._up.queue(wire.Exited(attempt=self._attempt, rank=worker.rank, **fields))
        if all(other.exited for other in self._workers.values()):
            self._empty_host()

    def _empty_host(self) -> None:
        self._loop.cancel("kill")
        self._loop.cancel("wake")
        if self._forkserver.ready:
            self._forkserver.send({"kind": "sweep"})
        else:
            self._send_idle()

    def _send_idle(self) -> None:
        """Report that no process of the attempt is left, once that is so."""
        if not all(worker.exited for worker in self._workers.values()):
            return
        self._kill_descendants()
        self._loop.cancel("kill")
        self._watch.end()
        self._queries.release_port()
        self._started = False
        self._up.queue(wire.HostIdle(attempt=self._attempt))

    # -- stopping -------------------------------------------------------------------------------------------------

    def _stop(self, message: wire.Stop) -> None:
        """End the attempt: a signal, grace, stacks, SIGTERM, grace, SIGKILL. Each step takes a limited time."""
        self._stopping = message
        if not self._started:
            self._attempt = max(self._attempt, message.attempt)
            self._up.queue(wire.HostIdle(attempt=message.attempt))
        elif not self._forkserver.ready:
            self._forkserver.kill()
        elif message.grace_s > 0:
            self._pass_on(signal.Signals[message.signal])
            self._loop.call_in("kill", message.grace_s, self._take_last_stacks)
        else:
            self._take_last_stacks()

    def _pass_on(self, number: int) -> None:
        """Signal the workers: by SIGTERM those that have no handler for ``number``.

        Those that have none for SIGTERM, either, are unwound, unless they ignore it.
        """
        for worker in self._living():
            best, handled = number, process.handled_signals(worker.pid) if worker.pid else ((), ())
            if handled is not None and number not in handled[0]:
                caught, ignored = handled
                has_default = signal.SIGTERM not in caught and signal.SIGTERM not in ignored
                is_ready = process.UNWIND_SIGNAL in caught
                best = process.UNWIND_SIGNAL if has_default and is_ready else signal.SIGTERM
            self._signal(best, [worker])
        self._loop.call_in("wake", WAKE_S, self._wake)

    def _wake(self) -> None:
        self._signal(process.WAKE_SIGNAL, self._living())

    def _living(self) -> list[WorkerPipes]:
        return [worker for worker in self._workers.values() if worker.spawned and not worker.exited]

    def _signal(self, number: int, workers: list[WorkerPipes]) -> None:
        if workers:
            ranks = [worker.rank for worker in workers]
            self._forkserver.send({"kind": "signal", "ranks": ranks, "number": number})

    def _take_last_stacks(self) -> None:
        self._loop.cancel("stacks")
        self._takes_last_stacks = True
        self._ask_for_stacks(LAST_STACKS_TIMEOUT_S / 2)
        self._loop.call_in("kill", LAST_STACKS_TIMEOUT_S, self._end_workers)

    def _ask_for_stacks(self, patience_s: float) -> None:
        """Ask a thread of each worker. Signal those where it does not answer, as native code holds the GIL."""
        for worker in self._workers.values():
            worker.stacks = b""
        for worker in self._living():
            with contextlib.suppress(OSError):  # it has just ended, or has not answered for very long
                os.write(worker.stacks_fd, b"?")
        self._loop.call_in("signal", patience_s, self._interrupt_for_stacks)

    def _interrupt_for_stacks(self) -> None:
        self._signal(process.STACKS_SIGNAL, [worker for worker in self._living() if not worker.stacks])

    def _send_stacks(self) -> None:
        living = self._living()
        for worker in living:
            if worker.stacks:
                dump = wire.Dump(attempt=self._attempt, rank=worker.rank, what="stacks", body=worker.stacks)
                self._up.queue(dump)
        silent = [worker.rank for worker in living if not worker.stacks]
        watched = {worker.rank: worker.pid for worker in living if worker.rank in self._worked}
        idle = [rank for rank, pid in watched.items() if idle_seconds_of(pid) - self._worked[rank] < _IDLE_S]
        self._worked = {}
        self._up.queue(wire.StacksDone(attempt=self._attempt, silent=silent, idle=idle))

    def _read_stacks(self, worker: WorkerPipes) -> None:
        try:
            data = os.read(worker.stacks_fd, _READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it has ended without reading a request
            data = b""
        worker.stacks += data
        if not data:
            self._loop.forget(worker.stacks_fd)
        if not data or not all(other.stacks for other in self._living()):
            return
        is_complete = all(other.stacks.endswith(_OUTERMOST) for other in self._living())
        if self._stopping is None and not self._worked:
            self._loop.call_in("stacks", STACKS_QUIET_S if is_complete else _STACKS_PAUSE_S, self._send_stacks)
        elif self._stopping and self._takes_last_stacks and self._stopping.culprit_known and is_complete:
            self._loop.call_in("kill", STACKS_QUIET_S, self._end_workers)

    def _end_workers(self) -> None:
        """Send the stacks. Kill the workers: at once, or a while after SIGTERM, which kills those without a handler."""
        self._takes_last_stacks = False
        self._send_stacks()
        assert self._stopping is not None
        if self._stopping.last_grace_s > 0:
            self._signal(signal.SIGTERM, [worker for worker in self._living() if not worker.is_exiting])
            self._loop.call_in("wake", WAKE_S, self._wake)
            self._loop.call_in("kill", self._stopping.last_grace_s, self._kill_workers)
        else:
            self._kill_workers()

    def _kill_workers(self) -> None:
        """Kill the workers; those in their exit handlers after their grace."""
        stop, living = self._stopping, self._living()
        exiting = [worker for worker in living if worker.is_exiting and stop and stop.exit_grace_s > stop.last_grace_s]
        self._signal(signal.SIGKILL, [worker for worker in living if worker not in exiting])
        if stop and exiting:
            self._stopping = replace(stop, exit_grace_s=0.0)
            self._loop.call_in("kill", stop.exit_grace_s - stop.last_grace_s, self._kill_workers)
        else:
            self._await_deaths()

    def _await_deaths(self) -> None:
        """Wait for the forkserver, which reports the deaths, as long as it answers: large memory takes time to free.

        The coordinator limits how long it waits for the host.
        """
        if self._forkserver.pid is None:
            return
        asked_at = time.monotonic()
        self._forkserver.send({"kind": "ping"})

        def judge() -> None:
            if self._forkserver.heard_at >= asked_at:
                self._await_deaths()
            else:
                self._forkserver.kill()

        self._loop.call_in("kill", FORKSERVER_TIMEOUT_S, judge)


_LIMITS = {
    errno.EMFILE: "; raise the limit on open files with ulimit -n",
    errno.ENFILE: "; all files that the host may have open are open: raise sysctl fs.file-max",
    errno.EAGAIN: "; raise the limit on processes: ulimit -u, or pids.max of the cgroup",
    errno.ENOMEM: "; free memory, or start fewer workers on it",
}
"""Cures by the errno of an OSError at the start of a process."""


def _why_no_forkserver(error: OSError, directory: str) -> str:
    if error.filename == directory:  # not, say, the interpreter
        create = "create it, or " if isinstance(error, FileNotFoundError) else ""
        return f"no worker can run in {directory}: {error.strerror}; {create}set cwd="
    return f"cannot start the forkserver, the parent of its workers: {error}{_LIMITS.get(error.errno or 0, '')}"
