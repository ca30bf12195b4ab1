"""Hosts of a simulated world: a model of the agent, its forkserver and its uploader, written as the protocol allows.

What an agent does with checkpoints in memory is the real code. The rest is the specification of an agent in few lines:
it starts ranks, passes their messages on, reports their ends, takes them through the ladder of a stop, and empties its
host when its coordinator is gone.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.agent.guard import clear_cache
from distrain.agent.host_queries import _probed
from distrain.agent.host_setup import HostSetup
from distrain.agent.memory_keeper import MemoryKeeper
from distrain.decisions.events import HostLost
from distrain.hosts.host import HostInfo
from distrain.hosts.host_info import hello_of
from distrain.system.remote_path import RemotePath
from distrain.transfer.order_link import OrderLink
from tests.simulation.bucket import contents
from tests.simulation.world import Process, SimulatedLoop, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.worker import SimulatedRank

LEASE_S = 15.0
STOP_GRACE_S = 10.0
_LATENCY_S = 0.004


class Line:
    """One direction of a connection: messages arrive in order, each after a while, or not at all."""

    def __init__(self, world: World, deliver: Callable[[wire.Frame], None], slowness: float = 1.0) -> None:
        self._world, self._deliver = world, deliver
        self._latency_s = slowness * _LATENCY_S
        self._last = 0.0
        self.is_cut = False
        self.delay_s = 0.0
        """What is added to the latency of further messages."""

    def send(self, message: wire.Message) -> None:
        if self.is_cut:
            return
        [frame] = wire.Decoder().feed(wire.encode(message))
        latency = self._world.random.random() * self._latency_s + self.delay_s
        self._last = max(self._world.now + latency, self._last + 1e-7)
        self._world.at(self._last, lambda: None if self.is_cut else self._deliver(frame))

    def end(self) -> None:
        """Deliver None, after all messages."""
        self._last = max(self._world.now, self._last + 1e-7)
        self._world.at(self._last, lambda: self._deliver(None))  # type: ignore[arg-type]


@dataclass
class Host:
    """A machine. It outlives the agents of its runs."""

    world: World
    name: str
    root: Path
    slots: int
    make_rank: Callable[[Agent, wire.WorkerSpec], SimulatedRank]
    is_up: bool = True
    agent: Agent | None = None
    memory_is_full: bool = False
    sees_storage: bool = True
    takes_streams: bool = True
    is_cut_off: bool = False
    is_sick: bool = False
    """Its forkserver dies before the first rank."""
    is_flaky: bool = False
    """It dies as soon as ranks should start."""
    refuses_peers: bool = False
    """A firewall lets no host connect to another one, if one of them is this."""
    peer_delay_s: float = 0.0
    slowness: float = 1.0
    """How much longer messages from and to this host take than elsewhere."""
    servers: list[Process] = field(default_factory=list)
    """The stream servers that were started here."""
    agents: list[Agent] = field(default_factory=list)

    @property
    def memory(self) -> Path:
        return self.root / "memory"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    def die(self) -> None:
        """Lose power."""
        self.is_up = False
        if self.agent is not None:
            self.agent.lose()
        shutil.rmtree(self.memory, ignore_errors=True)

    def start_agent(self, up: Line) -> Agent:
        """Start an agent. Whatever an earlier one has left ends first."""
        if self.agent is not None:
            self.agent.lose()
        shutil.rmtree(self.memory, ignore_errors=True)
        self.memory.mkdir(parents=True)
        self.is_cut_off = False
        self.agent = Agent(self, up)
        self.agents.append(self.agent)
        return self.agent


class Agent:
    """The agent of a host for one coordinator."""

    def __init__(self, host: Host, up: Line) -> None:
        self.host, self.world = host, host.world
        self.up = up
        self.life = 0
        """The number of the process that called fit()."""
        self.process = Process(self.world, f"agent of {host.name}", host)
        self.loop = SimulatedLoop()
        self.ranks: dict[int, SimulatedRank] = {}
        self.heard_at = self.world.now
        self._attempt = -1
        self._stopping: wire.Stop | None = None
        self._is_started = False
        self._forkserver_ready = False
        self._waiting: wire.Start | None = None
        self._memory: MemoryKeeper | None = None
        self._setup = HostSetup(self.loop, self.up.send)  # type: ignore[arg-type]
        self._uploader = OrderLink(self.loop, self.up.send, "uploader", flags=[])  # type: ignore[arg-type]
        self.process.at_death.append(self._after_death)
        self.process.start(self._run, is_main=True)

    # -- its life -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.up.send(hello_of(HostInfo(name="", cpus=8, memory_bytes=0, network="here")))
        self._beat()
        self.loop.run()
        self._leave()

    def _leave(self) -> None:
        for rank in self.ranks.values():
            rank.process.kill()
        shutil.rmtree(self.host.memory, ignore_errors=True)
        self._setup.end()

    def _after_death(self) -> None:
        for process in (*(rank.process for rank in self.ranks.values()), *self.host.servers):
            process.kill()
        shutil.rmtree(self.host.memory, ignore_errors=True)
        self.up.is_cut = True
        if self.host.is_up and not self.host.sees_storage:
            Process(self.world, f"guard of {self.host.name}", self.host).start(clear_cache, is_main=True)

    def lose(self) -> None:
        """End at once, with everything on the host."""
        self.process.kill()

    def end_of_input(self) -> None:
        """Hear that the coordinator has closed the connection, or is dead."""
        if self.process.is_alive:
            self.loop.post(self.loop.stop)

    def receive(self, frame: wire.Frame) -> None:
        if self.process.is_alive:
            take = lambda: self._take(frame)  # noqa: E731
            self.process.unread.append(lambda: self.loop.post(take)) if self.process.is_stopped else self.loop.post(
                take
            )

    def _beat(self) -> None:
        silence_s = self.loop.silence_s(self.heard_at)
        if silence_s > LEASE_S:
            self.up.send(wire.HostFailed(text="the coordinator was silent", leaves=True))
            self.loop.stop()
            return
        self.up.send(wire.Ping())
        self.loop.call_in("beat", min(LEASE_S / 2, LEASE_S - silence_s + 0.01), self._beat)

    # -- messages -------------------------------------------------------------------------------------------------

    def _take(self, frame: wire.Frame) -> None:
        self.heard_at = self.world.now
        message = frame.message()
        match message:
            case wire.Ping():
                self._beat()
            case wire.ToWorker():
                rank = self.ranks.get(message.rank)
                if rank is not None and message.attempt == self._attempt:
                    rank.receive(frame)
            case wire.ToMemory() | wire.Upload(directory=""):
                self._keep(message)
            case wire.Prepare():
                self._forkserver_ready = False
                if self.host.is_sick:
                    self.up.send(wire.HostFailed(text="the forkserver has died before the first worker"))
                self.loop.call_in("ready", self.world.random.random(), self._ready)
            case wire.ReservePort(attempt=attempt):
                self.up.send(wire.RendezvousPort(attempt=attempt, port=1))
            case wire.ProbeHost():
                self.up.send(_probed(self._setup.probe(message), ()))
            case wire.Start() if message.attempt > self._attempt:
                self._start(message)
            case wire.Stop():
                self._stop(message)
            case wire.TakeStacks(attempt=attempt) if attempt == self._attempt and self._stopping is None:
                self.loop.call_in("stacks", 0.2, lambda: self._send_stacks(watches=message.watches))
            case wire.Upload() if message.attempt >= self._attempt:
                self._uploader.order(message, self.up.send)
            case wire.OpenStorage():
                self._uploader.order(message, self.up.send)
            case wire.SetUpHost():
                self._setup.begin(message)
            case wire.DeleteCheckpoints(directories=folders):
                self._setup.delete_checkpoints(folders)
            case wire.Close():
                self.loop.stop()

    def lose_forkserver(self) -> None:
        """Lose the parent of the ranks, and with it these."""
        for rank in self._living():
            rank.kill(lost="the forkserver, its parent, has died")
        if self._attempt < 0:
            self.up.send(wire.HostFailed(text="the forkserver has died before the first worker"))

    def _send_stacks(self, *, watches: bool) -> None:
        living = self._living()
        silent = [rank.number for rank in living if rank.process.is_stopped]
        for rank in living:
            if rank.number not in silent:
                self.up.send(wire.Dump(attempt=self._attempt, rank=rank.number, what="stacks", body=b""))
        idle = [rank.number for rank in living if watches and rank.activity != "moves"]
        self.up.send(wire.StacksDone(attempt=self._attempt, silent=silent, idle=idle))

    def _keep(self, message: wire.ToMemory | wire.Upload) -> None:
        if self._memory is None:
            self._memory = MemoryKeeper(self.loop, self.up.send, self.host.memory)
            self._memory.start(self._attempt, self.ranks)
        self._memory.handle(message)

    def _ready(self) -> None:
        self._forkserver_ready = True
        if self._waiting is not None:
            self._spawn(self._waiting)

    def _start(self, message: wire.Start) -> None:
        if self.host.is_flaky:
            self.host.die()
            self.world.after(5.0, lambda: setattr(self.host, "is_up", True))
            return
        self._attempt, self._is_started, self._stopping = message.attempt, True, None
        self.ranks = {}
        if self._memory is not None:
            self._memory.start(message.attempt, [fields["rank"] for fields in message.ranks])
        if self._forkserver_ready:
            self._spawn(message)
        else:
            self._waiting = message

    def _spawn(self, message: wire.Start) -> None:
        self._waiting = None
        for fields in message.ranks:
            spec = self._setup.worker(wire.WorkerSpec(**fields))
            self.ranks[spec.rank] = self.host.make_rank(self, spec)

    def _living(self) -> list[SimulatedRank]:
        return [rank for rank in self.ranks.values() if not rank.is_reported]

    def exited(self, rank: SimulatedRank, **how: Any) -> None:
        """Hear that a rank's process has ended."""
        if self.process.is_alive:
            self.world.after(self.world.random.random() * 0.01, lambda: self.loop.post(lambda: self._reap(rank, how)))

    def _reap(self, rank: SimulatedRank, how: dict[str, Any]) -> None:
        if rank.is_reported or rank.attempt != self._attempt:
            return
        rank.is_reported = True
        self.up.send(wire.Exited(attempt=self._attempt, rank=rank.number, **how))
        if not self._living():
            self.loop.cancel("kill")
            self._is_started = False
            self.up.send(wire.HostIdle(attempt=self._attempt))

    # -- the end of an attempt ------------------------------------------------------------------------------------

    def _stop(self, message: wire.Stop) -> None:
        if self._waiting is not None:
            self._waiting, self._is_started = None, False
        self._stopping = message
        if not self._is_started:
            self._attempt = max(self._attempt, message.attempt)
            self.up.send(wire.HostIdle(attempt=message.attempt))
        elif message.grace_s > 0:
            for rank in self._living():
                rank.signal(message.signal)
            self.loop.call_in("kill", message.grace_s, self._take_last_stacks)
        else:
            self._take_last_stacks()

    def _take_last_stacks(self) -> None:
        self.loop.call_in("kill", 0.05, self._end_workers)

    def _end_workers(self) -> None:
        assert self._stopping is not None
        self.up.send(wire.StacksDone(attempt=self._attempt, silent=[]))
        if self._stopping.last_grace_s > 0:
            for rank in self._living():
                rank.signal("SIGTERM")
            self.loop.call_in("kill", self._stopping.last_grace_s, self._kill_workers)
        else:
            self._kill_workers()

    def _kill_workers(self) -> None:
        for rank in self._living():
            rank.kill(by_us=True)


