"""The crash table of hosts: what is killed, cut off or frozen x on which host x with a restart or not x kind of hosts.

Each cell trains on alpha and beta, strikes one of them, and is followed by the census of tests/conftest.py, which sees
the processes of all hosts. A normal run of the tests takes a sample of the cells, whose seed is in their names
(DISTRAIN_TABLE_SEED=N repeats it); ``--all`` takes every cell. tests/process/test_crash_table.py has failures of ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.conftest import NOTHING_LEFT_WITHIN_S, is_alive, run_members, wait_until
from tests.hosts.lab import Hosts, Lab, end_lab, start_lab
from tests.hosts.running import LEASE_S, Running, cut_power, set_link
from tests.tables import BUSY_FACTOR, deal_cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SAMPLE = 5
SEEN_WITHIN_S = 1.0
"""After a connection has broken, or a lease has run out."""
HANG_TIMEOUT_S = 12.0
"""Enough for workers that import torch to start on a busy machine."""
ENDS_WITHIN_S = 10.0
"""From then on: what is left is stopped, and a host that cannot be reached is tried for five seconds."""

SCRIPT = """
import json, os, sys, tempfile, time
from pathlib import Path
import distrain
from distrain import Checkpoint, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

place, scaling, failures = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])

def train():
    context, before = distrain.get_context(), distrain.get_checkpoint()
    count = int(Path(before.path, "count").read_text()) if before else 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "count").write_text(str(count + 1))
        distrain.report({"size": context.get_world_size()}, checkpoint=Checkpoint(folder))
    (place / f"ready-{count}-{context.get_world_rank()}").touch()
    while count == 0 and not (place / "end").exists():
        time.sleep(0.01)
    return count

run = RunConfig(name="run", storage_path=place / "runs", failure_config=FailureConfig(**failures))
try:
    result = DataParallelTrainer(train, scaling_config=ScalingConfig(**scaling), run_config=run).fit()
except BaseException as error:
    print("ENDED", type(error).__name__, str(error), flush=True)
    raise
