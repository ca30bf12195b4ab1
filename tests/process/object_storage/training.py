"""Shared by the tests of runs in an object store: a training, and a thread that interferes with it."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

import distrain
from distrain import Checkpoint, CheckpointUploadMode
from tests.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it

MODES = (CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC)
KEPT_BY_ALL = {".lock/000001", "events.jsonl", "metrics.jsonl", "return_value.pkl", "run.json"}


def train(config: dict[str, Any]) -> int:
    """Report a checkpoint per step, of which each rank brings a file of its own and a common one. Returns the step that
    it began with."""
    rank = distrain.get_context().get_world_rank()
    checkpoint = distrain.get_checkpoint()
    first = 0
    print("training")
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            first = int(Path(folder, "step.txt").read_text()) + 1
            assert Path(folder, f"rank_{rank}.bin").read_bytes() == bytes([rank]) * config.get("size", 1000)
    for step in range(first, config.get("steps", 3)):
        folder = tempfile.mkdtemp()
        Path(folder, "step.txt").write_text(str(step))
        Path(folder, f"rank_{rank}.bin").write_bytes(bytes([rank]) * config.get("size", 1000))
        if step == config.get("wait_at"):
            wait_for(Path(config["until"]))
        distrain.report(
            {"step": step, "loss": float(config.get("losses", range(99))[step])},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_upload_mode=CheckpointUploadMode(config.get("mode", "SYNC")),
        )
        if step == config.get("fail_at") and checkpoint is None:
            distrain.get_all_reported_checkpoints()
            distrain.collective.barrier()
            raise RuntimeError("on purpose")
    return first


def wait_for(file: Path) -> None:
    file.with_suffix(".waiting").touch()
    while not file.exists():
        time.sleep(0.01)


class Waiter:
    """A thread that calls a function as soon as a training waits for ``file``."""

    def __init__(self, file: Path, then: Callable[[], Any]) -> None:
        self._file, self._then = file, then
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        wait_until(self._file.with_suffix(".waiting").exists, timeout_s=300.0, what="a rank that waits")
        self._then()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._thread.join()