class SimulatedValidator:
    """The process that calls the user's validation function: it reads a checkpoint, takes a while, and may fail."""

    world: World

    def __init__(self, loop: SimulatedLoop, *_: Any, **named: Any) -> None:
        self._loop = loop
        self._is_closed = False

    def order(self, order: wire.RunValidation, then: Callable[[wire.OrderDone], None]) -> None:
        path, draw = order.checkpoint, self.world.random
        folder = RemotePath(path) if "://" in path else Path(path)
        names: set[str] = set()

        def end() -> None:
            if not (self._is_closed or names <= set(contents(folder))):
                self.world.say(f"{folder.name} was deleted while it was validated")
            self._loop.post(answer)

        def answer() -> None:
            if self._is_closed:
                return
            failed = "the function has raised ValueError" if draw.random() < 0.2 else None
            then(wire.OrderDone(body=b'{"accuracy": 1.0}', failed=failed))

        assert self.world.current is not None
        process = self.world.current.process
        self.world.after(0, lambda: names.update(contents(folder)), process)
        self.world.after(draw.choice([0.01, 0.5, 5]), end, process)

    def close(self) -> None:
        self._is_closed = True


class SimulatedRanks:
    """The port of a coordinator to its hosts."""

    def __init__(self, process: Process, hosts: dict[str, Host]) -> None:
        self.errors: dict[int, BaseException] = {}
        self._process, self._hosts, self._world = process, hosts, process.world
        self._links: dict[str, _Link] = {}
        process.at_death.append(self._hang_up)

    def drive(self, run: Callable[[], None]) -> None:
        run()

    def open(self, loop: SimulatedLoop, on_message: Any, on_lost: Any) -> None:
        self._loop, self._on_message, self._on_lost = loop, on_message, on_lost
        self._process.loop = loop  # type: ignore[attr-defined]
        for host in self._hosts.values():
            if host.agent is not None:
                host.agent.lose()
        self._ping()

    def connect(self, name: str) -> None:
        host = self._hosts[name]
        if (former := self._links.pop(name, None)) is not None:
            former.close()
        if not host.is_up:
            self._loop.call_in(f"connect {name}", 0.3, lambda: self._on_lost(HostLost(name, "it does not answer")))
            return
        self._links[name] = _Link(self, host)

    def send(self, name: str, message: wire.Message) -> None:
        if (link := self._links.get(name)) is not None and not link.is_dropped:
            link.down.send(message)

    def stream_argv(self, name: str) -> list[str]:
        return [name]

    def close(self, *, keep: bool) -> None:
        self._loop.cancel("ping")
        deadline = self._world.now + 5.0
        agents = [link.agent for link in self._links.values() if not link.is_dropped]
        for link in self._links.values():
            link.down.send(wire.Close())
            link.is_dropped = True
        while any(agent.process.is_alive for agent in agents) and self._world.now < deadline:
            self._world.sleep(0.01)
        for host in self._hosts.values():  # the sweep
            if host.agent is not None and host.is_up:
                host.agent.lose()

    def _ping(self) -> None:
        for link in list(self._links.values()):
            if link.is_dropped or not link.greeted:
                continue
            silence_s = self._loop.silence_s(link.heard_at)
            if silence_s > LEASE_S:
                link.lose(f"it has been silent for {silence_s:.0f} s")
            else:
                link.down.send(wire.Ping())
        self._loop.call_in("ping", 5.0, self._ping)

    def _hang_up(self) -> None:
        for link in self._links.values():
            link.close()