print("FINISHED", result.return_value, flush=True)
"""


# -- what happens to a host -------------------------------------------------------------------------------------------


def kill(name: str) -> Callable[[Running, str], None]:
    def strike(running: Running, host: str) -> None:
        match name:
            case "sshd":
                victim = running.sshd(host)
            case "ssh":
                victim = running.ssh(host)
            case "worker":
                victim = running.worker(host)
            case _:
                victim = running.program(host, name)
        victim.kill()

    return strike


def link(state: str) -> Callable[[Running, str], None]:
    def strike(running: Running, host: str) -> None:
        set_link(running.lab, host, state)

    return strike


def everybody(number: int) -> Callable[[Running, str], None]:
    """A signal to all processes of a host; its first one does nothing but wait for them."""

    def strike(running: Running, host: str) -> None:
        for member in psutil.process_iter():
            if running.lab.has(host, member):
                with contextlib.suppress(psutil.Error):
                    member.send_signal(number)

    return strike


def agent(number: int) -> Callable[[Running, str], None]:
    def strike(running: Running, host: str) -> None:
        running.program(host, "agent").send_signal(number)

    return strike


def nothing(running: Running, host: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Blow:
    """What is done to a host, and undone at the end; what the run ends with without a restart; and how silent it is:
    whether it is seen by the lease only. ``loses``: the host, not only its ranks."""

    strike: Callable[[Running, str], None]
    undo: Callable[[Running, str], None] = nothing
    phrase: str
    silent: bool = False
    loses: bool = True

    @property
    def seen_within_s(self) -> float:
        return BUSY_FACTOR * SEEN_WITHIN_S + LEASE_S * self.silent


BLOWS: dict[str, Blow] = {
    "kill -9 sshd": Blow(
        strike=kill("sshd"), phrase="HOST: distrain's process there has ended: exit code 255, which is ssh's when"
    ),
    "kill -9 ssh": Blow(
        strike=kill("ssh"), phrase="HOST: distrain's process there has ended: ssh on this machine was killed by SIGKILL"
    ),
    "kill -9 agent": Blow(strike=kill("agent"), phrase="HOST: distrain's process there has ended: exit code "),
    "kill -9 forkserver": Blow(
        strike=kill("forkserver"), phrase="RANK on HOST: lost: the forkserver, its parent, has died", loses=False
    ),
    "kill -9 worker": Blow(strike=kill("worker"), phrase="RANK on HOST: was killed by SIGKILL (9)", loses=False),
    "link down": Blow(
        strike=link("down"),
        undo=link("up"),
        phrase="HOST: it has been silent for 2 s",
        silent=True,
    ),
    "SIGSTOP of the host": Blow(
        strike=everybody(signal.SIGSTOP),
        undo=everybody(signal.SIGCONT),
        phrase="HOST: it has been silent for 2 s",
        silent=True,
    ),
    "SIGSTOP of the agent": Blow(
        strike=agent(signal.SIGSTOP),
        undo=everybody(signal.SIGCONT),
        phrase="HOST: it has been silent for 2 s: host or network down",
        silent=True,
    ),
}
HOSTS = ["alpha", "beta"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    over: str
    blow: str
    host: str
    restarts: int

    def __str__(self) -> str:
        return f"{self.blow} - {self.host} - {'a restart' if self.restarts else 'no restart'} - {self.over}"


HAVE = {
    "namespaces": [blow for blow in BLOWS if blow != "SIGSTOP of the agent"],
    "one_sshd": ["kill -9 sshd", "kill -9 agent"],
    "fake_ssh": [blow for blow in BLOWS if blow not in ("kill -9 sshd", "kill -9 ssh", "link down")],
}
"""By kind of the hosts."""


def cells() -> list[Cell]:
    places = itertools.product(HOSTS, (0, 1))
    return [Cell(over=o, blow=b, host=h, restarts=r) for h, r in places for o, blows in HAVE.items() for b in blows]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    deal_cells(metafunc, cells(), sample=SAMPLE)


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path, test_run_id: str) -> Iterator[Callable[..., Running]]:
    """Start a run, and wait until it trains. ``over``: hosts, or the name of a fixture of some."""
    started: list[Running] = []

    def start(
        *, over: Hosts | str = "namespaces", hosts: list[str] = HOSTS, script: str = SCRIPT, **failures: float
    ) -> Running:
        lab = request.getfixturevalue(over) if isinstance(over, str) else over
        spare = ["gamma"] if "alpha" in hosts else []
        place = lab.folder_for(tmp_path)
        started.append(Running(lab, place, test_run_id, script, hosts=hosts, spare=spare, **failures))
        started[-1].wait_until_it_trains()
        return started[-1]

    yield start
    for running in started:
        running.close()


def test_a_blow(cell: Cell, start: Callable[..., Running]) -> None:
    blow, rank = BLOWS[cell.blow], HOSTS.index(cell.host)
    running = start(over=cell.over, max_failures=cell.restarts)
    struck_worker, others_worker = running.worker(cell.host), running.worker(HOSTS[1 - rank])
    struck = time.monotonic()
    blow.strike(running, cell.host)
    try:
        wait_until(lambda: not is_alive(others_worker), what="the stop of the other host's rank")
        stopped_s = time.monotonic() - struck
        assert stopped_s < blow.seen_within_s
        output, ended = running.end()
        print(f"the others were stopped after {stopped_s:.2f} s, the run ended after {ended - struck:.2f} s")
        assert ended - struck < blow.seen_within_s + ENDS_WITHIN_S
        if cell.restarts:
            assert output.splitlines()[-1] == "FINISHED 1", output
            if blow.loses:
                assert f"distrain: rank {rank} on {cell.host} was lost: " in output
                assert f"distrain: 2 workers on {HOSTS[1 - rank]}, gamma, without {cell.host}\n" in output
                assert "distrain: trying to reach gamma\n" in output  # and not the host that is left
        else:
            title = "ENDED ControllerError" if blow.loses else "ENDED WorkerGroupError"
            phrase = blow.phrase.replace("HOST", cell.host).replace("RANK", f"rank {rank}")
            assert f"{title} {phrase}" in output
            assert not blow.loses or "FailureConfig(max_failures=1) lets a run continue once" in output
        if "SIGSTOP" not in cell.blow:  # by itself, while nobody can reach it
            wait_until(lambda: not is_alive(struck_worker), LEASE_S + BUSY_FACTOR, "the end of the struck host's rank")
    finally:
        blow.undo(running, cell.host)


def test_a_link_that_is_down_for_less_than_the_lease_does_no_harm(
    start: Callable[..., Running], request: pytest.FixtureRequest
) -> None:
    """With ``--all``, for five seconds of the usual fifteen."""
    down_s, lease_s = (5.0, 15.0) if request.config.getoption("--all") else (1.0, 4.0)
    running = start(host_lease_s=lease_s)
    link("down")(running, "beta")
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            running.user.wait(timeout=down_s)
    finally:
        link("up")(running, "beta")
    running.let_it_finish()
    output, _ = running.end()
    assert output.splitlines()[-1] == "FINISHED 0", output


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("over", "host"), [("namespaces", "alpha"), ("namespaces", "beta"), ("one_sshd", "beta"), ("fake_ssh", "beta")]
)
def test_nothing_is_left_on_any_host_when_the_users_process_is_killed(
    start: Callable[..., Running], over: str, host: str
) -> None:
    """Also with an agent that dies in the same moment."""
    running = start(over=over)
    agent = running.program(host, "agent")
    running.user.kill()
    agent.kill()
    wait_until(lambda: not run_members(running.run_id), NOTHING_LEFT_WITHIN_S, "the end of all processes")


@pytest.mark.sample(1, of="long waits for a host")
def test_a_host_without_power_is_named(start: Callable[..., Running], tmp_path: Path) -> None:
    holder = start_lab(tmp_path / "other lab", "one:1", "two:1")
    try:
        other = Lab(folder=tmp_path / "other lab")
        running = start(over=other, hosts=["one", "two"], max_failures=1)
        worker = running.worker("one")
        cut_power(other, "two")
        struck = time.monotonic()
        wait_until(lambda: not is_alive(worker), what="the stop of the other host's rank")
        assert time.monotonic() - struck < LEASE_S + BUSY_FACTOR * SEEN_WITHIN_S
        output, _ = running.end()
        assert "ENDED ControllerError two: it has been silent for 2 s: host or network down" in output
        assert (
            "tried again: distrain's process there has ended: exit code 255, which is ssh's when it cannot connect"
            in output
        )
        assert "two did not come back at once (FailureConfig.host_wait_s)" in output
    finally:
        end_lab(holder, tmp_path / "other lab")


TORCH = """
from distrain.torch import TorchTrainer as DataParallelTrainer

