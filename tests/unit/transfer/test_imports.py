"""The packages that the user's code imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.transfer.project.imports import third_party_imports
from distrain.transfer.project.project import find_project

if TYPE_CHECKING:
    from pathlib import Path


def test_they_are_all_imports_but_those_of_the_standard_library_and_of_the_project(tmp_path: Path) -> None:
    """The project's own modules have the names of its files, but not those of the directories above it."""
    project = tmp_path / "torch"
    (project / "nets" / "deep").mkdir(parents=True)
    for name in ("nets/__init__.py", "nets/deep/__init__.py", "nets/deep/linear.py", "helper.py"):
        (project / name).touch()
    (project / "train.py").write_text(
        "import os, torch.nn as nn\n"
        "from numpy import array\n"
        "import helper, nets.deep\n"
        "from nets.deep import linear\n"
        "    import pandas as pd, distrain\n"
        "# import matplotlib\n"
    )
    found = find_project(sys_path=[str(project)], directory=str(project), modules={}, limit_bytes=1 << 20)
    assert third_party_imports(found) == ["torch", "numpy", "pandas"]
