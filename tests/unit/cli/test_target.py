"""The work that a command line names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distrain.cli.run.options import make_parser, parse
from distrain.cli.run.target import work_of
from distrain.worker.job.job import ScriptWork, make_job

if TYPE_CHECKING:
    from pathlib import Path

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
