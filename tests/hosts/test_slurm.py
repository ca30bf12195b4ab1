"""Runs in jobs of a real Slurm cluster with three nodes. test_transports.py has lost hosts of srun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain import Result
from tests.conftest import NOTHING_LEFT_WITHIN_S, run_members, wait_until
from tests.hosts.lab import ROOT
from tests.hosts.slurm import CONFINES_JOBS, NODES, SLOTS, SlurmLab, start_slurm

if TYPE_CHECKING:
    from collections.abc import Iterator

sampled = pytest.mark.sample(1, of="Slurm")

SCRIPT = """
import json, os, signal, socket, sys, tempfile, time
from pathlib import Path
import distrain
from distrain import Checkpoint, CheckpointConfig, DataParallelTrainer, RunConfig, ScalingConfig

place, options = Path(sys.argv[1]), json.loads(sys.argv[2])

def train():
    context, before = distrain.get_context(), distrain.get_checkpoint()
    first = int(Path(before.path, "step").read_text()) + 1 if before else 0
    rank = context.get_world_rank()
    facts = {"host": socket.gethostname(), "rank": rank, "task": os.environ.get("SLURM_PROCID", "none")}
    for step in range(first, options["steps"]):
        is_stopping = distrain.should_stop()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            Path(folder, "bytes").write_bytes(bytes(options.get("bytes", 0)))
            keeps = rank == 0 and (is_stopping or options.get("bytes"))
            distrain.report({"step": step, **facts}, checkpoint=Checkpoint(folder) if keeps else None)
        (place / f"trains-{rank}").touch()
        if is_stopping:
            return "stopped"
        time.sleep(options.get("pause_s", 0.05))
    return "done"

result = DataParallelTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=options["workers"]),
    run_config=RunConfig(
        storage_path=place / "runs",
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    ),
).fit()
print("returned", result.return_value, "at step", result.metrics["step"])
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """A cluster for the tests of this module. A test ends its jobs."""
    with start_slurm(tmp_path_factory.mktemp("slurm") / "lab") as lab:
        yield lab


@pytest.fixture
def slurm(cluster: SlurmLab) -> Iterator[SlurmLab]:
    wait_until(cluster.is_idle, what="idle nodes")
    yield cluster
    cluster.slurm("scancel", "--full", "--user=root")


def line(place: Path, **options: Any) -> str:
    """Return the line of a batch script that trains."""
    (place / "train.py").write_text(SCRIPT)
    return f"PYTHONPATH='{ROOT}' '{sys.executable}' train.py '{place}' '{json.dumps(options)}'"


def output(place: Path) -> str:
    return (place / "out").read_text() if (place / "out").exists() else ""


def checkpoints(place: Path) -> list[Path]:
    return sorted((place / "runs").glob("*/checkpoint_*"))


def reports(place: Path) -> list[dict[str, Any]]:
    [run] = (place / "runs").iterdir()
    return [json.loads(text)["metrics"] for text in (run / "metrics.jsonl").read_text().splitlines()]


def wait_until_it_trains(place: Path, workers: int) -> None:
    ready = [place / f"trains-{rank}" for rank in range(workers)]
    wait_until(lambda: all(path.exists() for path in ready), 60.0, "training")


# -- the allocation --------------------------------------------------------------------------------------------------


