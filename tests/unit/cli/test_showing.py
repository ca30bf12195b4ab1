"""``distrain show``: what it makes of the files of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distrain.cli.showing import command_of
from distrain.storage.runs.listing import find_run
from tests.unit.storage.made import make_run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["train.py", "--lr", "0.1"], "python train.py --lr 0.1"),
        (["/x/bin/distrain", "run", "a b"], "distrain run 'a b'"),
        (["/x/distrain/launch.py", "train.py"], "python -m distrain.launch train.py"),
        (None, ""),
    ],
)
def test_a_command_is_shown_as_it_is_typed(tmp_path: Path, argv: list[str] | None, typed: str) -> None:
    make_run(tmp_path, "run", argv=argv)
    assert command_of(find_run("run", tmp_path)) == typed
