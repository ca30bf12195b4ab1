"""Jobs: they wait for slots and GPUs, live on without a terminal, and give back what they had however they end."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.hosts.claims import Claims, holder_of
from distrain.jobs.desk import Desk
from tests.conftest import wait_until
from tests.nvml import make_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRAIN = """\
import os, sys, time
import distrain
began = time.time()
with open(f"{sys.argv[1]}-{os.environ['RANK']}", "a") as file:
    print("code of the first day", began, os.environ.get("CUDA_VISIBLE_DEVICES"), file=file, flush=True)
    time.sleep(float(sys.argv[2]))
    print("end", time.time(), file=file)
"""
PATIENCE_S = 60.0


@pytest.fixture
def distrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Run a command in a directory with a script; its queue, runs and jobs are there, too."""
    for name, folder in (("DISTRAIN_QUEUE", "queue"), ("DISTRAIN_STORAGE_PATH", "runs"), ("XDG_STATE_HOME", "state")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(TRAIN)

    def run(*arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "distrain", *arguments],
            cwd=tmp_path / "work",
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=check,
            timeout=PATIENCE_S,
        )

    yield run
    for ticket in Desk(tmp_path / "queue").read().values():
        if ticket["state"] != "ended" and (job := job_process(ticket["name"])):
            os.kill(job, signal.SIGKILL)


def job_process(name: str) -> int | None:
    """Return the process of a job."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"job" in words and any(f"/{name}-".encode() in word for word in words):
            return int(folder.name)
    return None


def jobs(run: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    return {job["name"]: job for job in json.loads(run("queue", "--all", "--json").stdout)["jobs"]}


def wait_for(run: Callable[..., Any], state: str, *names: str) -> dict[str, dict[str, Any]]:
    wait_until(lambda: all(jobs(run)[name]["state"] == state for name in names), PATIENCE_S, f"{names} {state}")
    return jobs(run)


def test_a_job_outlives_its_terminal_and_trains_with_the_code_of_its_submission(
    tmp_path: Path, distrain: Callable[..., Any]
) -> None:
    child, terminal = pty.fork()
    if not child:
        os.chdir(tmp_path / "work")
        words = [
            sys.executable,
            "-m",
            "distrain",
            "submit",
            "--num-workers",
            "2",
            "train.py",
            str(tmp_path / "out"),
            "3",
        ]
        os.execv(sys.executable, words)
    said = b""
    while b"is in the queue" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)  # as a window that is closed: SIGHUP for all processes of the terminal
    os.waitpid(child, 0)
    (tmp_path / "work" / "train.py").write_text("raise SystemExit('code of the second day')\n")
    job = wait_for(distrain, "finished", "train-1")["train-1"]
    assert {len(names) for names in job["units"].values()} == {2}
    for rank in range(2):
        first, last = (tmp_path / f"out-{rank}").read_text().splitlines()
        assert first.startswith("code of the first day")
        assert last.startswith("end")
    assert "finished" in distrain("show", "train-1").stdout


def test_jobs_take_turns_also_after_one_is_killed(tmp_path: Path, distrain: Callable[..., Any]) -> None:
    """All need the only two slots."""
    for name, seconds in (("killed", "300"), ("cancelled", "300"), ("last", "1")):
        hosts = ("--hosts", "localhost:2")
        distrain("submit", *hosts, "--name", name, "train.py", str(tmp_path / name), seconds)
    wait_until(lambda: (tmp_path / "killed-1").exists(), PATIENCE_S, "the first job")
    told = distrain("submit", "--name", "killed", "train.py", "x", "1", check=False)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert "the queue has a job 'killed' already" in told.stderr
    typo = distrain("submit", "--after", "kiled", "train.py", check=False)
    assert "--after kiled: the queue has no such job" in typo.stderr
    waiting = distrain("logs", "last", check=False).stderr + distrain("show", "cancelled", check=False).stderr
    assert "cancelled (waiting) has not begun: 0 of 2 slots are free" in waiting
    process = job_process("killed")
    assert process is not None
    os.kill(process, signal.SIGKILL)
    died = time.monotonic()
    wait_until(lambda: (tmp_path / "cancelled-1").exists(), PATIENCE_S, "the second job")
    assert time.monotonic() - died < 20 + 10, "void after 20 s; a busy machine starts workers slowly"
    assert distrain("cancel", "cancelled").stdout == "cancelled is cancelled\n"
    wait_for(distrain, "finished", "last")
    assert {name: job["state"] for name, job in jobs(distrain).items()} == {
        "killed": "lost",
        "cancelled": "cancelled",
        "last": "finished",
    }
    again = distrain("submit", "--resume").stdout
    assert again == "killed continues\n", "the one that nobody has ended"
    wait_for(distrain, "running", "killed")
    assert "cancelled" in distrain("cancel", "killed").stdout
    assert distrain("submit", "--resume").stdout == ""


RAY = """\
import sys
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

def train(config):
    ray.train.report({"seen": 1})

