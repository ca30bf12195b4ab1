"""``distrain drill`` on scripts that forget one thing, and on some that resume exactly.

A normal run takes a sample; ``scripts/drill_table`` runs them all.
"""

from __future__ import annotations

import contextlib
import sqlite3
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch

import distrain
from tests.drill.cases import CORRECT, EXAMPLES, FAULTY, Case, content, drill

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)
exact = pytest.mark.sample(1, of="scripts that resume exactly")
EXACT_EXAMPLES = (
    "accelerate_example", "async_dcp", "checkpoints", "exact_resume", "lightning_example", "sharded_checkpoints",
    "streaming_data",
)  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FAULTY)
def test_what_a_script_forgets_is_named(tmp_path: Path, name: str) -> None:
    seen = drill(FAULTY[name], tmp_path)
    assert seen.causes == {FAULTY[name].cause}, seen.output
    assert list(tmp_path.iterdir()) == []


@exact
@pytest.mark.parametrize("name", CORRECT)
def test_a_script_that_resumes_exactly_causes_no_alarm(tmp_path: Path, name: str) -> None:
    if name == "tensorflow" and find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow")
    seen = drill(Case(("--only", "kill,all", *CORRECT[name].arguments)), tmp_path)
    assert seen.report["ok"], seen.output
    assert [one["outcome"] for one in seen.report["verdicts"][:2]] == ["exact", "exact"], seen.output
    assert list(tmp_path.iterdir()) == []


@exact
@pytest.mark.parametrize("name", EXACT_EXAMPLES)
def test_an_example_resumes_exactly(tmp_path: Path, name: str) -> None:
    seen = drill(Case(("--workers", "2", "--only", "kill", str(EXAMPLES / f"{name}.py"))), tmp_path)
    assert seen.report["ok"], seen.output


def test_a_trainer_is_drilled_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_func(config: dict[str, float]) -> None:
        checkpoint = distrain.get_checkpoint()
        total = checkpoint.to_dict()["total"] if checkpoint else 0.0
        for step in range(int(total), 12):
            total += config["rate"]
            distrain.report({"total": total}, checkpoint=distrain.Checkpoint.from_dict({"total": total - step % 2}))

    monkeypatch.chdir(tmp_path)
    trainer = distrain.DataParallelTrainer(
        train_func, train_loop_config={"rate": 1.0}, scaling_config=distrain.ScalingConfig(num_workers=1)
    )
    report = distrain.drill(trainer, only=["kill"])
    assert [one.outcome for one in report.verdicts] == ["exact", "drift"]
    assert report.directory is None
    assert list(tmp_path.iterdir()) == []


def test_bad_command_lines_are_explained(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for arguments, words in {
        ("--only", "kil", str(script)): "did you mean",
        (): "nothing to drill",
        ("--as-ray", str(tmp_path / "none.py")): "there is no file",
        ("train.py", "--shards", "{workers}"): "pass --workers N",
    }.items():
        seen = drill(Case(arguments), tmp_path)
        assert words in seen.output
    script.write_text("raise ValueError('my own mistake')")
    assert "fails without any disturbance: ValueError: my own mistake" in drill(Case((str(script),)), tmp_path).output
    script.write_text("import distrain\ndistrain.report({'a': 1})\nraise ValueError('after a report')")
    assert "fails without any disturbance: ValueError: after a report" in drill(Case((str(script),)), tmp_path).output
    script.write_text("print('nothing to see')")
    assert "too little to compare" in (output := drill(Case((str(script),)), tmp_path).output)
    assert "ends by itself" in output
    assert "--fresh none*: must match files" in drill(Case(("--fresh", "none*", str(script))), tmp_path).output
    assert "--fresh /etc/passwd: must match files" in drill(Case(("--fresh", "/etc/passwd", "x.py")), tmp_path).output


def test_a_training_whose_parameters_never_change_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nnet = torch.nn.Linear(8, 1)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for step in range(6):\n    torch.nn.functional.cross_entropy(net(torch.rand(4, 8)), torch.rand(4, 1))"
        ".backward()\n    optimizer.step()\n    torch.save(net.state_dict(), 'model.pt')\n"
    )
    assert "no step changes the parameters" in drill(Case(("--only", "all", "train.py")), tmp_path).output


SNAPSHOT = """
import os, sqlite3, torch
net, first = torch.nn.Linear(8, 1), 0
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for parameter in net.parameters():
    torch.nn.init.ones_(parameter)
if os.path.exists("{here}/snapshot.pt"):
    first, state = torch.load("snapshot.pt")
    net.load_state_dict(state)
with sqlite3.connect("{here}/study.db") as rows:
    rows.execute("delete from trials")
for step in range(first, 12):
    net(torch.ones(4, 8) * step / 100).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save((step + 1, net.state_dict()), "{here}/snapshot.pt")
"""


def test_a_directory_that_was_trained_in_stays_as_it_is_and_its_snapshot_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SNAPSHOT.replace("{here}", str(tmp_path)))
    torch.save((12, torch.nn.Linear(8, 1).state_dict()), tmp_path / "snapshot.pt")
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as rows, rows:
        rows.execute("create table trials(x)")
        rows.executemany("insert into trials values (?)", [("x" * 1000,)] * 1500)
    before = content(tmp_path)
    seen = drill(Case(("--only", "all", "train.py")), tmp_path)
    assert "too little to compare" in seen.output
    assert "has read snapshot.pt" in seen.output
    assert seen.output.endswith("--fresh snapshot.pt\n")
    assert content(tmp_path) == before
    seen = drill(Case(("--only", "all", "--fresh", "snap*", "train.py")), tmp_path)
    assert [one["outcome"] for one in seen.report["verdicts"]] == ["exact", "exact"], seen.output
    assert content(tmp_path) == before
