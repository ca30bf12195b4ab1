"""The remains of a rank when it ends, and of a rank that became another program."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import uuid
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import FailureConfig
from distrain.decisions.run import stopping
from distrain.system import process
from distrain.torch import TorchConfig
from tests.conftest import wait_until

if TYPE_CHECKING:
    from tests.process.conftest import Fit

SHARED = Path("/dev/shm")


# -- shared memory ---------------------------------------------------------------------------------------------------


def share(config: dict[str, Any]) -> None:
    """Leave shared memory of two kinds behind; rank 1 is killed in the first attempt."""
    import torch
    from torch.utils.data import DataLoader

    context, attempt = distrain.get_context(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    name = f"{config['name']}-{context.get_world_rank()}-{attempt}"
    block = shared_memory.SharedMemory(create=True, size=1000, name=name)
    torch.multiprocessing.set_sharing_strategy("file_system")
    loader = iter(DataLoader([torch.zeros(100_000)] * 8, batch_size=2, num_workers=1))  # type: ignore[arg-type]
    kept = next(loader)
    pids = [os.getpid(), *(worker.pid for worker in loader._workers)]  # type: ignore[attr-defined]
    Path(config["place"], name).write_text("\n".join(map(str, pids)))
    assert [path for path in SHARED.iterdir() if path.name.split("_")[:2] in [["torch", str(pid)] for pid in pids]]
    distrain.collective.barrier()
    if context.get_world_rank() == 1 and attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 0:
        time.sleep(600)
    del block, kept


def test_no_shared_memory_is_left_by_failures_restarts_and_the_end(fit: Fit, tmp_path: Path) -> None:
    name, place = f"distrain-{uuid.uuid4().hex}", tmp_path / "pids"
    place.mkdir()
    run = replace(fit, backend=TorchConfig(backend="gloo"))
    result = run(share, {"name": name, "place": str(place)}, failure_config=FailureConfig(max_failures=1))
    assert result.error is None
    assert len(list(place.iterdir())) == 4
    pids = {pid for path in place.iterdir() for pid in path.read_text().split()}

    def left() -> list[str]:
        named = [path.name for path in SHARED.iterdir()]
        return [each for each in named if name in each or each.startswith(tuple(f"torch_{pid}_" for pid in pids))]

    wait_until(lambda: not left(), timeout_s=4 * process.TRACKERS_S, what="an empty /dev/shm")


# -- a rank whose process cannot be started --------------------------------------------------------------------------

NO_ROOM_FOR_RANK_1 = f"""
import sys
if "agent" in sys.orig_argv:
    import distrain.agent.forkserver_link as module
    send = module.ForkServerLink.send
    def limited(self, message, fds=()):
        if message["kind"] == "spawn" and message["rank"] == 1:
            raise OSError({errno.ETOOMANYREFS}, "Too many references: cannot splice")
        send(self, message, fds)
    module.ForkServerLink.send = limited
"""


def test_a_rank_that_cannot_be_started_ends_the_attempt_at_once(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel limits the descriptors on their way, but not for root."""
    (tmp_path / "sitecustomize.py").write_text(NO_ROOM_FOR_RANK_1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setattr(stopping, "STOP_TIMEOUT_S", 100.0)
    began = time.monotonic()
    with pytest.raises(distrain.DistrainError, match=r"cannot start rank 1: .*Too many references"):
        fit(lambda: time.sleep(600))
    assert time.monotonic() - began < stopping.STOP_TIMEOUT_S
