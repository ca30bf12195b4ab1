"""Runs in an object store that is missing, fails, does not answer, or goes away for good."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from distrain import Checkpoint, StorageError, get_all_reported_checkpoints, report
from distrain.errors import ControllerError
from distrain.storage import run_lock
from tests.conftest import wait_until
from tests.process.object_storage.bucket import Bucket, Door
from tests.process.object_storage.training import Waiter, train, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.process.conftest import Fit

sampled = pytest.mark.sample(2, of="a bucket in trouble")


@sampled
def test_a_bucket_that_is_not_there_is_known_at_once(one_fit: Fit, bucket: Bucket) -> None:
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/.*bucket does not exist"):
        replace(one_fit, storage="s3://no-such-bucket")(train, name="run")  # type: ignore[arg-type]
    bucket.door.shut()
    with pytest.raises(StorageError, match=r"^cannot use the storage: cannot read s3://.*(Could not connect|closed)"):
        one_fit(train, name="run")
    assert time.monotonic() - began < 200, "not after the patience for passing troubles, which is 300 s"
    assert not list(Path(tempfile.gettempdir()).glob("distrain-*/spool/*"))


@sampled
def test_a_host_that_cannot_reach_the_storage_is_named_before_the_first_checkpoint(
    one_fit: Fit, bucket: Bucket, tmp_path: Path
) -> None:
    environment = {"env_vars": {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}}
    config = {"wait_at": 0, "until": str(tmp_path / "never")}
    with pytest.raises(ControllerError, match=r"localhost cannot use the storage: .*127.0.0.1:9") as raised:
        one_fit(train, config, name="run", worker_runtime_env=environment)
    assert "once that is fixed, start the run again with RunConfig(name='run')" in str(raised.value)


@sampled
@pytest.mark.parametrize(
    ("trouble", "requests"),
    [
        pytest.param(Door.fail, 6, id="503"),
        pytest.param(Door.shut, 12, id="reset"),
        pytest.param(Door.hold, 1, id="silence"),
    ],
)
def test_a_trouble_that_passes_costs_only_time(
    one_fit: Fit, bucket: Bucket, trouble: Callable[[Door], None], requests: int, tmp_path: Path
) -> None:
    """After so many requests in vain, of which s3fs makes several for one of distrain's."""
    go = tmp_path / "go"

    def make_trouble() -> None:
        trouble(bucket.door)
        go.touch()
        bucket.door.wait_for_requests(requests)
        bucket.door.open()

    with Waiter(go, make_trouble):
        result = one_fit(train, {"wait_at": 1, "until": str(go)}, name="run")
    assert result.return_value == 0
    assert bucket.committed("run") == [f"checkpoint_00000{n}" for n in range(3)]


@sampled
def test_ctrl_c_ends_the_wait_for_a_silent_storage_and_leaves_no_process(
    one_fit: Fit, bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"

    def silence_and_stop() -> None:
        wait_until(lambda: bucket.committed("run"), timeout_s=300.0, what="a checkpoint")
        [uploader] = [child for child in psutil.Process().children() if "uploader" in child.cmdline()]
        bucket.door.hold()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            with contextlib.suppress(psutil.TimeoutExpired):
                uploader.wait(timeout=4)
                return

    with pytest.raises(KeyboardInterrupt), Waiter(go, silence_and_stop):
        one_fit(train, {"wait_at": 1, "until": str(go)}, name="run")
    assert not [child for child in psutil.Process().children() if "uploader" in child.cmdline()]
    assert "the wait for the storage was interrupted" in capsys.readouterr().err
    bucket.door.open()
    assert bucket.committed("run") == ["checkpoint_000000"]


@sampled
def test_a_run_whose_last_reports_cannot_be_stored_has_not_finished(
    one_fit: Fit, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRAIN_STORAGE_PATIENCE_S", "1")
    monkeypatch.setattr(run_lock, "HEARTBEAT_TIMEOUT_S", 2.0)  # for the lock that nobody could remove
    closed = tmp_path / "closed"

    def report_alone(config: dict[str, str]) -> int:
        report({"step": 0}, checkpoint=Checkpoint.from_dict({}))
        get_all_reported_checkpoints()  # waits until it is committed
        report({"step": 1})
        wait_for(Path(config["until"]))
        return 1

    def shut() -> None:
        bucket.door.shut()
        closed.touch()

    with Waiter(closed, shut), pytest.raises(ControllerError, match="cannot write metrics and logs in"):
        one_fit(report_alone, {"until": str(closed)}, name="run")
    bucket.door.open()
    assert one_fit(report_alone, {"until": str(closed)}, name="run").return_value == 1
    lines = map(json.loads, bucket.read("run", "metrics.jsonl").splitlines())
    found = sorted((line["attempt"], line["rank"], line["metrics"]["step"]) for line in lines)
    every = [(attempt, rank, step) for attempt in (0, 1) for rank in (0, 1) for step in (0, 1)]
    assert found == every, "what was reported while the storage was gone is there, too"
