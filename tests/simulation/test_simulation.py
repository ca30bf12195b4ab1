"""The engine keeps its promises in the simulated world. ``scripts/fuzz`` searches for worlds in which it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.simulation.known_faults import KNOWN
from tests.tables import SEED

ROOT = Path(__file__).parents[2]
FUZZ = ROOT / "scripts" / "fuzz"


def fuzz(*options: str) -> str:
    done = subprocess.run([sys.executable, FUZZ, *options], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_what_was_found_once_stays_away() -> None:
    assert "all is well" in fuzz("--kept")


def test_new_schedules_of_each_commit_break_no_promise() -> None:
    assert "; 0 broke a promise" in fuzz("--first", str(SEED * 10_000), "--minutes", "1")


def test_each_known_fault_can_still_be_put_into_the_source() -> None:
    sources = {known.name: (ROOT / "distrain" / known.file).read_text() for known in KNOWN}
    assert [known.name for known in KNOWN if sources[known.name].count(known.old) != 1] == []
