"""The journal of a trial that is under way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from distrain.drilling.journal import read_journal
from distrain.storage.paths import RunPaths

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_checkpoint_that_is_deleted_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = {"version": 1, "status": "running", "run_id": "x", "name": "run", "attempts": []}
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    for number in (1, 2):
        (tmp_path / f"checkpoint_{number:06d}").mkdir()
        (tmp_path / f"checkpoint_{number:06d}/.manifest.json").write_text(
            json.dumps({"index": number, "step": number, "files": {}, "name": f"checkpoint_{number:06d}"})
        )
    listed = RunPaths(tmp_path).checkpoints()
    monkeypatch.setattr(RunPaths, "checkpoints", lambda _: listed)
    (tmp_path / "checkpoint_000001/.manifest.json").unlink()
    assert read_journal(tmp_path).checkpoints == {2: listed[1]}
