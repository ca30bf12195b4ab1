"""Unmodified scripts of Ray, with real workers: here and on other hosts, forked and spawned, and in a notebook."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from distrain import Result
from tests.documentation import ROOT, blocks_of
from tests.process.conftest import SSH_THAT_CLEARS_THE_ENVIRONMENT, make_fake_ssh

if TYPE_CHECKING:
    from pathlib import Path


SCRIPT = """
import argparse, os
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.data_parallel_trainer import DataParallelTrainer
from settings import EPOCHS

def train_func(config):
    from ray.air import session

    for epoch in range(EPOCHS):
        train.report(
            {"epoch": epoch, "size": session.get_world_size(), "argument": config["argument"],
             "place": os.environ.get("PLACE"), "setting": os.environ.get("SETTING")},
            checkpoint=Checkpoint.from_dict({"epoch": epoch}),
        )

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--argument")
    result = DataParallelTrainer(
        train_func,
        train_loop_config=vars(parser.parse_args()),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=os.path.join(os.path.dirname(__file__), "runs")),
    ).fit()
    assert result.checkpoint.to_dict()["epoch"] == 1
    raise SystemExit(7)
"""


def test_a_script_of_ray_trains_on_another_host(tmp_path: Path) -> None:
    """The host has nothing of this environment, but for what distrain forwards."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "settings.py").write_text("EPOCHS = 2")
    ssh = make_fake_ssh(tmp_path, f"export PLACE=far\n{SSH_THAT_CLEARS_THE_ENVIRONMENT.replace('-i', '-i PLACE=far')}")
    options = ["--hosts", "far:2", "--transport", f"{ssh.template[0]} {{host}} {{command}}", "--env", "SETTING=on"]
    command = [sys.executable, "-m", "distrain", "run", "--as-ray", *options, str(tmp_path / "train.py")]
    done = subprocess.run([*command, "--argument", "x"], capture_output=True, text=True, cwd="/", timeout=60)
    assert done.returncode == 7, done.stderr
    result = Result.from_path(tmp_path / "runs" / "run")
    assert result.metrics == {"epoch": 1, "size": 2, "argument": "x", "place": "far", "setting": "on"}
    assert len(result.best_checkpoints) == 2


FAILING = """
from ray.train import RunConfig, ScalingConfig, TrainingFailedError
from ray.train.data_parallel_trainer import DataParallelTrainer

def train_func():
    from ray import serve

def main():
    trainer = DataParallelTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2, start_method="spawn"),
        run_config=RunConfig(storage_path="runs"),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        return {}[str(error).splitlines()[0]]

main()
"""


def test_a_module_that_fails_shows_its_own_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With spawned workers, and the variable instead of the option."""
    monkeypatch.setenv("DISTRAIN_AS_RAY", "1")
    (tmp_path / "train.py").write_text(FAILING)
    command = [sys.executable, "-m", "distrain", "run", "-m", "train"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    *_, trace = done.stderr.rpartition("Traceback (most recent call last):\n  File ")
    assert trace.startswith(f'"{tmp_path}/train.py", line 19, in <module>\n    main()\n  File "{tmp_path}/train.py"')
    assert "ModuleNotFoundError: ray has no 'serve' here: distrain does not serve models" in trace.splitlines()[-1]


def test_the_script_of_xgboost_in_the_documentation(tmp_path: Path) -> None:
    """With two workers, which train one model."""
    pytest.importorskip("xgboost")
    [text] = [block.text for block in blocks_of(ROOT / "docs/migration/ray.md") if "XGBoostTrainer(" in block.text]
    (tmp_path / "train.py").write_text(f"{text}\nprint(model.num_boosted_rounds())")
    command = [sys.executable, "-m", "distrain", "run", "--as-ray", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "10"
    assert "train-rmse=" in done.stderr
