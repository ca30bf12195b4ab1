"""Play a scenario: the real engine over simulated hosts, disturbed by faults. Return what was promised and not kept."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import math
import os
import random
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from distrain import RunConfig, ScalingConfig, wire
from distrain.agent import host_setup, memory_keeper, peers
from distrain.api.backend import BackendConfig
from distrain.api.job import Job
from distrain.api.observer import RankTrains
from distrain.coordinator import coordinator, engine, launch_checks, validations
from distrain.coordinator.host_files import Shipping
from distrain.coordinator.ranks import stop_signals
from distrain.coordinator.run import run as run_module
from distrain.coordinator.run.facts import RunFacts
from distrain.coordinator.store import local_store
from distrain.coordinator.store.remote_store import open_run
from distrain.decisions.events import RunRequest, Validator
from distrain.hosts import secret_port
from distrain.hosts.host import HostSettings
from distrain.hosts.hostfile import HostSpec
from distrain.storage import checkpoint, file_transfer, run_lock
from distrain.system import log, remote_path
from distrain.system.remote_path import RemotePath
from distrain.transfer import executor, mover, order_link, uploader
from distrain.transfer.host_side import host_cache
from distrain.worker import session
from distrain.worker.job.job import FunctionWork
from distrain.worker.reporting import memory_part
from tests.simulation import bucket, children, hosts, worker, world
from tests.simulation.disk import Disk
from tests.simulation.faults import STRIKES
from tests.simulation.hosts import LEASE_S, STOP_GRACE_S, Host, SimulatedRanks, SimulatedValidator
from tests.simulation.properties import PROPERTIES
from tests.simulation.world import STARTED, Process, SimulatedBackground, SimulatedLoop, Threading, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distrain.wire.channel import Channel
    from tests.simulation.scenario import Scenario

_LONGEST_S = 4_000.0
_SLOWNESS = (1.0, 1.0, 1.0, 20.0)
"""How much longer than usual messages of a host take."""


_VALIDATOR = Validator(order=wire.RunValidation(directory="", sys_path=[], body=b""), timeout_s=None, environment={})


class Life:
    """One process that calls fit()."""

    def __init__(self, number: int, process: Process) -> None:
        self.number, self.process = number, process
        self.result: Any = None
        self.engine: Any = None
        self.ranks: SimulatedRanks | None = None
        self.facts: list[Any] = []
        self.was_killed = False
        self.asked_to_stop = 0
        self.stops_at = self.ended_at = math.inf
        """The times of the first request to stop, and of its end."""


class Play:
    """A scenario that is played once."""

    def __init__(self, scenario: Scenario, root: Path) -> None:
        self.scenario = scenario
        self.root, self.local, self.storage = root, root / "local", root / "storage"
        self.local.mkdir(parents=True)
        self.world = World(f"{scenario.seed} world")
        self.collectives = worker.Collectives()
        self.calls: list[worker.Call] = []
        self.lives: list[Life] = []
        self.rivals: list[Life] = []
        """Processes that called fit() while another one ran."""
        self.asked: list[tuple[Life, float, Channel]] = []
        """Requests: of which process, when, and the connection for the answer."""
        self.first_steps: dict[int, dict[int, int]] = defaultdict(dict)
        """By attempt and life: the reports before it that count.

        A life that is killed soon has not noted its last attempt, whose number comes again.
        """
        self.hits: set[tuple[int, int, int]] = set()
        """Life, attempt and rank of those that a fault has hit."""
        self.hit_hosts: set[str] = set()
        self.changes: dict[str, list[float]] = defaultdict(list)
        """By host: when a fault has hit it, and when it was well again."""
        self.copied: list[tuple[float, str]] = []
        """For each hit of a host: the time, and the newest checkpoint that had copies on other hosts."""
        self.violations: list[str] = []
        self.stuck: dict[tuple[int, int], tuple[int, float]] = {}
        """By life and attempt: the rank that was made to stand still, and when."""
        self.stopped: list[tuple[int, int, int, float, float]] = []
        """Life, attempt and number of ranks that were stopped, from when until when."""
        self.debugged: list[tuple[float, float]] = []
        """From when until when a debugger has stopped a rank."""
        self.flipped: dict[Path, float] = {}
        """The times at which a bit of a file flipped."""
        self.rolled_back: set[tuple[int, int]] = set()
        self.disk = Disk(self.world, self.storage, forgets=any(fault.kind == "lose power" for fault in scenario.faults))
        self.batches: dict[tuple[int, int], list[tuple[int, list[int]]]] = defaultdict(list)
        """By attempt and rank: the number of the next report, and the rows, of each batch."""
        self.looked: list[tuple[worker.SimulatedRank, int, int]] = []
        """The step of each checkpoint that a rank got from get_checkpoint(), and that of its last report; -1: none."""
        self.unread: list[tuple[str, float, str]] = []
        """The names of checkpoints that a rank got and could not read, when, and why."""
        self.ended = 0.0
        """The end of the last process that called fit(), in seconds since the start."""
        self.told: list[tuple[float, Any]] = []
        """All facts that observers heard, and when."""
        self.sizes: dict[int, int] = {}
        """By attempt: its number of ranks."""
        self.starts: list[tuple[float, worker.SimulatedRank]] = []
        self.loaded: list[Any] = []
        self.lines: set[tuple[int, int, int]] = set()
        """Attempt, rank and index of the reports that were in metrics.jsonl when a process called fit()."""
        self.notes: list[str] = []
        """The names of files that ranks have written into get_trial_dir()."""
        slots = -(-scenario.ranks // scenario.hosts)
        names = [f"host{n}" for n in range(scenario.hosts + scenario.spares)]
        self.hosts = {name: Host(self.world, name, root / name, slots, self.make_rank) for name in names}
        for name in names[1:]:
            self.hosts[name].sees_storage = scenario.shares_files
            self.hosts[name].slowness = random.Random(f"{scenario.seed} {name}").choice(_SLOWNESS)
        self.elsewhere = Host(self.world, "elsewhere", root / "elsewhere", 0, self.make_rank)
        """A machine without ranks."""
        for host in (*self.hosts.values(), self.elsewhere):
            host.temporary.mkdir(parents=True)
        self.bucket = bucket.Bucket(self.world)

    @property
    def life(self) -> int:
        """The number of the current process that calls fit()."""
        return len(self.lives) - 1

    @property
    def rows(self) -> int:
        """The number of rows of the dataset."""
        return self.scenario.steps * self.scenario.ranks * worker.BATCH

    @property
    def run_directory(self) -> Path | RemotePath:
        return RemotePath(f"{bucket.URL}/run") if self.scenario.bucket else self.storage / "run"

    # -- what ranks ask -------------------------------------------------------------------------------------------

    def reports(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, but not a torn one."""
        path = self.storage / "run" / "metrics.jsonl"
        data = path.read_bytes() if path.exists() else self.bucket.objects.get("runs/run/metrics.jsonl", (b"",))[0]
        text = data.decode()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def script_random(self, rank: worker.SimulatedRank) -> random.Random:
        return random.Random(f"{self.scenario.seed} {rank.number} {rank.attempt} {rank.life}")

    def loss(self, step: int) -> float:
        return random.Random(f"{self.scenario.seed} {step}").choice([1.0, 2.0, 3.0, 1.0, float("nan")])

    def make_rank(self, agent: hosts.Agent, spec: wire.WorkerSpec) -> worker.SimulatedRank:
        rank = worker.SimulatedRank(agent, spec, self)
        self.starts.append((self.world.now, rank))
        self.sizes[rank.attempt] = spec.context["world_size"]
        return rank

    # -- playing --------------------------------------------------------------------------------------------------

    def play(self) -> list[str]:
        """Play it, and return a line for each promise that was not kept."""
        with patched(self.world, self):
            try:
                late = [fault for fault in self.scenario.faults if fault.kind == "late host"]
                for fault in late:
                    STRIKES[fault.kind](self, fault)
                self.begin_life()
                for fault in [fault for fault in self.scenario.faults if fault not in late]:
                    self.world.after(fault.at, partial(STRIKES[fault.kind], self, fault))
                self._run()
                for check in () if self.has_other_run() else PROPERTIES:
                    self.violations += [f"{check.__name__}: {text}" for text in check(self)]
            except Exception as error:
                self.violations.append(f"an exception of the engine: {type(error).__name__}: {error}")
                self.crash = error
            finally:
                self.world.end()
                for _, _, channel in self.asked:
                    channel.close()
        return self.violations

    def _run(self) -> None:
        until = self.world.now + _LONGEST_S
        while True:
            alive = [life.process for life in self.lives if life.process.is_alive]
            if alive:
                self.world.while_any(alive, until)
                if any(one.is_alive for one in alive):
                    self.violations.append(f"the run has not ended after {_LONGEST_S:g} s")
                    return
            elif self.lives[-1].was_killed:
                pending = self.world.now + 200
                marker = Process(self.world, "waiting")
                count = len(self.lives)
                while len(self.lives) == count and self.world._events and self.world.now < pending:
                    self.world.while_any([marker], self.world._events[0][0])
                marker.is_alive = False
                if len(self.lives) == count:
                    return
            else:
                break
        self.ended = self.world.now - STARTED
        idle = Process(self.world, "afterwards")
        self.world.while_any([idle], self.world.now + 70)
        idle.is_alive = False

    def has_other_run(self) -> bool:
        """Return whether the run finished while another start waited for it, which then began a run of its own."""
        return len(self.lives) > 1 and any("is finished, so this one is called" in text for _, text in self.world.story)

    def begin_life(self, host: Host | None = None, *, is_rival: bool = False) -> None:
        """Call fit() in a new process. is_rival: while another one runs."""
        self.lines |= {(line["attempt"], line["rank"], line["index"]) for line in self.reports()}
        stop_signals._stopped_by.clear()
        process = Process(self.world, f"fit() {len(self.lives)}", host or self.hosts["host0"])
        life = process.life = Life(len(self.lives), process)  # type: ignore[attr-defined]
        process.at_death.append(lambda: setattr(life, "ended_at", self.world.now))
        if is_rival:
            self.rivals.append(life)
            self.lives[-1].process.at_death.append(process.kill)  # it would begin a run of its own
        else:
            self.lives.append(life)
        process.start(lambda: self._fit(life), is_main=True)

    def begin_again(self, host: Host | None = None) -> None:
        """Start again after a kill, unless the run had just finished: another start would begin a new one."""
        manifest = self.run_directory / "run.json"
        if not manifest.exists() or json.loads(manifest.read_bytes())["status"] != "finished":
            self.begin_life(host)

    def _fit(self, life: Life) -> None:
        scenario = self.scenario
        specs = [HostSpec(name=name, slots=host.slots) for name, host in self.hosts.items()]
        scaling = ScalingConfig(
            num_workers=(scenario.least, scenario.ranks) if scenario.least else scenario.ranks,
            grow="checkpoint" if scenario.grow and scenario.least else None,
        )
        config = RunConfig(
            storage_path=str(self.run_directory.parent), name="run", checkpoint_config=scenario.checkpoint_config,
            failure_config=scenario.failure_config,
        )  # fmt: skip
        work = FunctionWork(function=self._fit, config={}, backend=BackendConfig())
        request = RunRequest(
            run_id=f"life{life.number}", job=Job(blob=b"job"), backend=work.backend, scaling=scaling,
            hosts={
                spec.name: HostSettings(
                    lease_s=LEASE_S, slots=spec.slots, is_local=self.hosts[spec.name].sees_storage,
                    directory="/", sys_path=[],
                )
                for spec in specs
            },
            failure_config=scenario.failure_config, memory_every=scenario.memory_every, stop_grace_s=STOP_GRACE_S,
            argv=[], python_flags=[], validator=_VALIDATOR if scenario.validates else None,
        )  # fmt: skip
        transports: Any = [SimpleNamespace(host=spec) for spec in specs]
        shipping = Shipping(question=wire.SetUpHost(files=[], folders=[], place=""), fetch_limit=1 << 30)
        store = open_run(config.storage_path, config.name)
        try:
            life.result = _Run(store, request, config, work, transports, shipping, None, life, self).train()
        finally:
            store.close()

    # -- what faults find, and leave ------------------------------------------------------------------------------

    def ranks(self) -> list[worker.SimulatedRank]:
        """Return the ranks that live now."""
        agents = [host.agent for host in self.hosts.values() if host.agent is not None]
        return [rank for agent in agents for rank in agent.ranks.values() if rank.process.is_alive]

    def up(self) -> list[Host]:
        """Return the hosts that are up, and have had an agent."""
        return [host for host in self.hosts.values() if host.is_up and host.agent is not None]

    def hit(self, rank: worker.SimulatedRank, how: str) -> None:
        """Note that a fault hits a rank."""
        self.world.say(f"rank {rank.number} {how}")
        self.hits.add((rank.life, rank.attempt, rank.number))

    def hit_host(self, host: Host, how: str) -> None:
        """Note that a fault hits a host, with its ranks."""
        self.world.say(f"{host.name} {how}")
        self.hit_hosts.add(host.name)
        self.changes[host.name].append(self.world.now)
        engine = self.lives[-1].engine
        if engine is not None:
            self.copied.append((self.world.now, engine.checkpoints.rounds.safe))


