"""The table of hangs and of slow healthy runs: each hang is named within seconds, and no slow run is called one.

A normal run of the tests takes a sample; ``scripts/hang_table`` runs all of it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.tables import BUSY_FACTOR
from tests.torch.hang_cases import CASES, WITHIN_S, watch

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.says])
def test_a_hang_is_named(tmp_path: Path, name: str) -> None:
    seen = watch(name, tmp_path)
    assert seen.seconds is not None, seen.text
    assert re.search(str(CASES[name].says), seen.text), seen.text
    assert seen.seconds < BUSY_FACTOR * WITHIN_S


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.says])
def test_a_slow_run_is_not_called_a_hang(tmp_path: Path, name: str) -> None:
    seen = watch(name, tmp_path)
    assert seen.seconds is None, seen.text
    assert "begins 0" in seen.text
