"""``distrain drill`` over hosts, one of which is lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.drill.cases import content

if TYPE_CHECKING:
    from tests.hosts.user import User

TRAIN = """
import contextlib, os
from pathlib import Path

import torch

import distrain

def train(config):
    folder = Path(config["folder"])
    for path in (folder / "mine.txt", Path("mine.txt"), folder / "rank" / os.environ["RANK"]):
        with contextlib.suppress(OSError):
            path.write_text("changed")
    checkpoint = distrain.get_checkpoint()
    state = checkpoint.to_dict() if checkpoint else {}
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    if state:
        model.load_state_dict(state["model"])
        if config.get("remembers"):
            optimizer.load_state_dict(state["optimizer"])
    for step in range(state.get("step", 0), 14):
        loss = model(torch.ones(1, 2)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.distributed.barrier()
        state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        distrain.report({"loss": loss.item()}, distrain.Checkpoint.from_dict(state) if step % 3 == 2 else None)
"""


@pytest.mark.timeout(300)
def test_the_loss_of_a_host_is_drilled(user: User) -> None:
    (user.folder / "train.py").write_text(TRAIN)
    (user.folder / "mine.txt").write_text("mine")
    (user.folder / "rank").mkdir()
    before = content(user.folder)
    command = ["--json", "--reports", "9", "--only", "host", "--hosts", "alpha:1,beta:1"]
    command += ["--set", f"folder={json.dumps(str(user.folder))}"]
    for remembers, outcome in (("true", "exact"), ("false", "drift")):
        words = [*command, "--set", f"remembers={remembers}", "train.py:train"]
        ran = user.python("-m", "distrain", "drill", *words, timeout_s=150)
        verdicts = json.loads(ran.out)["verdicts"]
        assert [one["outcome"] for one in verdicts] == ["exact", outcome], ran.out + ran.err
        assert [one["disturbance"] for one in verdicts][1:] == ["host beta is lost"]
        causes = [cause["name"] for cause in verdicts[1]["causes"]]
        assert causes == ([] if outcome == "exact" else ["optimizer"]), ran.out
    assert content(user.folder) == before
