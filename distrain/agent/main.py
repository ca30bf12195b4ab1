"""One per host: reserves ports, has workers started, passes their frames on unopened, and empties the host at the end.

Runs in: agent. Stdlib and distrain only, psutil when something has to be hunted down; never the user's code, never
torch. It lives as long as its wire: when stdin ends, the parent dies or the lease runs out, it leaves nothing
behind and goes.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import signal
import tempfile
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

from distrain import wire
from distrain.agent.forkserver_link import ForkServerLink
from distrain.agent.guard import beat, stand_guard
from distrain.hosts.host_info import host_info
from distrain.hosts.inspection import Inspector
from distrain.hosts.network import address_toward, interface_variables, network_id, ssh_address
from distrain.hosts.ports import reserve_port
from distrain.hosts.reachability import ReachabilityProbe
from distrain.storage.uploader_link import UploaderLink
from distrain.system import process, scratch
from distrain.system.background import Background
from distrain.system.loop import Loop
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

_T = TypeVar("_T")

PING_INTERVAL_S = 5.0
STACKS_TIMEOUT_S = 0.05
STACKS_QUIET_S = 0.003
STACKS_PATIENCE_S = 1.0
"""How long a worker may take to answer when nobody is in a hurry."""
FORKSERVER_PATIENCE_S = 1.0
"""After a SIGKILL to all workers: if they are still there by then, the forkserver does not answer and goes too."""
_LEASE_MARGIN_S = 0.01
_MOST_QUEUED = 4 << 20
_LEAST_QUEUED = 1 << 20
_PACKET_BYTES = 64 << 10
_PIPE_BYTES = 1 << 20


def main(arguments: list[str]) -> None:
    """``arguments``: the run id and an option: ``gpus`` counts them, ``sweep`` only removes what a lost run left. An id
    that all processes of a lost agent have may follow: they are to end before this one says HELLO.
    """
    run_id, option, *lost = arguments
    if option == "sweep":
        process.sweep(run_id)
        scratch.remove_abandoned()
        return
    coordinator_fd, scratch_path = process.open_pidfd(os.getppid()), scratch.claim()
    beats_fd = stand_guard(coordinator_fd, scratch_path)
    for leftover in lost:
        process.sweep(leftover)
    Agent(
        run_id,
        with_gpus=option == "gpus",
        coordinator_fd=coordinator_fd,
        beats_fd=beats_fd,
        scratch_path=scratch_path,
    ).run()


class _Worker:
    """The agent's side of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        stacks_read, stacks_write = os.pipe()
        self.channel = Channel(up_read, down_write)
        self.outputs = {1: out_read, 2: err_read}
        self.stacks_fd = stacks_read
        self.stacks = b""
        self.child_fds: tuple[int, ...] = (down_read, up_write, out_write, err_write, stacks_write)
        self.spawned = False
        self.exited = False
        for fd in (out_read, err_read, stacks_read):
            os.set_blocking(fd, False)

    def close_child_fds(self) -> None:
        for fd in self.child_fds:
            os.close(fd)
        self.child_fds = ()

    def close(self, loop: Loop) -> None:
        self.close_child_fds()
        self.channel.close()
        for fd in (*self.outputs.values(), self.stacks_fd):
            loop.forget(fd)
            os.close(fd)


