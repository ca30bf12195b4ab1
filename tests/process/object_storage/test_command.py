"""The distrain command on runs in an object store."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import distrain
from distrain import Checkpoint

if TYPE_CHECKING:
    from tests.process.conftest import Fit
    from tests.process.object_storage.bucket import Bucket


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "distrain", *arguments], capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout


def test_a_run_in_a_bucket_is_listed_shown_and_deleted(s3_fit: Fit, bucket: Bucket) -> None:
    def train() -> None:
        print("hello")
        distrain.report({"loss": 0.5}, checkpoint=Checkpoint.from_dict({"step": 1}))

    s3_fit(train, name="run", workers=1)
    bucket.write("photos", "1.jpg", b"x")
    [listed] = json.loads(command("ls", bucket.url, "--json"))["runs"]
    assert (listed["name"], listed["state"], listed["metrics"]) == ("run", "finished", {"loss": 0.5})
    shown = command("show", f"{bucket.url}/run")
    assert "run: finished after " in shown
    assert " checkpoint_000000 1 +" in " ".join(shown.split())
    assert "[rank 0] hello\n" in command("logs", "last", "--storage-path", bucket.url)
    assert "deleted 1 run" in command("clean", bucket.url, "--finished", "--yes")
    assert bucket.files("run") == {}
    assert bucket.files("photos") == {"1.jpg": 1}
