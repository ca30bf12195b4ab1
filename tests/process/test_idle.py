"""Processes of a run whose ranks sleep: they sleep, too."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import distrain

if TYPE_CHECKING:
    from tests.process.conftest import Fit

LOOKED_FOR_S = 3.0


def test_while_all_ranks_sleep_no_process_wakes_up_for_long(fit: Fit) -> None:
    """A sign of life and its answer are all that may come in this time."""

    def train(config: dict[str, int]) -> dict[str, int]:
        def wake_ups() -> dict[str, int]:
            user = psutil.Process(config["user"])
            agent = psutil.Process().parent().parent()  # type: ignore[union-attr]
            names = {user.pid: "user", agent.pid: "agent", agent.ppid(): "guard", os.getppid(): "forkserver"}
            members = [user, *user.children(recursive=True)]
            return {
                names.get(member.pid, " ".join(filter(None, member.cmdline()))[-60:]): sum(
                    int(Path(task, "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
                    for task in Path(f"/proc/{member.pid}/task").iterdir()
                )
                for member in members
                if member.pid != os.getpid()
            }

        folder = tempfile.mkdtemp()
        Path(folder, "model").touch()
        distrain.report(
            {}, distrain.Checkpoint(folder), checkpoint_upload_mode=distrain.CheckpointUploadMode.ASYNC
        )  # so that there is an uploader
        while distrain.get_checkpoint() is None:
            time.sleep(0.01)
        time.sleep(1.0)
        before = wake_ups()
        time.sleep(LOOKED_FOR_S)
        after = wake_ups()
        return {name: after[name] - before[name] for name in before}

    result = fit(train, {"user": os.getpid()}, workers=1)
    found = result.return_value
    assert {"user", "agent", "guard", "forkserver"} < set(found)
    assert any("uploader" in name for name in found), found
    assert all(count <= 3 for count in found.values()), found
