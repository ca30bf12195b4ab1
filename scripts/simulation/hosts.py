"""Simulated hosts: one process, the player, speaks for the agents and the workers of all of them.

The coordinator starts a shell for each host, as it would start ssh. The shell writes its process id into a named pipe
and becomes ``sleep``. The player opens the shell's stdin and stdout through /proc, so nothing has to be relayed.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import signal
import time
import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.coordinator.connection.transport import Transport
from distrain.hosts.host import HostInfo
from distrain.hosts.host_info import hello_of
from distrain.hosts.hostfile import HostSpec
from distrain.system.loop import Loop
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

PING_INTERVAL_S = 5.0
_CPU_CLOCK = 2  # the clock of a process, in the last three bits of its id: clock_gettime(2), clock_getcpuclockid(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The run to simulate.

    hosts: that are needed. spares: further ones. slow, dead: how many send HELLO late, or never. slow_s: how late.
    lose: how many vanish at once. lose_at: after which phase. rounds: reports of each rank. idle_s: seconds in which
        nothing happens but signs of life.
    """

    hosts: int
    workers_per_host: int = 8
    latency_ms: float = 0.0
    slow: int = 0
    slow_s: float = 5.0
    dead: int = 0
    lose: int = 1
    lose_at: str = "checkpoint"
    spares: int = 0
    rounds: int = 5
    idle_s: float = 0.0
    with_checkpoint: bool = True

    @property
    def workers(self) -> int:
        """The number of ranks."""
        return self.hosts * self.workers_per_host

    def names(self) -> list[str]:
        """Return the names of all hosts, in the order of placement."""
        return [f"host{number:05}" for number in range(self.hosts + self.spares)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTransport(Transport):
    """A way to one simulated host."""

    pipe: str
    ships: bool = False

    def argv(self, command: Sequence[str]) -> list[str]:
        """Return the command of the shell. The sweep of a simulated host has nothing to do."""
        if command[-1] == "sweep":
            return ["true"]
        script = 'exec 3>&1; echo "$$ $1" >"$2"; exec sleep 86400'  # echo replaces descriptor 1 for a moment
        return ["sh", "-c", script, "host", self.host.name, self.pipe]


def transports(options: Options, pipe: str) -> list[SimulatedTransport]:
    """Return a way to each of the hosts."""
    return [
        SimulatedTransport(host=HostSpec(name=name, address=name, slots=options.workers_per_host), pipe=pipe)
        for name in options.names()
    ]


def cpu_s_of(pid: int) -> float:
    """Return the CPU seconds that all threads of a process have used."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


def memory_bytes_of(pid: int) -> int:
    """Return the peak memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@dataclass(slots=True)
class Host:
    """One simulated host and its connection. ``pidfd``: of the process that the coordinator has started for it."""

    name: str
    pidfd: int
    channel: Channel
    attempt: int = -1
    ranks: list[int] = field(default_factory=list)


class Player:
    """The simulated hosts, and the scenario that they play.

    coordinator: its process id.
    """

    def __init__(self, options: Options, coordinator: int, pipe: str) -> None:
        self._options = options
        self._coordinator = coordinator
        self._loop = Loop()
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._partial = b""
        self._hosts: dict[str, Host] = {}
        names = options.names()
        self._slow = set(names[: options.slow])
        self._dead = set(names[options.slow : options.slow + options.dead])
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._to_ping: list[Host] = []
        self._versions: dict[str, str | None] = {}
        self._entered = 0
        self._committed = 0
        self._fences = 0
        self._attempt = -1
        self._lost_at = 0.0
        self._marks: list[dict[str, Any]] = []
        self._script = self._scenario()
        self._condition = next(self._script)

    def play(self, results: Path, until: int) -> None:
        """Play the scenario. End when nobody holds the other end of the pipe ``until`` any more. Write the marks."""
        is_over = False

        def end() -> None:
            nonlocal is_over
            is_over = True

        self._loop.on_readable(self._pipe, self._accept)
        self._loop.on_readable(until, end)
        self._ping()
        while not is_over:
            self._loop.step()
            while self._condition():
                self._condition = next(self._script, lambda: False)
        results.write_text(json.dumps(self._marks))

    # -- the scenario ---------------------------------------------------------------------------------------------

    def _scenario(self) -> Iterator[Callable[[], bool]]:
        options = self._options
        yield from self._until_all_train("ready", 0)
        yield from self._lose_hosts("ready")
        for index in range(1, options.rounds + 1):
            for host in self._hosts.values():
                self._send(host, *(self._report(host, rank, index) for rank in host.ranks))
        yield from self._settle("reports")
        yield from self._lose_hosts("reports")
        if options.idle_s:
            until = time.monotonic() + options.idle_s
            self._loop.call_at("idle", until, lambda: None)
            yield lambda: time.monotonic() >= until
            self._mark("idle")
        if options.with_checkpoint:
            for host in self._hosts.values():
                self._send(
                    host, *(self._report(host, rank, options.rounds + 1, has_checkpoint=True) for rank in host.ranks)
                )
            yield lambda: self._committed == options.workers
            self._mark("checkpoint")
        yield from self._lose_hosts("checkpoint")
        os.kill(self._coordinator, signal.SIGINT)

    def _lose_hosts(self, phase: str) -> Iterator[Callable[[], bool]]:
        if self._options.lose and self._options.lose_at == phase:
            for host in list(self._hosts.values())[-self._options.lose :]:
                self._vanish(host)
            yield from self._until_all_train("restarted", 1)

    def _until_all_train(self, name: str, attempt: int) -> Iterator[Callable[[], bool]]:
        yield lambda: self._attempt == attempt and self._entered == self._options.workers
        yield from self._settle(name)

    def _settle(self, name: str) -> Iterator[Callable[[], bool]]:
        """Wait until the coordinator has handled all that it was sent: it answers one question of each host."""
        self._fences = 0
        for host in self._hosts.values():
            if host.ranks:
                self._fences += 1
                question = wire.AskCheckpointList(
                    attempt=host.attempt, rank=host.ranks[0], question=len(self._marks), validated=False, at_once=True
                )
                self._send(host, question)
        yield lambda: self._fences == 0
        self._mark(name)

    def _mark(self, name: str) -> None:
        cpu_s, peak = cpu_s_of(self._coordinator), memory_bytes_of(self._coordinator)
        self._marks.append({"name": name, "time": time.monotonic(), "cpu_s": cpu_s, "peak_bytes": peak})

    def _report(self, host: Host, rank: int, index: int, has_checkpoint: bool = False) -> wire.Reported:
        files = [f"shard_{rank}.bin"] if has_checkpoint else []
        body = json.dumps({"loss": 1 / index, "step": index}).encode()
        return wire.Reported(
            attempt=host.attempt,
            rank=rank,
            index=index,
            time=time.time(),
            has_checkpoint=has_checkpoint,
            files=files,
            body=body,
        )

    # -- connections ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        *lines, self._partial = (self._partial + os.read(self._pipe, 64 << 10)).split(b"\n")
        for line in lines:
            pid, name = line.decode().split()
            delay_s = self._options.slow_s if name in self._slow else 0.0
            if name not in self._dead:
                self._do_later(partial(self._connect, int(pid), name), delay_s)

    def _connect(self, pid: int, name: str) -> None:
        try:
            pidfd = os.pidfd_open(pid)
            channel = Channel(
                os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK),
                os.open(f"/proc/{pid}/fd/3", os.O_WRONLY | os.O_NONBLOCK),
            )
        except OSError:  # the coordinator has given it up
            return
        host = self._hosts[name] = Host(name, pidfd, channel)
        channel.attach(self._loop, partial(self._on_frames, host))
        number = int(name[4:])
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        cpus = self._options.workers_per_host
        hello = hello_of(HostInfo(name=name, cpus=cpus, memory_bytes=1 << 40, network=name, address=address))
        channel.queue(wire.MAGIC + wire.encode(replace(hello, pid=pid)))

    def _vanish(self, host: Host) -> None:
        """End the connection and what carries it, as if the host was switched off."""
        self._hosts.pop(host.name, None)
        signal.pidfd_send_signal(host.pidfd, signal.SIGKILL)
        os.close(host.pidfd)
        host.channel.close()

    def _do_later(self, act: Callable[[], None], delay_s: float) -> None:
        if not delay_s:
            act()
            return
        heapq.heappush(self._later, (time.monotonic() + delay_s, next(self._number), act))
        self._loop.call_at("later", self._later[0][0], self._do_due)

    def _do_due(self) -> None:
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        if self._later:
            self._loop.call_at("later", self._later[0][0], self._do_due)

    def _send(self, host: Host, *messages: wire.Message) -> None:
        data = b"".join(map(wire.encode, messages))
        self._do_later(lambda: host.channel.queue(data), self._options.latency_ms / 2e3)

    def _ping(self) -> None:
        """Send a sign of life of one host after the other, as real agents each have their own timer."""
        self._to_ping = self._to_ping or list(self._hosts.values())
        if self._to_ping and (host := self._to_ping.pop()).channel.write_fd >= 0:
            host.channel.queue(wire.Ping())
        self._loop.call_in("ping", PING_INTERVAL_S / max(1, len(self._hosts)), self._ping)

    # -- messages of the coordinator --------------------------------------------------------------------------------

    def _on_frames(self, host: Host, frames: list[wire.Frame]) -> None:
        if not frames:
            if host.name in self._hosts:
                self._vanish(host)
            return
        self._do_later(partial(self._answer, host, frames), self._options.latency_ms / 2e3)

    def _answer(self, host: Host, frames: Iterable[wire.Frame]) -> None:
        if host.channel.write_fd < 0:
            return
        answers = [answer for frame in frames for answer in self._answers(host, frame)]
        if answers:
            self._send(host, *answers)

    def _answers(self, host: Host, frame: wire.Frame) -> Iterator[wire.Message]:
        match frame.message():
            case wire.ReservePort(attempt=attempt):
                yield wire.RendezvousPort(attempt=attempt, port=40000)
            case wire.SetUpHost():
                yield wire.HostSetUp()
            case wire.ProbeHost(nonce=nonce) as question:
                versions = self._versions_for(question)
                yield wire.HostProbed(nonce=nonce, versions=versions, address="10.0.0.1", port=40000, interface="eth0")
            case wire.Start() as start:
                yield from self._start(host, start)
            case wire.Stop(attempt=attempt):
                yield from self._end_workers(host, signal=signal.SIGKILL, by_us=True)
                yield wire.StacksDone(attempt=attempt, silent=[])
                yield wire.HostIdle(attempt=attempt)
            case wire.CopyFiles() as order:
                yield self._copy(order)
            case wire.CommitDone():
                self._committed += 1
            case wire.Answer():
                self._fences -= 1
            case wire.Close():
                self._vanish(host)

    def _versions_for(self, question: wire.ProbeHost) -> dict[str, str | None]:
        from distrain.hosts.inspection import package_versions

        self._versions = self._versions or package_versions(question.packages, question.sys_path)
        return self._versions

    def _start(self, host: Host, start: wire.Start) -> Iterator[wire.Message]:
        if start.attempt != self._attempt:
            self._attempt, self._entered = start.attempt, 0
        host.attempt, host.ranks = start.attempt, [spec["rank"] for spec in start.ranks]
        for rank in host.ranks:
            self._entered += 1
            yield wire.Running(attempt=start.attempt, rank=rank)

    def _end_workers(self, host: Host, **how: Any) -> Iterator[wire.Message]:
        for rank in host.ranks:
            yield wire.Exited(attempt=host.attempt, rank=rank, **how)
        host.ranks = []

    def _copy(self, order: wire.CopyFiles) -> wire.FilesCopied:
        """Write the files as a worker does, without flushing them to the disk."""
        data = order.rank.to_bytes(8, "big")
        for name in order.files:
            Path(order.directory, name).write_bytes(data)
        files = [(name, len(data), zlib.crc32(data)) for name in order.files]
        return wire.FilesCopied(attempt=order.attempt, rank=order.rank, ordinal=order.ordinal, files=files, skipped=[])
