"""The tables of ``distrain profile``."""

from __future__ import annotations

import pytest

from distrain.cli.profiling import hottest_lines, profile_parser

FRAMES = [
    {"name": "train", "file": "/home/me/train.py", "line": 7},
    {"name": "backward", "file": "/env/lib/python3.12/site-packages/torch/_tensor.py", "line": 1},
    {"name": "run", "file": "/env/lib/python3.12/site-packages/torch/graph.py", "line": 2},
    {"name": "report", "file": "distrain/worker/session.py", "line": 3},
    {"name": "<lambda>", "file": "/home/me/data.py", "line": 9},
]


def test_time_in_a_library_counts_for_the_line_that_calls_it() -> None:
    samples, weights = [[0, 1, 2], [0, 1], [0, 1, 4], [0, 3], [3]], [4.0, 1.0, 3.0, 1.0, 1.0]
    thread = {"samples": samples, "weights": weights, "endValue": sum(weights)}
    assert list(hottest_lines({"shared": {"frames": FRAMES}, "profiles": [thread]}))[1:] == [
        ("60%", "train (train.py:7)", "backward (_tensor.py) > run (graph.py)"),
        ("30%", "<lambda> (data.py:9)", ""),
        ("10%", "report (session.py:3)", ""),  # no line of the user's code was under way
    ]


@pytest.mark.parametrize("seconds", ["0", "-1", "601", "nan", "inf", "ten"])
def test_the_time_has_limits(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        profile_parser().parse_args(["last", "--seconds", seconds])
    assert f"must be from 0.01 to 600, got '{seconds}'" in capsys.readouterr().err