class _Link:
    """A connection of a coordinator to an agent."""

    def __init__(self, ranks: SimulatedRanks, host: Host) -> None:
        self._ranks = ranks
        self.host = host
        self.greeted = self.is_dropped = False
        self.heard_at = ranks._world.now
        self.up = Line(ranks._world, self._receive, host.slowness)
        self.agent = host.start_agent(self.up)
        self.agent.life = ranks._process.life.number  # type: ignore[attr-defined]
        self.down = Line(ranks._world, self.agent.receive, host.slowness)
        self.agent.process.at_death.append(self._at_its_death)

    def _receive(self, frame: wire.Frame) -> None:
        process = self._ranks._process
        if process.is_alive and not self.is_dropped:
            take = lambda: self._take(frame)  # noqa: E731
            loop = self._ranks._loop
            process.unread.append(lambda: loop.post(take)) if process.is_stopped else loop.post(take)

    def _take(self, frame: wire.Frame) -> None:
        if self.is_dropped:
            return
        self.heard_at = self._ranks._world.now
        message = frame.message()
        if isinstance(message, wire.Ping):
            return
        if isinstance(message, wire.HostFailed) and message.leaves:
            self.lose(message.text)
            return
        if isinstance(message, wire.Hello):
            self.greeted = True
            self.down.send(wire.Ping())
        self._ranks._on_message(self.host.name, message)

    def _at_its_death(self) -> None:
        if not self.down.is_cut:
            self._ranks._world.after(0.01, self._ended, self._ranks._process)

    def _ended(self) -> None:
        """Notice the end of the connection, after everything that came before."""
        self._ranks._loop.post(lambda: self.lose("distrain's process there has ended"))

    def lose(self, why: str) -> None:
        if not self.is_dropped:
            self.close()
            self._ranks._on_lost(HostLost(self.host.name, why))

    def close(self) -> None:
        self.is_dropped = True
        if not self.down.is_cut:
            self._ranks._world.after(0.01, self.agent.end_of_input)