print("arguments", sys.argv[1:])
print("metrics", TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit().metrics)
sys.exit(0)
"""


def test_options_of_a_script_are_its_own_and_its_end_is_that_of_the_job(
    tmp_path: Path, distrain: Callable[..., Any]
) -> None:
    """Also of a script of Ray, which calls fit() itself, and whose error ends it as it does without a queue."""
    (tmp_path / "work" / "ray_train.py").write_text(RAY)
    (tmp_path / "work" / "bad.py").write_text(RAY.replace('{"seen": 1}', "None[0]"))
    hosts = ("--hosts", "localhost:2", "--as-ray")
    distrain("submit", *hosts, "--name", "good", "ray_train.py", "--resume", "--hosts", "x")
    wait_for(distrain, "finished", "good")
    (log,) = (tmp_path / "state" / "distrain" / "jobs").glob("good-*/console.log")
    assert "arguments ['--resume', '--hosts', 'x']" in log.read_text()
    assert "'seen': 1" in log.read_text()
    distrain("submit", *hosts, "--name", "bad", "bad.py")
    wait_for(distrain, "failed", "bad")
    (log,) = (tmp_path / "state" / "distrain" / "jobs").glob("bad-*/console.log")
    assert "is not subscriptable" in log.read_text()
    alone = distrain("run", "--as-ray", "bad.py", check=False)
    waited = distrain("run", *hosts, "--wait", "bad.py", check=False)
    assert alone.returncode == waited.returncode == 1
    for ran in (alone, waited):
        assert "is not subscriptable" in ran.stderr
        assert "start the run again with RunConfig(name=" in ran.stderr, "no option has that name"
    assert distrain("submit", "--resume").stdout == "", "both have ended"


def test_a_queue_that_cannot_be_read_hides_no_run(tmp_path: Path, distrain: Callable[..., Any]) -> None:
    ran = distrain("run", "--json", "--wait", "--name", "first", "train.py", str(tmp_path / "out"), "0")
    assert json.loads(ran.stdout)["exit_code"] == 0
    assert jobs(distrain)["first"]["run"] == str(tmp_path / "runs" / "first")
    (tmp_path / "file").touch()
    broken = {"DISTRAIN_QUEUE": str(tmp_path / "file" / "queue")}
    listed = distrain("ls", **broken)
    assert "first" in listed.stdout
    assert "jobs are not shown: the queue" in listed.stderr
    assert "first: finished" in distrain("show", "fir", **broken).stdout


def test_a_job_that_its_user_stops_does_not_come_back(tmp_path: Path, distrain: Callable[..., Any]) -> None:
    distrain("submit", "--name", "stopped", "train.py", str(tmp_path / "out"), "300")
    wait_until(lambda: (tmp_path / "out-0").exists(), PATIENCE_S, "the job")
    distrain("stop", "stopped")
    wait_for(distrain, "cancelled", "stopped")
    assert distrain("submit", "--resume").stdout == ""


def test_gpus_of_a_job_are_left_to_it(tmp_path: Path, distrain: Callable[..., Any]) -> None:
    """A driver without GPUs shows two, of which a job of somebody else has one."""
    driver = {"LD_LIBRARY_PATH": str(make_driver(tmp_path / "driver")), "FAKE_GPUS": "gg", "FAKE_UUID": "job-"}
    claims = Claims("job big of ann")
    assert claims.take(["GPU-job-2"])
    assert not Claims("job small of bob").take(["GPU-job-1", "GPU-job-2"]), "all or none"
    assert holder_of("GPU-job-1") is None
    threading.Thread(target=lambda: [claims.answer(claims.sockets[0]) for _ in range(100)], daemon=True).start()
    assert holder_of("GPU-job-2") == "job big of ann"

    shown = json.loads(distrain("gpus", "--json", **driver).stdout)["gpus"]
    assert [(gpu["gpu"], gpu["user"]) for gpu in shown] == [("GPU-job-1", ""), ("GPU-job-2", "job big of ann")]
    refused = distrain("run", "--gpus", "2", "train.py", str(tmp_path / "two"), "0", check=False, **driver)
    assert "1 GPU left to job big of ann; --force uses them all the same" in refused.stderr
    distrain("run", "--gpus", "1", "train.py", str(tmp_path / "one"), "0", **driver)
    assert (tmp_path / "one-0").read_text().splitlines()[0].endswith(" GPU-job-1")
    distrain("run", "--gpus", "2", "--force", "train.py", str(tmp_path / "force"), "0", **driver)
    distrain("run", "--gpus", "1", "--wait", "train.py", str(tmp_path / "waited"), "0", **driver)
    assert (tmp_path / "waited-0").read_text().splitlines()[0].endswith(" GPU-job-1")
    too_many = distrain("run", "--gpus", "3", "--wait", "train.py", "x", "0", check=False, **driver)
    assert too_many.returncode == 2
    assert re.search(r"needs 3 workers with 1 GPU each, but \S+ has room for 2", too_many.stderr)