class _Run(run_module.Run):
    """A run whose ranks live in the simulated world."""

    def __init__(self, *given: Any) -> None:
        *real, self._life, self._play = given
        super().__init__(*real)

    def _ranks(self, request: Any) -> Any:
        self._life.ranks = SimulatedRanks(self._life.process, self._play.hosts)
        return self._life.ranks, request

    def _observers(self) -> Any:
        observers = super()._observers()
        observers._observers.append(_Recorder(self._life, self._play))
        return observers


class _Engine(engine.Engine):
    """The engine, which its process knows."""

    def __init__(self, *given: Any, **named: Any) -> None:
        world = SimulatedLoop.world
        assert world.current is not None
        world.current.process.life.engine = self  # type: ignore[attr-defined]
        super().__init__(*given, **named)


class _Recorder:
    """Hears every fact of a run."""

    hears = ()

    def __init__(self, life: Life, play: Play) -> None:
        self._life, self._play = life, play

    def hear(self, fact: Any) -> None:
        self._life.facts.append(fact)
        self._play.told.append((self._play.world.now, fact))
        if isinstance(fact, RankTrains):
            engine = self._life.engine
            self._play.first_steps[engine.attempt][self._life.number] = engine.checkpoints.assembly.first_step


def played(scenario: Scenario) -> Play:
    """Play a scenario in a new directory in memory, and delete that."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="distrain-simulation-") as folder:
        play = Play(scenario, Path(folder))
        play.play()
        return play


# -- the patches that make the world the only one --------------------------------------------------------------------


@contextlib.contextmanager
def patched(of: World, play: Play) -> Iterator[None]:
    """Let everything that distrain does within the block happen in this world."""
    SimulatedLoop.world = SimulatedBackground.world = SimulatedValidator.world = of
    children.Listener.ports.clear()
    threading = Threading(of)
    numbers = itertools.count()
    handler = logging.Handler()
    handler.emit = lambda record: of.say(record.getMessage())  # type: ignore[method-assign]
    flock = fcntl.flock
    holders: dict[int, Process] = {}

    def take_lock(file: Any, how: int) -> None:
        fd = file if isinstance(file, int) else file.fileno()
        while True:
            try:
                flock(fd, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if how & fcntl.LOCK_NB:
                    raise
                of.sleep(0.02)
        if of.current is not None:
            status, process = os.fstat(fd), of.current.process
            holders[fd] = process  # when one has closed a descriptor, another one may get the number

            def unlock() -> None:
                with contextlib.suppress(OSError):
                    if holders[fd] is process and os.path.samestat(os.fstat(fd), status):
                        flock(fd, fcntl.LOCK_UN)

            process.at_death.append(unlock)

    def unique() -> uuid.UUID:
        return uuid.UUID(int=next(numbers) | 1 << 100)

    patches = [
        mock.patch.object(time, "monotonic", of.monotonic),
        mock.patch.object(time, "time", of.wall),
        mock.patch.object(time, "sleep", of.sleep),
        mock.patch.object(uuid, "uuid4", unique),
        mock.patch.object(os, "rename", play.disk.rename(os.rename)),
        mock.patch.object(os, "replace", play.disk.rename(os.replace)),
        mock.patch.object(os, "fsync", play.disk.timed(play.disk.flush)),
        mock.patch.object(os, "fdatasync", play.disk.timed(play.disk.flush)),
        mock.patch.object(fcntl, "flock", take_lock),
        mock.patch.object(engine, "Loop", SimulatedLoop),
        mock.patch.object(engine, "Background", SimulatedBackground),
        mock.patch.object(coordinator, "raise_fd_limit"),
        mock.patch.object(validations, "OrderLink", SimulatedValidator),
        mock.patch.object(memory_keeper, "Background", SimulatedBackground),
        mock.patch.object(secret_port, "threading", threading),
        mock.patch.object(secret_port, "listen", children.Listener),
        mock.patch.object(peers, "connect", children.connect),
        mock.patch.object(local_store, "threading", threading),
        mock.patch.object(session, "threading", threading),
        mock.patch.object(file_transfer, "in_threads", lambda function, items, threads=0: [function(i) for i in items]),
        mock.patch.object(file_transfer, "_copy_in_kernel", play.disk.copying(file_transfer._copy_in_kernel)),
        mock.patch.object(memory_part, "_check_room", partial(_check_room, of)),
        mock.patch.object(os, "mkdir", play.disk.timed(os.mkdir)),
        mock.patch.object(os, "write", play.disk.write),
        mock.patch.object(run_module, "Engine", _Engine),
        *_patches_of_children(of, play, threading),
        mock.patch.object(run_module, "import_observers"),
        mock.patch.object(run_module, "observers_of", return_value=[]),
        mock.patch.object(RunFacts, "begin"),
        mock.patch.object(RunFacts, "end"),
        mock.patch.object(RunFacts, "note_changes", return_value=[]),
        mock.patch.object(log._logger, "handlers", [handler]),
        mock.patch.object(log, "_warned", set()),
    ]
    with contextlib.ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        run = str(play.run_directory)
        checkpoint.fetch_with(
            lambda *asked: _rank_of(of).fetch_checkpoint(*asked), run, lacks_storage=_LacksStorage(of)
        )
        stack.callback(_stop_watching)
        _watches.append(partial(_watch, play))
        yield


def _patches_of_children(of: World, play: Play, threading: Threading) -> list[Any]:
    """Return the patches for child processes, and for what hosts have of their own."""
    one_by_one = lambda function, items, threads=0: [function(item) for item in items]  # noqa: E731
    children.SimulatedStream.hosts = play.hosts

    def own_host() -> Host:
        assert of.current is not None
        return of.current.process.host  # type: ignore[no-any-return]

    return [
        *(mock.patch.object(module, "in_threads", one_by_one) for module in (executor, mover, remote_path)),
        mock.patch.object(order_link, "ChildLink", children.SimulatedChild),
        *(mock.patch.object(module, "channel_to_parent", children.channel_to_parent) for module in (mover, uploader)),
        mock.patch.object(mover, "Stream", children.SimulatedStream),
        mock.patch.object(uploader, "report_retries_to"),
        mock.patch.object(host_setup, "Background", SimulatedBackground),
        mock.patch.object(host_setup, "storage_problem", return_value="cannot be opened: No such file or directory"),
        mock.patch.object(run_lock, "threading", threading),
        mock.patch.object(host_cache, "usual_root", lambda: own_host().root / "cache"),  # noqa: PT008
        mock.patch.object(launch_checks, "package_versions", return_value={}),
        mock.patch.object(remote_path, "own_temporary_path", lambda: own_host().temporary),  # noqa: PT008
        mock.patch.object(remote_path, "find_filesystem", lambda url: (play.bucket, url.partition("://")[2])),
        mock.patch.object(run_lock, "_machine", return_value=""),  # all its processes have one pid
    ]


class _LacksStorage:
    """True for ranks of a host that lacks the storage."""

    def __init__(self, of: World) -> None:
        self._world = of

    def __bool__(self) -> bool:
        assert self._world.current is not None
        return not self._world.current.process.host.sees_storage


_watches: list[Callable[[str], None]] = []
"""Functions that are told of every path that is used, during a play."""


def _audit(event: str, given: tuple[Any, ...]) -> None:
    if _watches and event.startswith(("open", "os.")):
        for path in given[:2]:
            if isinstance(path, (str, os.PathLike)):
                _watches[-1](os.fspath(path))


sys.addaudithook(_audit)


def _watch(play: Play, path: str) -> None:
    """Let the storage not exist on a host that lacks it, and note that something has tried to use it there."""
    process = play.world.current.process if play.world.current else None
    if process and process.host and not process.host.sees_storage and path.startswith(str(play.storage)):
        play.violations.append(f"a host without the storage uses it: {process.name} opens {path}")
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _stop_watching() -> None:
    _watches.pop()


def _check_room(of: World, needed: int) -> None:
    assert of.current is not None
    if of.current.process.session.host.memory_is_full:  # type: ignore[attr-defined]
        raise OSError(errno.ENOSPC, "the memory of this host is full")


def _rank_of(of: World) -> Any:
    """Return the session of the rank that runs now."""
    assert of.current is not None
    return of.current.process.session  # type: ignore[attr-defined]


__all__ = ["Play", "played", "world"]
