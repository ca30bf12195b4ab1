"""The journal of a trial that is under way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from distrain.drilling.journal import read_journal

if TYPE_CHECKING:
    from pathlib import Path


def test_a_trial_that_has_not_begun_has_one_empty_attempt(tmp_path: Path) -> None:
    journal = read_journal(tmp_path / "run")
    assert (len(journal.attempts), journal.checkpoints, journal.has_finished) == (1, {}, False)


def test_a_checkpoint_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    manifest = {"version": 1, "status": "running", "run_id": "x", "name": "run", "attempts": []}
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    for number in (1, 2):
        (tmp_path / f"checkpoint_{number:06d}").mkdir()
        (tmp_path / f"checkpoint_{number:06d}/.manifest.json").write_text(
            json.dumps(
                {"index": number, "step": number, "files": {}, "metrics": {}, "name": f"checkpoint_{number:06d}"}
            )
        )
    (tmp_path / "checkpoint_000001/.manifest.json").unlink()
    with pytest.warns(UserWarning, match="checkpoint_000001 is damaged"):
        assert read_journal(tmp_path).checkpoints == {2: tmp_path / "checkpoint_000002"}
