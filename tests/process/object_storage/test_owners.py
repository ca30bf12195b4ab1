"""Ownership of a run in an object store: the user's process is killed, runs twice, or loses the run to another."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from distrain import (
    StorageError,
    TrainingFailedError,
)
from distrain.errors import ControllerError
from distrain.storage import run_lock
from distrain.system.remote_path import RemotePath
from tests.conftest import wait_until
from tests.process.object_storage.training import Waiter, train

if TYPE_CHECKING:
    from pathlib import Path

    from tests.process.conftest import Fit
    from tests.process.object_storage.bucket import Bucket

sampled = pytest.mark.sample(2, of="owners of a bucket")

SCRIPT = """
from __future__ import annotations
import sys, time, tempfile
from pathlib import Path
import distrain
from distrain import *

{train}

trainer = DataParallelTrainer(
    train, train_loop_config={{"size": 8_000_000, "steps": int(sys.argv[2])}},
    scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=sys.argv[1], name="run"),
)
print("began at", trainer.fit().return_value)
"""


@sampled
def test_a_process_that_is_killed_in_the_middle_of_an_upload_loses_nothing_committed(
    bucket: Bucket, tmp_path: Path
) -> None:
    """At once restarted on the same machine, where its owner is known to be dead."""
    (tmp_path / "script.py").write_text(SCRIPT.format(train=inspect.getsource(train)))

    def start(steps: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(tmp_path / "script.py"), bucket.url, str(steps)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    began_at = 0
    for _ in range(2):
        process = start(99)
        wait_until(lambda: len(bucket.committed("run")) > began_at, timeout_s=300.0, what="a checkpoint")
        wait_until(
            lambda: any(path.endswith(".pending.json") for path in bucket.files("run")),
            timeout_s=300.0,
            what="an upload",
        )
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        began_at = len(bucket.committed("run"))
    process = start(began_at + 1)
    said, complained = process.communicate(timeout=300)
    assert process.returncode == 0, complained
    assert int(said.split()[-1]) in (began_at, began_at + 1), "an order may have been carried out after the count"
    assert "looking for" not in complained
    assert not any(path.endswith(".pending.json") for path in bucket.files("run"))


@sampled
def test_the_owner_of_another_machine_is_watched_before_it_is_believed_dead(
    one_fit: Fit, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingFailedError):
        one_fit(train, {"fail_at": 1}, name="run")
    owner = json.loads(bucket.read("run", ".lock/000001"))
    owner |= {"machine": "another one", "host": "far", "pid": 77, "released": False}
    bucket.write("run", ".lock/000001", json.dumps(owner).encode())
    monkeypatch.setattr(run_lock, "HEARTBEAT_TIMEOUT_S", 2.0)
    assert one_fit(train, {}, name="run").return_value == 2
    assert "run was used by process 77 on far; waiting up to 2 s to see if it is still alive" in capsys.readouterr().err
    assert [path for path in bucket.files("run") if path.startswith(".lock")] == [".lock/000002"]


def test_a_lock_that_a_user_has_deleted_is_not_reported_as_taken_over(bucket: Bucket) -> None:
    run = RemotePath(f"{bucket.url}/run")
    lock = run_lock.RemoteLock.take(run)
    lock.beat()
    (run / ".lock").remove()
    with pytest.raises(StorageError, match=r"or its \.lock was deleted during the run"):
        lock.beat()


@sampled
def test_a_coordinator_whose_run_was_taken_over_writes_nothing_more(
    one_fit: Fit, bucket: Bucket, tmp_path: Path
) -> None:
    go = tmp_path / "go"

    def take_over() -> None:
        wait_until(lambda: bucket.committed("run"), timeout_s=300.0, what="a checkpoint")
        lock = json.loads(bucket.read("run", ".lock/000001"))
        bucket.write("run", ".lock/000002", json.dumps({**lock, "id": "another"}).encode())
        go.touch()

    with Waiter(go, take_over), pytest.raises(ControllerError, match="another process has taken over the run s3://"):
        one_fit(train, {"wait_at": 1, "until": str(go)}, name="run")
    assert bucket.committed("run") == ["checkpoint_000000"]
    assert json.loads(bucket.read("run", "run.json"))["status"] == "running"
    assert json.loads(bucket.read("run", ".lock/000002"))["id"] == "another"
