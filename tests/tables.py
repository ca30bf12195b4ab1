"""The big tables: a run of the tests takes a sample of their cells, chosen by a seed; ``--all`` takes every cell.

The seed comes from the commit, so every commit tests other cells; DISTRAIN_TABLE_SEED=N repeats those of seed N.
"""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

WITHOUT_GIT = 1


def find_seed(repository: Path) -> int:
    """Return the seed that the environment names, or else one made of the commit."""
    if (named := os.environ.get("DISTRAIN_TABLE_SEED")) is not None:
        return int(named)
    try:
        git = ["git", "-C", str(repository), "rev-parse", "--short=8", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        return WITHOUT_GIT
    return int(commit, 16)


SEED = find_seed(Path(__file__).parent)
BUSY_FACTOR = 4.0
"""The machine that runs this may have other things to do."""


def deal_cells(metafunc: pytest.Metafunc, every: Sequence[object], *, sample: int) -> None:
    """Give each test that wants a ``cell`` all of them, or ``sample`` of them, with the seed in their names. To be
    called by a module's ``pytest_generate_tests``."""
    if "cell" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("--all"):
        metafunc.parametrize("cell", every, ids=str)
        return
    cells = random.Random(SEED).sample(every, sample)
    metafunc.parametrize("cell", cells, ids=[f"seed {SEED}: {cell}" for cell in cells])