class Agent:
    """See the module. ``run`` returns when the host is empty and the wire is closed."""

    def __init__(
        self, run_id: str, *, with_gpus: bool, coordinator_fd: int, beats_fd: int, scratch_path: str | None
    ) -> None:
        self._run_id = run_id
        self._with_gpus = with_gpus
        self._loop = Loop()
        self._coordinator_fd = coordinator_fd
        self._beats_fd = beats_fd
        self._scratch_path = scratch_path
        self._guard = os.getppid()
        self._up = Channel(*process.private_stdio())
        self._prepared: wire.Prepare | None = None
        self._job_fd = -1
        self._forkserver: ForkServerLink | None = None
        self._uploader: UploaderLink | None = None
        self._attempt = -1
        self._workers: dict[int, _Worker] = {}
        self._started = False
        self._stopping = False
        self._culprit_known = True
        self._reserved: list[socket.socket] = []
        self._resolver = Background(self._loop, "resolver")
        self._inspector = Inspector(self._loop, self._up.queue)
        self._neighbours = ReachabilityProbe(self._loop, self._resolver, self._up.queue)
        self._reading_paused = False
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)

    # -- the program ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        process.adopt_orphans()
        most = self._open_files[1]  # a worker takes five pipes; its own limit stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._loop.on_signals((signal.SIGTERM,), lambda number: self._loop.stop())
        self._greet()
        self._up.attach(self._loop, self._on_frames)
        self._up.on_drained = self._resume_workers
        for fd in (self._coordinator_fd, process.open_pidfd(self._guard)):
            if fd >= 0:
                self._loop.on_readable(fd, self._loop.stop)
        self._beat()
        try:
            self._loop.run()
        finally:
            self._leave()

    def _greet(self) -> None:
        facts = host_info(with_gpus=self._with_gpus)
        hello = wire.Hello(
            wire=wire.WIRE_VERSION,
            distrain=wire.DISTRAIN_VERSION,
            python=platform.python_version(),
            run_id=self._run_id,
            hostname=facts.name,
            pid=os.getpid(),
            cpus=facts.cpus,
            memory_bytes=facts.memory_bytes,
            gpus=None if facts.gpus is None else [asdict(gpu) for gpu in facts.gpus],
            driver_problem=facts.driver_problem,
            network=network_id(),
            address=ssh_address(),
        )
        self._up.queue(wire.MAGIC + wire.encode(hello))

    def _beat(self) -> None:
        """Tell that we live, and check that the coordinator does."""
        lease_s = self._prepared.lease_s if self._prepared else 60.0
        is_local = self._prepared is not None and self._prepared.is_local  # its death is seen, and its Ctrl-Z no death
        silence_s = 0.0 if is_local else self._loop.silence_s(self._up.heard_at)
        if silence_s > lease_s:
            text = f"the coordinator was silent for {silence_s:.0f} s, its lease is {lease_s:g} s: the host is emptied"
            self._up.queue(wire.HostFailed(text=text, leaves=True))
            self._loop.stop()
            return
        self._up.queue(wire.Ping())
        beat(self._beats_fd, lease_s)
        self._check_forkserver(lease_s)
        self._loop.call_in("beat", min(PING_INTERVAL_S, lease_s / 3, lease_s - silence_s + _LEASE_MARGIN_S), self._beat)

    def _leave(self) -> None:
        is_tidy = all(worker.exited for worker in self._workers.values() if worker.spawned)
        if self._forkserver is not None and is_tidy:
            self._forkserver.kill()
        elif self._forkserver is not None:
            self._forkserver.leave()
        process.kill_descendants()
        if not is_tidy:
            process.sweep(self._swept_id)  # look for what may have slipped away
        scratch.remove(self._scratch_path)
        self._close_ports()
        self._up.flush()
        if self._beats_fd >= 0 and os.getppid() == self._guard:
            process.kill(self._guard, signal.SIGCONT)  # it ends with us, also if it was stopped

    @property
    def _swept_id(self) -> str:
        """Beside the coordinator, of the run: what it had has to end, too. Elsewhere of this host alone: others may be
        the same machine, and go on.
        """
        is_local = self._prepared is not None and self._prepared.is_local
        return self._run_id if is_local else process.own_run_id()

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
            case wire.Prepare():
                self._forget_forkserver()
                self._prepared = replace(message, body=b"")
                self._job_fd = _keep_in_memory(message.body)
                try:
                    self._start_forkserver()
                except OSError as error:
                    self._up.queue(wire.HostFailed(text=_why_no_forkserver(error, message.directory)))
                self._beat()
                if not process.sees_pids():
                    text = "/proc is that of another PID namespace: what a worker starts can survive it here"
                    self._up.queue(wire.Notice(text=f"{text}; mount /proc in the container (unshare --mount-proc)"))
            case wire.ReservePorts():
                self._reserve(message)
            case wire.Start():
                self._look_up(interface_variables, message.rendezvous, lambda found: self._try_to_start(message, found))
            case wire.Stop():
                self._stop(message)
            case wire.TakeStacks() if message.attempt == self._attempt and not self._stopping:
                self._ask_for_stacks()
                self._loop.call_in("stacks", STACKS_PATIENCE_S, self._send_stacks)
            case wire.OpenStorage():
                self._order(message)
            case wire.Upload() if message.attempt == self._attempt:
                self._order(message)
            case wire.InspectHost():
                self._inspector.inspect(message)
            case wire.OpenProbePort():
                self._neighbours.listen(message)
            case wire.ProbePeers():
                self._neighbours.reach(message)
            case wire.Close():
                self._loop.stop()

    def _order(self, message: wire.OpenStorage | wire.Upload) -> None:
        if self._uploader is None:
            assert self._prepared is not None
            flags, environment = self._prepared.python_flags, self._prepared.environment
            self._uploader = UploaderLink(self._loop, self._up.queue, flags=flags, environment=environment)
        self._uploader.order(message)

    def _pass_down(self, frame: wire.Frame) -> None:
        worker = self._workers.get(frame.header["rank"])
        if worker is not None and frame.header["attempt"] == self._attempt and not worker.exited:
            worker.channel.queue(frame.raw)

    def _reserve(self, message: wire.ReservePorts) -> None:
        self._close_ports()
        try:
            self._reserved = [reserve_port() for _ in range(message.ports)]
        except OSError as error:
            self._up.queue(wire.HostFailed(text=f"cannot reserve {message.ports} ports: {error}"))
            return
        ports = [sock.getsockname()[1] for sock in self._reserved]

        def answer(address: str | None) -> None:
            self._up.queue(wire.PortsReserved(attempt=message.attempt, ports=ports, address=address or ""))

        self._look_up(address_toward, message.peer, answer)

    def _look_up(self, look_up: Callable[[str], _T], peer: str, then: Callable[[_T | None], None]) -> None:
        """Call ``then`` with what is found about ``peer``, or at once with None if that is empty. A name server may
        take long, and the coordinator must not think that this host has died.
        """

        def failed(error: OSError) -> None:
            self._up.queue(wire.HostFailed(text=f"finds no way to the other hosts ({peer}): {error}"))

        if peer:
            self._resolver.do(lambda: look_up(peer), then, failed)
        else:
            then(None)

    def _close_ports(self) -> None:
        for sock in self._reserved:
            sock.close()
        self._reserved = []

    # -- the forkserver -------------------------------------------------------------------------------------------

    def _start_forkserver(self) -> None:
        assert self._prepared is not None
        self._forkserver = ForkServerLink(self._loop, self._prepared, self._job_fd, self._open_files)
        self._forkserver.on_packet = self._on_forkserver
        self._forkserver.on_death = self._on_forkserver_death

    def _check_forkserver(self, lease_s: float) -> None:
        """One that was stopped would neither start workers nor tell of their deaths. While it imports it is silent."""
        if self._forkserver is None or not self._forkserver.ready:
            return
        silence_s = self._loop.silence_s(self._forkserver.heard_at)
        if silence_s > lease_s:
            text = f"the forkserver has been silent for {silence_s:.0f} s and is killed: was it stopped (SIGSTOP)?"
            self._up.queue(wire.Notice(text=text))
            self._forkserver.kill()
        else:
            self._forkserver.send({"kind": "ping"})

    def _forget_forkserver(self) -> None:
        """It has no workers, and was prepared for another number of them."""
        if self._forkserver is not None:
            self._forkserver.dismiss()
            self._forkserver = None
        if self._job_fd >= 0:
            os.close(self._job_fd)

    def _on_forkserver(self, packet: dict[str, Any]) -> None:
        match packet["kind"]:
            case "ready":
                if packet["reason"] is not None:
                    text = (
                        f"workers are fresh interpreters, not forks, which takes longer: {packet['reason']}. "
                        'ScalingConfig(start_method="spawn") chooses that without this line'
                    )
                    self._up.queue(wire.Notice(text=text))
                self._spawn_waiting()
            case "spawned":
                self._up.queue(wire.Spawned(attempt=self._attempt, rank=packet["rank"], pid=packet["pid"]))
            case "failed":
                self._end_worker(self._workers[packet["rank"]], lost=packet["text"])
            case "exited":
                self._on_exit(self._workers[packet["rank"]], packet)
            case "swept":
                if packet["stuck"]:
                    self._up.queue(wire.Notice(text=f"these processes cannot be killed: {packet['stuck']}"))
                self._say_gone()

    def _kill_descendants(self) -> None:
        """Of an attempt: the forkserver is for the next one, too, and the uploader may be bringing a checkpoint."""
        programs = (self._forkserver, self._uploader)
        pids = [program.pid for program in programs if program is not None]
        process.kill_descendants([pid for pid in pids if pid is not None])

    def _on_forkserver_death(self, status: int) -> None:
        """Its children died with it, or are ours now."""
        self._forkserver = None
        unexpected = not self._started and not self._stopping
        self._kill_descendants()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        for worker in self._workers.values():
            if not worker.exited:
                self._drain(worker)
                self._end_worker(worker, lost=f"the forkserver, its parent, has died ({how})", by_us=self._stopping)
        if self._started:
            self._say_gone()
        elif unexpected:
            self._up.queue(wire.HostFailed(text=f"the forkserver has died before the first worker ({how})"))

    # -- an attempt -----------------------------------------------------------------------------------------------

    def _forget_workers(self) -> None:
        for worker in self._workers.values():
            worker.close(self._loop)
        self._workers = {}
        self._started = False

    def _try_to_start(self, message: wire.Start, network: Mapping[str, str] | None) -> None:
        if message.attempt <= self._attempt:  # it was stopped meanwhile
            return
        try:
            self._start(message, network or {})
        except OSError as error:
            text = f"cannot start {len(message.ranks)} workers: {error}{_LIMITS.get(error.errno or 0, '')}"
            self._up.queue(wire.HostFailed(text=text))
            self._forget_workers()  # none was started yet

    def _start(self, message: wire.Start, network: Mapping[str, str]) -> None:
        self._forget_workers()
        if self._uploader is None or self._uploader.is_idle:
            scratch.clear(self._scratch_path)  # of what the workers of the last attempt have left
        self._attempt = message.attempt
        self._started, self._stopping = True, False
        for fields in message.ranks:
            spec = wire.WorkerSpec(**fields)
            spec = replace(spec, defaults={**network, **spec.defaults})
            worker = self._workers[spec.rank] = _Worker(spec.rank)
            worker.channel.attach(self._loop, self._forwarder(worker))
            for stream in worker.outputs:
                self._watch_output(worker, stream)
            self._loop.on_readable(worker.stacks_fd, self._stacks_reader(worker))
            worker.channel.queue(spec)
        if self._forkserver is None:
            self._start_forkserver()
        self._spawn_waiting()

    def _spawn_waiting(self) -> None:
        if self._forkserver is None or not self._forkserver.ready:
            return
        for worker in self._workers.values():
            if not worker.spawned and not worker.exited:
                worker.spawned = True
                try:
                    self._forkserver.send({"kind": "spawn", "rank": worker.rank}, worker.child_fds)
                except OSError as error:
                    self._up.queue(wire.HostFailed(text=f"cannot start rank {worker.rank}: {error}"))
                worker.close_child_fds()

    def _forwarder(self, worker: _Worker) -> Callable[[list[wire.Frame]], None]:
        def forward(frames: list[wire.Frame]) -> None:
            for frame in frames:
                if frame.kind == wire.Outcome.__name__:
                    self._drain_output(worker)  # it was printed before
                self._up.queue(frame.raw)
            self._pause_if_flooded()
            if worker.channel.broken is not None and not worker.exited:
                self._signal(signal.SIGKILL, [worker], groups=True)
                self._end_worker(worker, lost=f"something wrote nonsense into its pipe: {worker.channel.broken}")

        return forward

    def _watch_output(self, worker: _Worker, stream: int) -> None:
        def read() -> None:
            self._read_output(worker, stream)

        self._loop.on_readable(worker.outputs[stream], read)

    def _read_output(self, worker: _Worker, stream: int) -> bool:
        """Pass on what there is; False when there is nothing more, for now or for ever."""
        try:
            data = os.read(worker.outputs[stream], _PACKET_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.forget(worker.outputs[stream])
            return False
        self._up.queue(wire.Output(attempt=self._attempt, rank=worker.rank, stream=stream, body=data))
        self._pause_if_flooded()
        return True

    def _pause_if_flooded(self) -> None:
        """When the coordinator cannot follow, workers wait in write(), instead of filling our memory."""
        if self._up.queued_bytes < _MOST_QUEUED or self._reading_paused:
            return
        self._reading_paused = True
        for worker in self._workers.values():
            worker.channel.pause_reading()
            for fd in worker.outputs.values():
                self._loop.forget(fd)

    def _resume_workers(self) -> None:
        if not self._reading_paused or self._up.queued_bytes > _LEAST_QUEUED:
            return
        self._reading_paused = False
        for worker in self._workers.values():
            if not worker.exited:
                worker.channel.resume_reading()
                for stream in worker.outputs:
                    self._watch_output(worker, stream)

    def _on_exit(self, worker: _Worker, packet: dict[str, Any]) -> None:
        if worker.exited:
            return
        self._drain(worker)
        code = os.waitstatus_to_exitcode(packet["status"])
        self._end_worker(
            worker,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            by_us=packet["by_us"],
            max_rss_bytes=packet["max_rss_bytes"],
            oom_limit_bytes=packet["oom_limit_bytes"],
        )

    def _drain(self, worker: _Worker) -> None:
        """What the worker wrote before it died comes before the news of its death."""
        self._drain_output(worker)
        for frame in worker.channel.drain():
            self._up.queue(frame.raw)

    def _drain_output(self, worker: _Worker) -> None:
        """At most what a pipe holds: a grandchild may go on writing for ever."""
        for stream in worker.outputs:
            for _ in range(_PIPE_BYTES // _PACKET_BYTES):
                if not self._read_output(worker, stream):
                    break

    def _end_worker(self, worker: _Worker, **facts: Any) -> None:
        worker.exited = True
        for fd in (*worker.outputs.values(), worker.channel.read_fd):
            self._loop.forget(fd)
        self._up.queue(wire.Exited(attempt=self._attempt, rank=worker.rank, **facts))
        if all(other.exited for other in self._workers.values()):
            self._empty_host()

    def _empty_host(self) -> None:
        self._loop.cancel("kill")
        if self._forkserver is not None and self._forkserver.ready:
            self._forkserver.send({"kind": "sweep"})
        else:
            self._say_gone()

    def _say_gone(self) -> None:
        if not all(worker.exited for worker in self._workers.values()):
            return
        self._kill_descendants()
        self._loop.cancel("kill")
        self._close_ports()
        self._started = False
        self._up.queue(wire.HostIdle(attempt=self._attempt))

    # -- stopping -------------------------------------------------------------------------------------------------

    def _stop(self, message: wire.Stop) -> None:
        """SIGTERM, grace, stacks, SIGKILL; each step bounded."""
        self._stopping = True
        self._culprit_known = message.culprit_known
        if not self._started:
            self._attempt = max(self._attempt, message.attempt)
            self._up.queue(wire.HostIdle(attempt=message.attempt))
        elif self._forkserver is None or not self._forkserver.ready:
            self._kill_forkserver()
        elif message.grace_s > 0:
            self._signal(signal.SIGTERM, self._living(), groups=False)
            self._loop.call_in("kill", message.grace_s, self._take_stacks)
        else:
            self._take_stacks()

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.spawned and not worker.exited]

    def _signal(self, number: int, workers: list[_Worker], *, groups: bool) -> None:
        if self._forkserver is not None and workers:
            ranks = [worker.rank for worker in workers]
            self._forkserver.send({"kind": "signal", "ranks": ranks, "number": number, "groups": groups})

    def _take_stacks(self) -> None:
        self._loop.cancel("stacks")
        self._ask_for_stacks()
        self._loop.call_in("kill", STACKS_TIMEOUT_S, self._kill_workers)

    def _ask_for_stacks(self) -> None:
        for worker in self._workers.values():
            worker.stacks = b""
        self._signal(process.STACKS_SIGNAL, self._living(), groups=False)

    def _send_stacks(self) -> None:
        living = self._living()
        for worker in living:
            if worker.stacks:
                self._up.queue(wire.StackDump(attempt=self._attempt, rank=worker.rank, body=worker.stacks))
        silent = [worker.rank for worker in living if not worker.stacks]
        self._up.queue(wire.StacksDone(attempt=self._attempt, silent=silent))

    def _stacks_reader(self, worker: _Worker) -> Callable[[], None]:
        def read() -> None:
            try:
                data = os.read(worker.stacks_fd, _PACKET_BYTES)
            except BlockingIOError:
                return
            worker.stacks += data
            if not data:
                self._loop.forget(worker.stacks_fd)
            elif not all(other.stacks for other in self._living()):
                return
            elif not self._stopping:
                self._loop.call_in("stacks", STACKS_QUIET_S, self._send_stacks)
            elif self._culprit_known:
                self._loop.call_in("kill", STACKS_QUIET_S, self._kill_workers)

        return read

    def _kill_workers(self) -> None:
        self._send_stacks()
        self._signal(signal.SIGKILL, self._living(), groups=True)
        self._loop.call_in("kill", FORKSERVER_PATIENCE_S, self._kill_forkserver)

    def _kill_forkserver(self) -> None:
        if self._forkserver is not None:
            self._forkserver.kill()


_LIMITS = {
    errno.EMFILE: "; raise the limit on open files with ulimit -n",
    errno.ENFILE: "; all files that the host may have open are open: raise sysctl fs.file-max",
    errno.EAGAIN: "; raise the limit on processes: ulimit -u, or pids.max of the cgroup",
    errno.ENOMEM: "; free memory, or start fewer workers on it",
}
"""Cures for an OSError at the start of a process."""


def _why_no_forkserver(error: OSError, directory: str) -> str:
    if error.filename == directory:  # otherwise the directory is not to blame
        create = "create it, or " if isinstance(error, FileNotFoundError) else ""
        return f"no worker can run in {directory}: {error.strerror}; {create}set cwd="
    return f"cannot start the forkserver, the parent of its workers: {error}{_LIMITS.get(error.errno or 0, '')}"


def _keep_in_memory(data: bytes) -> int:
    """A descriptor with ``data``, for every worker to read at its own pace."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("distrain-job")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return fd
