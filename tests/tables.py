"""Big tables of tests: a normal run takes a sample of their cells, chosen by a seed; ``--all`` takes every cell.

The seed comes from the commit, so every commit tests other cells. DISTRAIN_TABLE_SEED=N repeats those of seed N.
"""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

Choice = TypeVar("Choice")
WITHOUT_GIT = 1


def find_seed(repository: Path) -> int:
    """Return the seed that the environment names, or one derived from the commit."""
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
"""Multiplies limits of time, as the machine may be busy with other work."""


def choose(every: Sequence[Choice], test: pytest.Item) -> Choice:
    """Choose by the seed and the name of the test."""
    return random.Random(f"{SEED} {test.nodeid}").choice(every)


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that run only with ``--all``: slow ones, and those outside the sample of their family."""
    left_out = {item for item in items if item.get_closest_marker("slow")}
    families: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if marker := item.get_closest_marker("sample"):
            name = marker.kwargs.get("of") or item.nodeid.partition("[")[0]
            families.setdefault((name, *marker.args), []).append(item)
    for (name, size), family in families.items():
        chosen = random.Random(f"{SEED} {name}").sample(family, min(size, len(family)))
        left_out |= set(family) - set(chosen)
    return left_out


def deal_cells(metafunc: pytest.Metafunc, every: Sequence[object], *, sample: int) -> None:
    """Parametrize tests that have an argument ``cell`` with all cells, or with ``sample`` of them and the seed in their
    names. A module's ``pytest_generate_tests`` calls this."""
    if "cell" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("--all"):
        metafunc.parametrize("cell", every, ids=str)
        return
    cells = random.Random(SEED).sample(every, sample)
    metafunc.parametrize("cell", cells, ids=[f"seed {SEED}: {cell}" for cell in cells])
