"""A run that is continued with other settings, another script or another commit, or whose checkpoint does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import json, os, sys
import torch
from distrain import Checkpoint, DataParallelTrainer, RunConfig, ScalingConfig, get_checkpoint, report

class Loss:
    pass

def train(config):
    model = torch.nn.Linear(config["model"]["size"], 1)
    if checkpoint := get_checkpoint():
        model.load_state_dict(checkpoint.to_dict()["model"])
    if not config["fails_early"]:
        report({"loss": 1.0}, checkpoint=Checkpoint.from_dict({"model": model.state_dict()}))
    raise ValueError("on purpose")

config = {"loss": Loss(), "tags": {"a", "b", "c", "d"}, **json.loads(sys.argv[1])}
run = RunConfig(name="run", storage_path="../runs")
DataParallelTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=0), run_config=run).fit()
"""
CHANGED = "distrain: changed since the last start (use another RunConfig.name to start from scratch):\n"
NEITHER = "continue:   start the run again with RunConfig(name='run')\n"


def start(project: Path, size: int, *, lr: float = 0.1, fails_early: bool = False) -> tuple[str, list[str]]:
    """Start the script; return what it shows, and what it says that has changed."""
    config = json.dumps({"lr": lr, "model": {"size": size}, "fails_early": fails_early})
    command = [sys.executable, "train.py", config]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    _, _, rest = done.stderr.partition(CHANGED)
    changed = rest.partition("\ndistrain: ")[0].splitlines()
    return done.stderr, [line.strip() for line in changed if line.startswith("    ")]


def commit(project: Path, text: str) -> str:
    (project / "train.py").write_text(text)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], cwd=project, check=True)
    subprocess.run([*git, "add", "."], cwd=project, check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], cwd=project, check=True)
    done = subprocess.run([*git, "rev-parse", "HEAD"], cwd=project, check=True, capture_output=True, text=True)
    return done.stdout[:12]


def test_a_continued_run_says_what_has_changed_and_how_to_start_afresh(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    old = commit(project, SCRIPT)
    shown, changed = start(project, 2)
    assert NEITHER in shown

    new = commit(project, f"{SCRIPT}# edited\n")
    shown, changed = start(project, 2, lr=0.01, fails_early=True)
    assert changed[0].startswith("script's sha256 ")
    # The object and the set look different in every process, but are the same.
    assert changed[1:] == [f"git commit {old} → {new}", "lr 0.1 → 0.01", "fails_early False → True"]
    assert NEITHER in shown, "the checkpoint was loaded"

    shown, changed = start(project, 3, lr=0.01, fails_early=True)
    assert changed == ["model/size 2 → 3"]
    assert (
        "continue:   no attempt could load checkpoint_000000; use the code and settings that wrote it, or start afresh "
        "with another RunConfig(name=...)\n"
    ) in shown

    manifest = json.loads((tmp_path / "runs" / "run" / "run.json").read_text())
    assert [one["attempt"] for one in manifest["changes"]] == [1, 2]
    assert manifest["changes"][1]["lines"] == ["model/size 2 → 3"]
    show = [sys.executable, "-m", "distrain", "show", "run", "--storage-path", str(tmp_path / "runs")]
    listed = subprocess.run(show, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "changes      2  model/size 2 → 3\n             1  script's sha256 " in listed