@sampled
def test_a_batch_script_says_nothing_about_hosts(slurm: SlurmLab, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path, line(tmp_path, steps=2, workers=6))
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert "returned done at step 1" in output(tmp_path)
    placed = {(facts["rank"], facts["host"], facts["task"]) for facts in reports(tmp_path)}
    assert placed == {(rank, NODES[rank // SLOTS], "none") for rank in range(6)}, "srun's rank is hidden"


@sampled
def test_the_command_line_starts_a_worker_per_task_also_in_salloc(slurm: SlurmLab, tmp_path: Path) -> None:
    """Workers have the CPUs of the job: both of the first node, and one of the second."""
    (tmp_path / "script.py").write_text("import os; print('of', os.environ['WORLD_SIZE'], os.sched_getaffinity(0))")
    argv = [sys.executable, "-m", "distrain.launch", "--storage-path", str(tmp_path / "runs"), "script.py"]
    environment = {"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = slurm.run("head", "salloc", "--nodes=2", "--ntasks=3", *argv, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    said = [line.partition(" of 3 ") for line in sorted(done.stdout.splitlines())]
    assert [prefix for prefix, _, _ in said] == [f"[rank {rank} n{rank // SLOTS + 1}]" for rank in range(3)]
    if CONFINES_JOBS:
        cpus = [cpus for _, _, cpus in said]
        assert cpus[:2] == ["{0, 1}"] * 2
        assert cpus[2] in ("{0}", "{1}")
    [run] = (tmp_path / "runs").iterdir()
    assert run.name.startswith("script-"), "a person in salloc starts again with changes: that is another run"


def test_an_allocation_with_too_few_slots_is_an_error_that_names_the_variable(slurm: SlurmLab, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path, line(tmp_path, steps=2, workers=7))
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert "num_workers is 7, but the hosts have only 6 slots: n1 2, n2 2, n3 2" in output(tmp_path)
    assert f"Slurm job {job} (SLURM_TASKS_PER_NODE=2(x3)): ask Slurm for more tasks" in output(tmp_path)


# -- signals of Slurm ------------------------------------------------------------------------------------------------


REQUEUE = """
code=$?
case $code in 138 | 143) scontrol requeue "$SLURM_JOB_ID"; sleep 20 ;; esac
exit $code"""
"""The lines of docs/slurm.md behind the training. Slurm requeues only jobs that it has ended itself."""


@sampled
@pytest.mark.parametrize("why", ["time limit", "preemption"])
def test_slurms_warning_leads_to_a_checkpoint_and_the_requeued_job_continues_there(
    slurm: SlurmLab, tmp_path: Path, why: str
) -> None:
    """Slurm sends the signal of ``--signal`` and the SIGTERM before a preemption to the steps of a job, not to its
    batch script."""
    job = slurm.submit(tmp_path, line(tmp_path, steps=60, workers=6) + REQUEUE)
    wait_until_it_trains(tmp_path, 6)
    if why == "time limit":
        slurm.slurm("scancel", "--signal=USR1", job)  # as Slurm does for --signal=USR1@120
    else:
        slurm.submit(tmp_path, "true", "--partition=urgent", "--output=/dev/null")
    wait_until(lambda: slurm.facts(job)["Restarts"] == "1", 30.0, "the requeue")
    stopped_at = int((checkpoints(tmp_path)[-1] / "step").read_text())
    number = "SIGUSR1" if why == "time limit" else "SIGTERM"
    assert f"{number}: the run stops; the workers have " in output(tmp_path)
    slurm.start_requeued(job)
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert "returned done at step 59" in output(tmp_path)
    steps = [facts["step"] for facts in reports(tmp_path) if facts["rank"] == 0]
    assert steps == list(range(60)), f"stopped at {stopped_at}"


def test_scancel_leaves_nothing_on_any_node_and_a_complete_checkpoint(
    slurm: SlurmLab, tmp_path: Path, test_run_id: str
) -> None:
    size = 100_000_000
    job = slurm.submit(tmp_path, line(tmp_path, steps=10_000, workers=6, bytes=size, pause_s=0.0))
    wait_until_it_trains(tmp_path, 6)
    wait_until(lambda: checkpoints(tmp_path), 30.0, "a checkpoint")
    assert run_members(test_run_id)
    slurm.slurm("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    wait_until(lambda: not run_members(test_run_id), NOTHING_LEFT_WITHIN_S, "the end of all processes")
    latest = Result.from_path(next((tmp_path / "runs").iterdir())).checkpoint
    assert latest is not None
    assert len((latest.remote_path or Path(latest.path)).joinpath("bytes").read_bytes()) == size
