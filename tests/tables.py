"""The big tables: a run of the tests takes a sample of their cells, chosen by a seed; ``--all`` takes every cell."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

SEED = int(os.environ.get("DISTRAIN_TABLE_SEED", "1"))
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
