"""The options of ``distrain profile``."""

from __future__ import annotations

import pytest

from distrain.cli.profiling import profile_parser


@pytest.mark.parametrize("seconds", ["0", "-1", "601", "nan", "inf", "ten"])
def test_the_time_has_limits(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        profile_parser().parse_args(["last", "--seconds", seconds])
    assert f"must be from 0.01 to 600, got '{seconds}'" in capsys.readouterr().err
