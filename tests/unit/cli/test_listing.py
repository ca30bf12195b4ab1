"""``distrain ls`` and ``distrain compare``: the runs of several storage paths, and how they differ."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distrain.cli.main import run_main
from tests.unit.storage.made import add_reports, make_run

Output = pytest.CaptureFixture[str]


@pytest.fixture
def sweeps(tmp_path: Path) -> list[str]:
    """Two sweeps of two runs, one with a run of another script."""
    for number, (lr, best) in enumerate([(0.1, 0.7), (0.2, 0.9), (0.3, 0.8), (0.4, 0.6)]):
        settings = {"lr": lr, "seed": 1, "model": {"depth": number // 2}}
        run = make_run(tmp_path / f"sweep-{number // 2}", f"train-{number}", age_s=number, train_loop_config=settings)
        add_reports(run, {"loss": 1.0, "val_acc": best}, {"loss": 1.0 / (1 + number), "val_acc": 0.5}, {"loss": 2.0})
    make_run(tmp_path / "sweep-1", "eval", train_loop_config={"batch": 8}, status="failed", age_s=9)
    return [str(tmp_path / f"sweep-{number}") for number in (0, 1)]


def rows(capsys: Output, *words: str) -> list[list[str]]:
    assert run_main([*words], []) == 0
    return [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]


def test_several_sweeps_are_one_list_with_the_settings_that_differ(sweeps: list[str], capsys: Output) -> None:
    head, *listed = rows(capsys, "ls", *sweeps)
    assert head == ["NAME", "STATE", "AGE", "RANKS", "lr", "model/depth", "SCRIPT", "HOSTS", "LAST METRICS"]
    assert [row[0] for row in listed] == [f"sweep-{n // 2}/train-{n}" for n in range(4)] + ["sweep-1/eval"]
    assert [row[4:6] for row in listed[:4]] == [["0.1", "0"], ["0.2", "0"], ["0.3", "1"], ["0.4", "1"]]
    assert rows(capsys, "ls", sweeps[0])[1][0] == "train-0"


@pytest.mark.parametrize(
    ("metric", "order", "best"),
    [("val_acc", [1, 2, 0, 3], ["0.9", "0.8", "0.7", "0.6"]), ("loss", [3, 2, 1, 0], ["0.25", "0.333333", "0.5", "1"])],
)
def test_runs_are_sorted_by_the_best_value_of_a_metric(
    sweeps: list[str], capsys: Output, metric: str, order: list[int], best: list[str]
) -> None:
    head, *listed = rows(capsys, "ls", *sweeps, "--sort", metric)
    assert head[2] == f"BEST {metric}"
    assert [row[0][-7:] for row in listed[:4]] == [f"train-{n}" for n in order]
    assert [row[2] for row in listed[:4]] == best
    assert "eval" in listed[4][0]  # which has none
    assert run_main(["ls", *sweeps, "--sort", metric, "-n", "2", "--json"], []) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == [f"train-{n}" for n in order[:2]]
    assert run_main(["ls", *sweeps, "--sort", metric[:-1]], []) == 2
    assert f"no run has reported a number '{metric[:-1]}'; did you mean {metric}?" in capsys.readouterr().err


def test_runs_are_compared_by_what_differs(sweeps: list[str], capsys: Output) -> None:
    words = ["compare", "train-0", "train-1", f"{sweeps[1]}/train-3", "--storage-path", sweeps[0]]
    assert rows(capsys, *words) == [
        ["", "train-0", "train-1", "train-3"],
        ["lr", "0.1", "0.2", "0.4"],
        ["model/depth", "0", "0", "1"],
    ]
    other = make_run(Path(sweeps[0]), "same", status="failed", git={"commit": "abc"}, argv=["train.py"])
    add_reports(other, {"loss": 1.0, "val_acc": 0.25})
    assert run_main(["compare", "train-0", "same", "--storage-path", sweeps[0], "--json"], []) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], [run["name"] for run in found["runs"]]) == ("compare", ["train-0", "same"])
    assert found["settings"] == {
        "state": ["finished", "failed"], "command": ["python train.py --lr 0.1", "python train.py"],
        "lr": [0.1, None], "seed": [1, None], "model/depth": [0, None], "git/commit": [None, "abc"],
    }  # fmt: skip
    assert found["metrics"] == {"val_acc": [0.5, 0.25], "loss": [2.0, 1.0]}
    assert run_main(["compare", "train-0", "train-0", "--storage-path", sweeps[0]], []) == 0
    assert capsys.readouterr().out.endswith("they have the same settings and metrics\n")
    with pytest.raises(SystemExit):
        run_main(["compare", "train-0"], [])
    assert "the following arguments are required: RUN" in capsys.readouterr().err