def train():
    import torch
    rank = distrain.get_context().get_world_rank()
    while True:
        torch.distributed.all_reduce(torch.ones(1000))
        (place / f"ready-0-{rank}").touch()
"""


@pytest.mark.sample(1, of="long waits for a host")
def test_two_hosts_that_do_not_reach_each_other_are_a_hang(start: Callable[..., Running]) -> None:
    """Both live, and both can be reached: nobody is lost, and no rank is to blame."""
    script = SCRIPT.replace("\nrun = ", TORCH + "\nrun = ")
    running = start(script=script, hang_timeout_s=HANG_TIMEOUT_S)
    struck = time.monotonic()
    isolate(running.lab, "on")
    try:
        output, ended = running.end()
    finally:
        isolate(running.lab, "off")
    assert ended - struck < HANG_TIMEOUT_S + ENDS_WITHIN_S
    assert "ENDED HangError no rank has reported or printed anything for 12 s; they were:" in output
    assert "2 ranks (0, 1) in all_reduce at script.py:" in output


def isolate(lab: Lab, state: str) -> None:
    """``on``: alpha and beta are cut off from each other, but not from head."""
    for host in HOSTS:
        done = lab.run("switch", "bridge", "link", "set", "dev", host, "isolated", state)
        assert done.returncode == 0, done.stderr
