"""Who can be reached over the network while a run lasts, and what a stranger can do there."""

from __future__ import annotations

import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distrain import RunConfig, ScalingConfig
from distrain.torch import TorchTrainer
from tests.conftest import run_members, wait_until
from tests.strangers import Listener, Visit, listeners, messages, visit


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


def test_only_torch_listens_and_a_stranger_can_have_nothing_unpickled(
    test_run_id: str, tmp_path: Path, storage: Path
) -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage),
    )
    opened: list[Listener] = []
    answered: list[Visit] = []
    bomb = tmp_path / "bomb"

    def come_by() -> None:
        wait_until(lambda: len(list(tmp_path.glob("before-*"))) == 2, timeout_s=60, what="the first all_reduce")
        try:
            ours = {member.pid for member in run_members(test_run_id)}
            opened.extend(listener for listener in listeners() if listener.pid in ours)
            answered.extend(visit("127.0.0.1", port, bomb) for port in {listener.port for listener in opened})
        finally:
            (tmp_path / "go").touch()

    stranger = threading.Thread(target=come_by)
    stranger.start()
    result = trainer.fit()
    stranger.join()
    assert result.return_value == 2.0, "strangers do not disturb"
    assert not bomb.exists()
    assert opened, "torch's store listens"
    workers = {int(file.read_text()) for file in tmp_path.glob("before-*")}
    assert {listener.pid for listener in opened} <= workers, "agents and coordinator listen nowhere"
    assert len(answered) == len({listener.port for listener in opened})
    assert all(who.answers for who in answered), "the stranger has reached everybody"


def test_the_bomb_of_the_stranger_is_a_bomb(tmp_path: Path) -> None:
    pickle.loads(messages(tmp_path / "bomb")[0])
    assert (tmp_path / "bomb").is_dir()
