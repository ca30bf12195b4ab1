"""The disk stalls for longer than a lease, while a callback does, too: no host is lost, and the run can be stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.conftest import wait_until
from tests.process.conftest import records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEASE_S = 2.0
SCRIPT = """
import sys, time
from pathlib import Path
import distrain
from distrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig, UserCallback

place, lease_s = Path(sys.argv[1]), float(sys.argv[2])

def train():
    rank = distrain.get_context().get_world_rank()
    slowest, step = 0.0, 0
    while not distrain.should_stop():
        step += 1
        began = time.monotonic()
        distrain.report({"step": step})
        slowest = max(slowest, time.monotonic() - began)
        (place / f"slowest-{rank}").write_text(str(slowest))
        time.sleep(0.05)

class Slow(UserCallback):
    def after_report(self, run_context, metrics, checkpoint):
        if (place / "frozen").exists():
            (place / "frozen").unlink()
            time.sleep(2 * lease_s)

run = RunConfig(
    name="run", storage_path=place / "disk", callbacks=[Slow()], failure_config=FailureConfig(host_lease_s=lease_s)
)
distrain.DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which can be frozen."""
    image, place = tmp_path / "image", tmp_path / "disk"
    if shutil.which("mkfs.ext4") is None or shutil.which("fsfreeze") is None:
        pytest.skip("there is no mkfs.ext4 or fsfreeze")
    place.mkdir()
    image.touch()
    os.truncate(image, 32 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, place], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["fsfreeze", "-u", place], stderr=subprocess.DEVNULL)
    subprocess.run(["umount", "--lazy", place], check=True)


def test_reports_go_on_while_the_disk_stalls_and_the_run_can_be_stopped_then(tmp_path: Path, disk: Path) -> None:
    run = disk / "run"
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(LEASE_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as user:
        try:
            wait_until(lambda: (run / "metrics.jsonl").exists() and records(run), what="the first reports")
            subprocess.run(["fsfreeze", "-f", disk], check=True)
            (tmp_path / "frozen").touch()
            time.sleep(2 * LEASE_S)
            slowest_s = max(float(path.read_text() or 0) for path in tmp_path.glob("slowest-*"))
            user.send_signal(signal.SIGTERM)
            wait_until(lambda: not children_of(user.pid), 50.0, "the end of the agent")
        finally:
            subprocess.run(["fsfreeze", "-u", disk], check=True)
        said, _ = user.communicate(timeout=60)
    assert user.returncode == 128 + signal.SIGTERM, said
    assert "silent for" not in said
    assert slowest_s < LEASE_S / 2
    story = json.loads((run / "run.json").read_text())
    assert (story["status"], len(story["attempts"])) == ("stopped", 1)
    steps = [record["metrics"]["step"] for record in records(run, rank=0)]
    assert steps == [*range(1, len(steps) + 1)]


def children_of(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()
