"""The work that a command line names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distrain.cli.run.options import make_parser, parse
from distrain.cli.run.target import work_of
from distrain.worker.job.job import ScriptWork, TargetWork, make_job

EARLY = "import os\nos.environ['OMP_NUM_THREADS'] = '7'\nimport torch"


@pytest.mark.parametrize("file", ["train.py", "pack/train.py", "pack/__main__.py"])
@pytest.mark.parametrize("source", [EARLY, "import torch"])
def test_nothing_is_imported_before_a_script_that_sets_variables_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / file).write_text(source)
    targets = [[file]] if file == "train.py" else [[file], ["-m", file.removesuffix(".py").replace("/", ".")]]
    if file == "pack/__main__.py":
        targets = [["-m", "pack"]]
    for target in targets:
        work = work_of(parse(make_parser(), target), [])
        assert isinstance(work, ScriptWork)
        assert work.imports_alone is (source == EARLY)
        assert ("torch" in make_job(work).preload) is (source != EARLY)


def config_of(*arguments: str) -> dict[str, Any]:
    work = work_of(parse(make_parser(), [*arguments, "train.py:train"]), [])
    assert isinstance(work, TargetWork)
    return work.config


def test_settings_change_the_config_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("def train(config): ...")
    Path("base.json").write_text('{"lr": 1.0, "model": {"depth": 2, "width": 8}, "kept": null}')
    assert config_of() == {}
    settings = ["lr=0.1", "model.depth=3", "model.new.deep=true", "name=text", "list=[1, 2]", "empty=", "equation=a=b"]
    given = [word for setting in [*settings, 'quoted="7"'] for word in ("--set", setting)]
    assert config_of("--config", "base.json", *given) == {
        "lr": 0.1, "model": {"depth": 3, "width": 8, "new": {"deep": True}}, "kept": None, "name": "text",
        "list": [1, 2], "empty": "", "equation": "a=b", "quoted": "7",
    }  # fmt: skip
