"""Scripts with the real Hydra: fit() inside @hydra.main, sweeps, and scripts whose ranks all call it."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distrain.cli.main import run_main
from distrain.worker.job.hydra_script import set_defaults

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
lr: 0.1
model: {width: 8, sizes: [1, 2], name: "net-${model.width}"}
out: ${hydra:runtime.output_dir}
"""
FIT = """
import hydra
import distrain

def train_func(config):
    distrain.report({"lr": config.lr})
    return type(config).__name__, config.model.name, config.model.sizes[1], config.out

@hydra.main(config_path=".", config_name="config", version_base=None)
def main(config):
    scaling = distrain.ScalingConfig(num_workers=2)
    result = distrain.DataParallelTrainer(train_func, train_loop_config=config, scaling_config=scaling).fit()
    print("returned", result.return_value)

main()
"""
SCRIPT = """
import logging
import hydra
import distrain

@hydra.main(config_path=".", config_name="config", version_base=None)
def main(config):
    logging.getLogger("train").info("rank %s", distrain.get_context().get_world_rank())
    distrain.collective.barrier()
    if config.lr == 7:
        raise ValueError("seven")

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "fit.py").write_text(FIT)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100, check=False)
    return done.stdout + done.stderr


def test_fit_in_a_sweep(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run lies beside its output directory. The config arrives without loss."""
    said = run("fit.py", "--multirun", "lr=1,2", "hydra.job.chdir=true")
    [sweep] = folder.glob("multirun/*/*")
    for number, lr in enumerate((1, 2)):
        assert f"returned ('DictConfig', 'net-8', 2, '{sweep / str(number)}')" in said
        assert os.listdir(sweep / str(number) / ".hydra")
        assert lr in [manifest["train_loop_config"]["lr"] for manifest in manifests(sweep)]
    first = manifests(sweep)[0]
    assert first["train_loop_config"]["model"] == {"width": 8, "sizes": [1, 2], "name": "net-8"}
    assert run_main(["ls", str(sweep)], []) == 0
    assert "not a run" not in capsys.readouterr().out


def manifests(storage: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in storage.glob("*/run.json")]


def test_a_script_whose_ranks_call_hydra(folder: Path) -> None:
    """All ranks share one output directory, in the run directory, and only rank 0 writes there."""
    options = ["--num-workers", "2", "--storage-path", "runs", "--name", "a"]
    said = run("-m", "distrain.launch", *options, "train.py", "-m", "lr=1,7")
    assert "on localhost: ValueError: seven" in said, said  # and not SystemExit: 1
    assert not [name for name in os.listdir(folder) if name in ("outputs", "multirun")]
    output = folder / "runs/a/hydra"
    assert sorted(path.name for path in output.iterdir()) == ["0", "1", "multirun.yaml"]
    assert re.findall(r"rank \d", (output / "0/train.log").read_text()) == ["rank 0"]


@pytest.mark.parametrize(
    ("config", "overrides", "dirs"),
    [
        ("lr: 1", [], ["OURS", "OURS"]),
        ("lr: 1", ["hydra.run.dir=a", "hydra.sweep.dir=b"], ["a", "b"]),
        ("hydra: {run: {dir: 'exp/${name}'}}\nname: n", ["name=m"], ["exp/m", "OURS"]),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_only_hydras_defaults_change(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    overrides: list[str],
    dirs: list[str],
    rank: int,
) -> None:
    """The output directory of a project's config, or of the command line, is used: the run may resume there."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    Plugins.instance()  # they have defaults, too
    monkeypatch.setattr(ConfigStore.instance(), "repo", copy.deepcopy(ConfigStore.instance().repo))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    (tmp_path / "config.yaml").write_text(config)
    set_defaults(SimpleNamespace(world_rank=rank, get_trial_dir=lambda: str(tmp_path)))  # type: ignore[arg-type]
    with initialize_config_dir(str(tmp_path), version_base=None):
        found = compose("config", overrides, return_hydra_config=True).hydra
    assert [found.run.dir, found.sweep.dir] == [path.replace("OURS", f"{tmp_path}/hydra") for path in dirs]
    assert found.output_subdir == (None if rank else ".hydra")
    assert found.runtime.choices["hydra/job_logging"] == ("stdout" if rank else "default")
