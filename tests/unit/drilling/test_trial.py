"""The reason for which a command has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.drilling.order import Order
from distrain.drilling.trial import Trial

if TYPE_CHECKING:
    from pathlib import Path


def test_the_error_of_a_command_is_the_last_line_of_its_traceback(tmp_path: Path) -> None:
    trial = Trial(Order(command=("python", "train.py")), tmp_path / "trial", limit_s=1.0)
    said = ["Error executing job with overrides: ['a=b']", "Traceback (most recent call last):", "ValueError: no a"]
    (tmp_path / "trial/console.log").write_text("\n".join(said))
    assert trial.why_failed()[0] == "ValueError: no a"
