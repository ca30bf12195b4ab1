"""The decisions about a run, driven without processes."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from distrain import BackendConfig, FailureConfig, ScalingConfig, wire
from distrain.api.job import Job
from distrain.decisions import events
from distrain.decisions.run.machine import RunStateMachine
from distrain.decisions.states import RunState
from distrain.hosts.host import HostInfo, HostSettings
from distrain.hosts.host_info import hello_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def simulate_decisions(hosts: int, workers_per_host: int) -> dict[str, Any]:
    """Return the CPU seconds of each phase, in the form of scripts/simulate."""
    names = [f"host{number:05}" for number in range(hosts)]
    workers = hosts * workers_per_host
    settings = HostSettings(lease_s=15.0, slots=workers_per_host, directory="/", sys_path=[])
    request = events.RunRequest(
        run_id="run",
        run_name="run",
        storage_path="/runs",
        job=Job(blob=b""),
        backend=BackendConfig(),
        scaling=ScalingConfig(num_workers=workers),
        hosts=dict.fromkeys(names, settings),
        failure_config=FailureConfig(max_failures=1),
        stop_grace_s=0.0,
        argv=[],
        python_flags=[],
    )
    world = _World(request)
    phases: dict[str, dict[str, float]] = {}
    before = time.process_time()

    def measure(name: str, state: RunState) -> None:
        nonlocal before
        assert world.machine.state is state, (name, world.machine.state)
        now = time.process_time()
        phases[name] = {"cpu_s": now - before, "wall_s": now - before}
        before = now

    world.do(world.machine.start(0.0))
    measure("ready", RunState.RUNNING)
    world.happened(events.HostLost(names[hosts // 2], "it vanished"))
    measure("restarted", RunState.RUNNING)
    world.finish()
    measure("end", RunState.FINISHED)
    return {"hosts": hosts, "workers": workers, "ended_by": "", "phases": phases}


class _World:
    """Hosts that answer at once."""

    def __init__(self, request: events.RunRequest) -> None:
        self.machine = RunStateMachine(request)
        self._ranks: dict[str, list[int]] = {}
        self._attempt = -1
        self._inbox: deque[tuple[str, events.Event | wire.Message]] = deque()
        self._is_busy = False

    def happened(self, event: events.Event | wire.Message, host: str = "") -> None:
        self.do(self.machine.handle(event, 0.0, host))

    def do(self, actions: list[events.Action]) -> None:
        for action in actions:
            match action:
                case events.ConnectHost(host):
                    self._inbox.append((host, _hello(host)))
                case events.AttemptStarts(attempt):
                    self._attempt = attempt
                case events.SendMessage(host, message):
                    self._inbox.extend((host, answer) for answer in self._answers(host, message))
        if self._is_busy:
            return
        self._is_busy = True
        while self._inbox or self.machine.state.waits_for_files:
            waits = self.machine.state.waits_for_files
            host, event = ("", events.Outstanding()) if waits else self._inbox.popleft()
            self.do(self.machine.handle(event, 0.0, host))
        self._is_busy = False

    def _answers(self, host: str, message: wire.Message) -> Iterator[wire.Message]:
        match message:
            case wire.ReservePort(attempt=attempt):
                yield wire.RendezvousPort(attempt=attempt, port=1)
            case wire.Start(attempt=attempt, ranks=ranks):
                self._ranks[host] = [spec["rank"] for spec in ranks]
                for rank in self._ranks[host]:
                    yield wire.Running(attempt=attempt, rank=rank)
            case wire.Stop(attempt=attempt):
                for rank in self._ranks[host]:
                    yield wire.Exited(attempt=attempt, rank=rank, signal=9, by_us=True)
                yield wire.HostIdle(attempt=attempt)
            case wire.Release(attempt=attempt, rank=rank):
                yield wire.Exited(attempt=attempt, rank=rank, exit_code=0)
                if rank == self._ranks[host][-1]:
                    yield wire.HostIdle(attempt=attempt)

    def finish(self) -> None:
        """Let every rank finish."""
        for host, ranks in self._ranks.items():
            for rank in ranks:
                outcome = wire.Outcome(
                    attempt=self._attempt,
                    rank=rank,
                    ok=True,
                    stage="run",
                    error=None,
                    traceback="",
                    exit_code=0,
                    body=b"",
                )
                self.happened(outcome, host)


def _hello(host: str) -> wire.Hello:
    return hello_of(HostInfo(name=host, cpus=8, memory_bytes=1 << 40, network=host, address=host))
