"""Transports other than ssh: srun, and a command of the user.

The hosts are those of one lab with slurmd. The command of the user enters the namespaces of a host, as
``docker exec -i`` enters those of a container.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.conftest import is_alive, run_members, wait_until
from tests.hosts.lab import NETLAB
from tests.hosts.slurm import NODES, SLOTS, SlurmLab, start_slurm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SCRIPT = """
import json, os, signal, socket, sys, tempfile, time
from pathlib import Path
import distrain
from distrain import Checkpoint, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

place, what, workers, hosts, transport = Path(sys.argv[1]), *json.loads(sys.argv[2])

def train():
    context, before = distrain.get_context(), distrain.get_checkpoint()
    rank, first = context.get_world_rank(), 0
    if before:
        with before.as_directory() as folder:
            first = int(Path(folder, "step").read_text()) + 1
    for step in range(first, 4):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            facts = {"step": step, "host": socket.gethostname(), "first": first}
            distrain.report(facts, checkpoint=Checkpoint(folder) if rank == 0 else None)
        if step == 1 and first == 0:
            assert distrain.get_all_reported_checkpoints()  # it waits until they are committed
            if place.exists():  # not in a container
                (place / f"ready-{rank}").touch()
            if what == "crash" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(0.01)

(place / "pid").write_text(str(os.getpid()))
DataParallelTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=workers, hosts=hosts, transport=transport),
    run_config=RunConfig(
        name="run", storage_path=place / "runs", failure_config=FailureConfig(max_failures=1, host_lease_s=2.0)
    ),
).fit()
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    with start_slurm(tmp_path_factory.mktemp("transports") / "lab") as lab:
        yield lab


class Way:
    """A way to reach the hosts of the lab."""

    def __init__(self, lab: SlurmLab, transport: str) -> None:
        self.lab = lab
        self.before = ("salloc", "-Q", "--nodes=3", f"--ntasks-per-node={SLOTS}") if transport == "slurm" else ()
        self.hosts = ",".join(f"{node}:{SLOTS}" for node in NODES) if transport == "template" else None
        self.transport = entering(lab.folder) if transport == "template" else transport

    def start(self, place: Path, what: str) -> subprocess.Popen[str]:
        """Start the script, as the user in ``head``."""
        (place / "script.py").write_text(SCRIPT)
        options = json.dumps([what, 4, self.hosts, self.transport])
        return subprocess.Popen(
            self.lab.argv("head", *self.before, sys.executable, "script.py", str(place), options),
            cwd=place,
            env=self.lab.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def entering(folder: Path) -> str:
    """Return the template of a command that runs others on a host of a lab."""
    return f"{shlex.join([sys.executable, str(NETLAB), '--dir', str(folder)])} exec {{host}}"


@pytest.fixture
def way(request: pytest.FixtureRequest, lab: SlurmLab) -> Way:
    return Way(lab, request.param)


def last_hosts(place: Path) -> list[str]:
    """Return the host of each rank at its last report."""
    lines = [json.loads(line) for line in (place / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["metrics"]["step"] for line in lines) == 3
    found: dict[int, Any] = {line["rank"]: line["metrics"]["host"] for line in lines}
    return [found[rank] for rank in sorted(found)]


def reports(place: Path) -> int:
    metrics = place / "runs" / "run" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.mark.parametrize("way", ["slurm", "template"], indirect=True)
def test_ranks_train_where_the_slots_are_and_restart_after_a_crash(way: Way, tmp_path: Path) -> None:
    user = way.start(tmp_path, "crash")
    output, _ = user.communicate(timeout=90)
    assert user.returncode == 0, output
    assert "rank 1" in output
    assert "killed by SIGKILL" in output
    assert last_hosts(tmp_path) == ["n1", "n1", "n2", "n2"]
    lines = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"]["step"] for line in lines if line["rank"] == 0]
    assert steps == [0, 1, 2, 3], "it went on at the checkpoint"


@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("slurm", "the processes of a host"),
        ("template", "the processes of a host"),
        ("slurm", "the program that connects"),  # nsenter hands its pipes over, and may end
    ],
    indirect=["way"],
)
@pytest.mark.sample(2)
def test_a_spare_host_takes_the_place_of_a_lost_one(way: Way, tmp_path: Path, test_run_id: str, what: str) -> None:
    user = way.start(tmp_path, "lose")
    wait_until(lambda: user.poll() is not None or (tmp_path / "ready-2").exists(), 60.0, "training")
    members = [member for member in run_members(test_run_id) if is_alive(member)]
    if what == "the processes of a host":
        lost = [member for member in members if way.lab.has("n2", member)]
    else:
        children = [member for member in members if member.ppid() == int((tmp_path / "pid").read_text())]
        lost = [member for member in children if re.search(r"RUN_IDS=\S*\.1( |$)", " ".join(member.cmdline()))]
    assert lost
    for member in sorted(lost, key=lambda member: "agent" not in member.cmdline()[:2]):  # else it reports a failed rank
        with contextlib.suppress(psutil.NoSuchProcess):  # its guard was faster
            member.kill()
    output, _ = user.communicate(timeout=90)
    assert user.returncode == 0, output
    assert last_hosts(tmp_path) == ["n1", "n1", "n3", "n3"]
