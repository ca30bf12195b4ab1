"""Checkpoints that agents have stored alone, when the next coordinator opens the run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from distrain.storage.checkpoint import MANIFEST_FILE
from distrain.storage.lone_store import take_over
from distrain.system.locks import locked_directory

if TYPE_CHECKING:
    from pathlib import Path


def begin(run: Path, number: int, *, is_complete: bool) -> Path:
    """Make what agents leave of a checkpoint."""
    hidden = run / f".memory-checkpoint_{number:06d}"
    hidden.mkdir()
    if is_complete:
        manifest = {"name": f"checkpoint_{number:06d}", "index": number, "metrics": {}, "files": {}}
        (hidden / MANIFEST_FILE).write_text(json.dumps(manifest))
    return hidden


@pytest.mark.parametrize("busy", [1, 2])
def test_a_complete_one_is_taken_although_another_is_still_being_stored(tmp_path: Path, busy: int) -> None:
    hidden = {number: begin(tmp_path, number, is_complete=number != busy) for number in (1, 2)}
    with locked_directory(hidden[busy]):
        assert take_over(tmp_path, patience_s=0.0) == [tmp_path / f"checkpoint_{3 - busy:06d}"]
    assert hidden[busy].exists()
