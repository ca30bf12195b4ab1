"""An installed Ray: only a process that asks for the stand-in gets it instead."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from distrain.as_ray.importing import activate

if TYPE_CHECKING:
    from pathlib import Path

ASK = "import ray; print(getattr(ray, '__distrain__', 'Ray itself'))"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("")
    return tmp_path


def run(installed: Path, code: str, variable: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "DISTRAIN_AS_RAY": variable}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)


def test_it_is_what_others_import(installed: Path) -> None:
    assert run(installed, f"import distrain, distrain.coordinator.run.trainer; {ASK}").stdout == "Ray itself\n"
    assert run(installed, f"import distrain; {ASK}", variable="0").stdout == "Ray itself\n"


@pytest.mark.parametrize(("code", "variable"), [("import distrain.as_ray", ""), ("import distrain", "1")])
def test_whoever_asks_for_the_stand_in_gets_it(installed: Path, code: str, variable: str) -> None:
    done = run(installed, f"{code}; {ASK}; import os; print(os.environ['DISTRAIN_AS_RAY'])", variable)
    assert "Ray itself" not in done.stdout
    assert done.stdout.endswith("\n1\n"), done.stderr


def test_a_process_that_has_imported_it_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with pytest.raises(ImportError, match="Ray itself is already imported"):
        activate()
