"""The crash table of hosts: what is killed, cut off or frozen x on which host x with a restart or not.

Each cell trains on alpha and beta, strikes one of them, and is followed by the census of tests/conftest.py, which sees
the processes of all hosts. A normal run of the tests takes a sample of the cells; ``--all`` takes every cell.
tests/process/test_crash_table.py has failures of ranks.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.conftest import NOTHING_LEFT_WITHIN_S, is_alive, run_members, wait_until
from tests.hosts.running import LEASE_S, Running, set_link
from tests.tables import BUSY_FACTOR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.hosts.lab import Lab

SEEN_WITHIN_S = 1.0
"""After a connection has broken, or a lease has run out."""
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
    count = 0
    if before:
        with before.as_directory() as folder:
            count = int(Path(folder, "count").read_text())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "count").write_text(str(count + 1))
        distrain.report({"size": context.get_world_size()}, checkpoint=Checkpoint(folder))
    if place.exists():  # not on a bare host
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


def pull_the_cable(running: Running, host: str) -> None:
    set_link(running.lab, host, "down")


def plug_it_in(running: Running, host: str) -> None:
    set_link(running.lab, host, "up")


def everybody(number: int) -> Callable[[Running, str], None]:
    """A signal to all processes of a host; its first one does nothing but wait for them."""

    def strike(running: Running, host: str) -> None:
        for member in psutil.process_iter():
            if running.lab.has(host, member):
                with contextlib.suppress(psutil.Error):
                    member.send_signal(number)

    return strike


def nothing(running: Running, host: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Blow:
    """What is done to a host, and undone at the end; what the run ends with without a restart; and how silent it is:
    whether it is seen by the lease only."""

    strike: Callable[[Running, str], None]
    undo: Callable[[Running, str], None] = nothing
    phrase: str = "it has been silent for 2 s"
    silent: bool = False

    @property
    def seen_within_s(self) -> float:
        return BUSY_FACTOR * SEEN_WITHIN_S + LEASE_S * self.silent


ENDED = "distrain's process there has ended"
BLOWS: dict[str, Blow] = {
    "kill -9 sshd": Blow(
        strike=lambda running, host: running.sshd(host).kill(), phrase=f"{ENDED}: exit code 255, which is ssh's when"
    ),
    "kill -9 ssh": Blow(
        strike=lambda running, host: running.ssh(host).kill(),
        phrase=f"{ENDED}: ssh on this machine was killed by SIGKILL",
    ),
    "kill -9 agent": Blow(
        strike=lambda running, host: running.program(host, "agent").kill(), phrase=f"{ENDED}: exit code "
    ),
    "link down": Blow(strike=pull_the_cable, undo=plug_it_in, silent=True),
    "SIGSTOP": Blow(strike=everybody(signal.SIGSTOP), undo=everybody(signal.SIGCONT), silent=True),
}
HOSTS = ["alpha", "beta"]


@pytest.fixture
def start(lab: Lab, tmp_path: Path, test_run_id: str) -> Iterator[Callable[..., Running]]:
    """Start a run on alpha and beta, with gamma to spare, and wait until it trains."""
    started: list[Running] = []

    def start(script: str = SCRIPT, **failures: float) -> Running:
        started.append(Running(lab, tmp_path, test_run_id, script, hosts=HOSTS, spare=["gamma"], **failures))
        started[-1].wait_until_it_trains()
        return started[-1]

    yield start
    for running in started:
        running.close()


@pytest.mark.sample(4)
@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", BLOWS)
def test_a_blow(start: Callable[..., Running], name: str, host: str, restarts: int) -> None:
    blow, rank = BLOWS[name], HOSTS.index(host)
    running = start(max_failures=restarts)
    struck_worker, others_worker = running.worker(host), running.worker(HOSTS[1 - rank])
    struck = time.monotonic()
    blow.strike(running, host)
    try:
        wait_until(lambda: not is_alive(others_worker), what="the stop of the other host's rank")
        assert time.monotonic() - struck < blow.seen_within_s
        output, ended = running.end()
        assert ended - struck < blow.seen_within_s + ENDS_WITHIN_S
        if restarts:
            assert output.splitlines()[-1] == "FINISHED 1", output
            assert f"distrain: rank {rank} on {host} was lost: " in output
            assert f"distrain: 2 workers on {HOSTS[1 - rank]}, gamma, without {host}\n" in output
            assert "distrain: trying to reach gamma\n" in output  # and not the host that is left
        else:
            assert f"ENDED ControllerError {host}: {blow.phrase}" in output
            assert "FailureConfig(max_failures=1) lets a run continue once" in output
        if name != "SIGSTOP":  # by itself, while nobody can reach it
            wait_until(lambda: not is_alive(struck_worker), LEASE_S + BUSY_FACTOR, "the end of the struck host's rank")
    finally:
        blow.undo(running, host)


@pytest.mark.sample(1)
@pytest.mark.parametrize("host", HOSTS)
def test_nothing_is_left_on_any_host_when_the_users_process_is_killed(start: Callable[..., Running], host: str) -> None:
    """Also with an agent that dies in the same moment."""
    running = start()
    agent = running.program(host, "agent")
    running.user.kill()
    agent.kill()
    wait_until(lambda: not run_members(running.run_id), NOTHING_LEFT_WITHIN_S, "the end of all processes")
