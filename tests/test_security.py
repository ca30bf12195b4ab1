"""Who can be reached over the network while a run lasts, and what a stranger can do there."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from distrain import RunConfig, ScalingConfig
from distrain.torch import TorchTrainer
from tests.conftest import run_members, wait_until


def train(config: dict[str, Any]) -> float:
    """Compute together, before and after strangers have come by."""
    import torch

    for moment in ("before", "after"):
        total = torch.ones(())
        dist.all_reduce(total)
        Path(config["folder"], f"{moment}-{dist.get_rank()}").write_text(str(os.getpid()))
        while not Path(config["folder"], "go").exists():
            time.sleep(0.01)
    return float(total)


class Bomb:
    """Leaves a file behind wherever it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._file,)


def listeners(processes: list[psutil.Process]) -> dict[int, psutil.Process]:
    """Port -> who listens there."""
    found = {}
    for process in processes:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.port] = process
    return found


def call(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.sendall(data)
        stranger.settimeout(0.2)
        with contextlib.suppress(OSError):
            stranger.recv(1 << 16)


def test_only_torch_listens_and_a_stranger_can_have_nothing_unpickled(
    test_run_id: str, tmp_path: Path, storage: Path
) -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage),
    )
    opened: dict[int, psutil.Process] = {}
    bomb = tmp_path / "bomb"

    def visit() -> None:
        wait_until(lambda: len(list(tmp_path.glob("before-*"))) == 2, timeout_s=60, what="the first all_reduce")
        opened.update(listeners(run_members(test_run_id)))
        for port in opened:
            for data in (pickle.dumps(Bomb(bomb)), b"GET / HTTP/1.1\r\n\r\n", b"\0distrain\0" + bytes(64)):
                call(port, data)
        (tmp_path / "go").touch()

    stranger = threading.Thread(target=visit)
    stranger.start()
    result = trainer.fit()
    stranger.join()
    assert result.return_value == 2.0, "strangers do not disturb"
    assert not bomb.exists()
    assert opened, "torch's store listens"
    workers = {int(file.read_text()) for file in tmp_path.glob("before-*")}
    assert {process.pid for process in opened.values()} <= workers, "agents and coordinator listen nowhere"
