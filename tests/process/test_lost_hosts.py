"""Runs that lose hosts and continue: on spare slots, with the host that is back, or with fewer workers.

The hosts are agents on this machine, behind a program that replaces ssh. While a file ``down-NAME`` exists, that
host is down.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import pytest

import distrain
from distrain import (
    BackendConfig,
    Checkpoint,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from distrain.coordinator.connection.transport import Transport
from distrain.coordinator.run.fit import run_work
from distrain.decisions.run import growth
from distrain.hosts.host_info import usable_cpus
from distrain.hosts.hostfile import HostSpec
from distrain.page.data import attempts_table
from distrain.page.facts import Facts
from distrain.storage.runs.listing import run_at
from distrain.worker.job.job import FunctionWork
from tests.process.conftest import make_fake_ssh, records

if TYPE_CHECKING:
    from collections.abc import Callable

SSH = """\
if [ -e "{place}/down-$2" ]; then touch "{place}/tried-$2"; echo "$2 is down" >&2; exit 255; fi
export FAKE_HOST="$2"
for command; do :; done
cd / && exec sh -c "$command"
"""
RESTARTS = FailureConfig(max_failures=3, host_wait_s=0.0, retry_same_failure=True)


@dataclass(frozen=True)
class Hosts:
    """``hosts(function, workers=..., one=2, two=2)`` trains on hosts with these slots."""

    place: Path

    def __call__(
        self,
        function: Callable[..., Any],
        *,
        workers: Any,
        grow: Literal["checkpoint"] | None = None,
        failures: FailureConfig = RESTARTS,
        **slots: int,
    ) -> Result:
        ssh = make_fake_ssh(self.place, SSH.format(place=self.place)).template[0]
        return run_work(
            FunctionWork(function=function, config={"place": self.place}, backend=BackendConfig()),
            ScalingConfig(num_workers=workers, grow=grow),
            RunConfig(name="run", storage_path=self.place / "runs", failure_config=failures),
            transports=[
                Transport(
                    host=HostSpec(name=name, address=name, slots=most),
                    template=(ssh, "-T", name, "{command}"),
                    ships=False,
                    lease_s=failures.host_lease_s,
                )
                for name, most in slots.items()
            ],
        )

    def placed(self) -> list[list[str]]:
        """Return the host of each rank, by attempt."""
        found: dict[int, dict[int, str]] = {}
        for record in records(self.place / "runs" / "run"):
            found.setdefault(record["attempt"], {})[record["rank"]] = record["metrics"]["host"]
            assert record["metrics"]["of"] >= len(found[record["attempt"]])
        return [[ranks[rank] for rank in sorted(ranks)] for _, ranks in sorted(found.items())]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


# -- what workers do -------------------------------------------------------------------------------------------------


def begin() -> int:
    """Commit a checkpoint that counts the attempts. Return the number of earlier ones, from the last checkpoint."""
    context = distrain.get_context()
    before = distrain.get_checkpoint()
    count = int(Path(before.path, "count").read_text()) if before else 0
    metrics = {"host": os.environ.get("FAKE_HOST", "here"), "of": context.get_world_size()}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "count").write_text(str(count + 1))
        distrain.report(metrics, checkpoint=Checkpoint(folder))
    return count


def kill_the_agent() -> None:
    agent = psutil.Process().parents()[1]
    assert "distrain" in " ".join(agent.cmdline())
    os.kill(agent.pid, signal.SIGKILL)
    time.sleep(1000)


def is_last() -> bool:
    context = distrain.get_context()
    return context.get_world_rank() == context.get_world_size() - 1


def lose_the_last_host_once(config: dict[str, Any]) -> int:
    count = begin()
    distrain.collective.barrier()
    if count == 0 and is_last():
        kill_the_agent()
    distrain.collective.barrier()
    return count


# -- the host that is back -------------------------------------------------------------------------------------------


def test_a_host_whose_agent_was_killed_is_back_at_once(hosts: Hosts, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert hosts(lose_the_last_host_once, workers=4, one=2, two=2).return_value == 1
    assert time.monotonic() - began < 10.0
    assert hosts.placed() == [["one", "one", "two", "two"]] * 2
    said = capfd.readouterr().err
    assert "distrain: ranks 2, 3 on two were lost: distrain's process there has ended" in said
    assert "distrain: trying to reach two again\n" in said
    assert "distrain: restart 1 of 3, from " in said


# -- without it ------------------------------------------------------------------------------------------------------


def test_spare_slots_take_the_place_of_a_lost_host_and_its_workers_have_fewer_threads_each(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Libraries read the number of threads when they are imported, before any worker is forked."""

    def train(config: dict[str, Any]) -> None:
        count = begin()
        Path(config["place"], f"threads-{count}-{os.environ['RANK']}").write_text(os.environ["OMP_NUM_THREADS"])
        distrain.collective.barrier()
        if count == 0 and os.environ["FAKE_HOST"] == "one":
            Path(config["place"], "down-one").touch()
            kill_the_agent()
        distrain.collective.barrier()

    def threads(count: int, rank: int) -> int:
        return int((hosts.place / f"threads-{count}-{rank}").read_text())

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    hosts(train, workers=2, one=1, two=3)
    assert hosts.placed() == [["one", "two"], ["two", "two"]]
    assert "distrain: 2 workers on two, without one\n" in capfd.readouterr().err
    assert threads(0, 1) == usable_cpus()
    assert threads(1, 0) == threads(1, 1) == max(1, usable_cpus() // 2)


def test_a_run_of_min_and_max_goes_on_smaller_and_grows_again(hosts: Hosts) -> None:
    def train(config: dict[str, Any]) -> int:
        count = begin()
        distrain.collective.barrier()
        if count == 0 and is_last():
            Path(config["place"], "down-two").touch()
            kill_the_agent()
        if count == 1:
            Path(config["place"], "down-two").unlink(missing_ok=True)
            raise ValueError("the next one is as large as the first")
        distrain.collective.barrier()
        return count

    assert hosts(train, workers=(2, 4), one=2, two=2).return_value == 2
    assert hosts.placed() == [["one", "one", "two", "two"], ["one", "one"], ["one", "one", "two", "two"]]


def test_a_run_takes_a_host_that_is_back_at_the_next_checkpoint(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Although no failure is left; and a try in vain says nothing."""

    def train(config: dict[str, Any]) -> tuple[int, int]:
        place, first = Path(config["place"]), begin()
        distrain.collective.barrier()
        if first == 0 and is_last():
            (place / "down-two").touch()
            kill_the_agent()
        if first == 0 or distrain.get_context().get_world_size() == 4:
            distrain.collective.barrier()
            return first, distrain.get_context().get_world_size()
        if is_last():
            (place / "tried-two").unlink()
            while not (place / "tried-two").exists():
                time.sleep(0.05)
            (place / "down-two").unlink()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            distrain.collective.barrier()
            begin()
            time.sleep(0.1)
        raise ValueError("the host was not used")

    monkeypatch.setattr(growth, "FIRST_INTERVAL_S", 0.5)
    failures = FailureConfig(max_failures=1, host_wait_s=0.0)
    result = hosts(train, workers=(2, 4), grow="checkpoint", failures=failures, one=2, two=2)
    assert hosts.placed() == [["one", "one", "two", "two"], ["one", "one"], ["one", "one", "two", "two"]]
    run = hosts.place / "runs" / "run"
    attempts = json.loads((run / "run.json").read_bytes())["attempts"]
    assert [attempt["failure"] is None for attempt in attempts] == [False, True, True]
    assert [attempt.get("planned_end") for attempt in attempts] == [None, "two is back", None]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [(event["attempt"], event["why"]) for event in events if event["event"] == "growth"] == [(1, "two is back")]
    made = max(record["index"] for record in records(run) if record["attempt"] == 1)
    assert 0 <= attempts[1]["first_step"] + made - attempts[2]["first_step"] <= 1, "reports that were repeated"
    said = capfd.readouterr().err
    assert f"two is back: continuing from {attempts[2]['checkpoint']} with 4 workers instead of 2\n" in said
    assert "two is down" not in said.partition("restart 1 of 1, from")[2]
    assert "restart 2" not in said
    assert result.return_value[1] == 4
    shown = run_at(run)
    assert "two is back" in str(attempts_table(Facts(shown, shown.location)))


# -- silence ---------------------------------------------------------------------------------------------------------


def test_a_coordinator_that_was_stopped_for_longer_than_the_lease_starts_anew(hosts: Hosts) -> None:
    """After Ctrl-Z or the sleep of a laptop, the hosts have ended their workers."""

    def train(config: dict[str, Any]) -> int:
        count = begin()
        distrain.collective.barrier()
        if count == 0:
            Path(config["place"], "struck").touch()
            time.sleep(1000)
        return count

    struck = hosts.place / "struck"
    pid = os.getpid()
    stopper = f"until [ -e '{struck}' ]; do sleep 0.01; done; kill -STOP {pid}; sleep 4.5; kill -CONT {pid}"
    failures = FailureConfig(max_failures=1, host_lease_s=2.0, retry_same_failure=True)
    with subprocess.Popen(["sh", "-c", stopper]):
        assert hosts(train, workers=2, one=1, two=1, failures=failures).return_value == 1
