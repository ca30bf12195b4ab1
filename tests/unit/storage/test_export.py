"""Reports as tables, and the differences between runs."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import TYPE_CHECKING

import pyarrow.parquet
import pytest

from distrain.cli.main import run_main
from distrain.storage.runs.comparison import command_of, differences
from distrain.storage.runs.details import extremes_of
from distrain.storage.runs.export import FORMATS, rows_of
from distrain.storage.runs.listing import find_run
from tests.unit.storage.made import add_reports, make_run

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.storage.runs.listing import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two ranks and two reports, the second with a nested metric and one that is called like a column; then NaN."""
    made = make_run(tmp_path, "run")
    add_reports(made, {"loss": 1.0}, {"loss": 0.5, "eval": {"accuracy": 1}, "step": "x"})
    line = {"time": 110.0, "attempt": 0, "rank": 0, "index": 3, "metrics": {"loss": None}}
    with (made / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**line, "nonfinite": {"/loss": "nan"}}) + "\n")
    return find_run("run", tmp_path)


def test_csv_has_every_report_of_every_rank(run: Run) -> None:
    file = io.BytesIO()
    FORMATS["csv"](run, file)
    rows = list(csv.DictReader(io.StringIO(file.getvalue().decode())))
    assert list(rows[0]) == ["time", "attempt", "rank", "index", "step", "loss", "eval/accuracy", "metrics/step"]
    assert [(row["rank"], row["step"], row["loss"]) for row in rows] == [
        ("0", "1", "1.0"),
        ("1", "1", "2.0"),
        ("0", "2", "0.5"),
        ("1", "2", "1.5"),
        ("0", "3", "nan"),
    ]
    assert [row["eval/accuracy"] for row in rows] == ["", "", "1", "1", ""]


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("-1+A1", "'-1+A1"),
        ("\t=A1", "'\t=A1"),
        ("\x1b[2J=A1", "'=A1"),
        ("-1.5e3", "-1.5e3"),
    ],
)
def test_no_cell_of_csv_is_a_formula_or_acts_on_a_terminal(tmp_path: Path, text: str, cell: str) -> None:
    add_reports(make_run(tmp_path, "run"), {"loss": 0, "note": text, text: -1.5})
    file = io.BytesIO()
    FORMATS["csv"](find_run("run", tmp_path), file)
    head, row, *_ = csv.reader(io.StringIO(file.getvalue().decode()))
    assert head[-2:] == ["note", cell]
    assert row[-2:] == [cell, "-1.5"]


def test_parquet_has_the_same_with_types(run: Run, tmp_path: Path) -> None:
    with (tmp_path / "reports.parquet").open("wb") as file:
        FORMATS["parquet"](run, file)
    table = pyarrow.parquet.read_table(tmp_path / "reports.parquet")
    assert table.num_rows == len(rows_of(run)[1]) == 5
    assert table.column("metrics/step").to_pylist() == [None, None, "x", "x", None]
    assert math.isnan(table.column("loss").to_pylist()[-1])
    assert str(table.schema.field("eval/accuracy").type) == "int64"


def test_a_run_without_reports_has_a_table_without_rows(tmp_path: Path) -> None:
    make_run(tmp_path, "run")
    for format_name in FORMATS:
        FORMATS[format_name](find_run("run", tmp_path), io.BytesIO())


def test_a_failed_export_leaves_the_old_file(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "reports.csv"
    target.write_text("old")

    def fail(run: Run, file: object) -> None:
        raise OSError("disk full")

    monkeypatch.setitem(FORMATS, "csv", fail)
    assert run_main(["export", str(run.path), "--to", "csv", "-o", str(target)], []) == 2
    assert target.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "reports.csv"}


def test_settings_that_differ_are_named_and_no_others(tmp_path: Path) -> None:
    common = {"python": "3.12.1", "versions": {"torch": "2.8"}, "scaling_config": {"num_workers": 2}}
    make_run(tmp_path, "a", train_loop_config={"lr": 0.1, "model": {"depth": 3}}, git={"commit": "1"}, **common)
    make_run(
        tmp_path, "b", train_loop_config={"lr": 0.2, "model": {"depth": 3}}, argv=["/x/bin/distrain", "run"], **common
    )
    runs = [find_run(name, tmp_path) for name in ("a", "b")]
    assert differences(runs) == {
        "train_loop_config/lr": [0.1, 0.2],
        "git/commit": ["1", None],
        "command": ["python train.py --lr 0.1", "distrain run"],
    }
    assert command_of(runs[1]) == "distrain run"


def test_metrics_are_compared_by_their_last_and_best_values(tmp_path: Path, run: Run) -> None:
    make_run(tmp_path, "other")
    table = differences([run, find_run("other", tmp_path)])
    assert table["step"] == [3, None]
    assert table["loss (least)"] == [0.5, None]
    assert table["loss (largest)"] == [1.0, None]
    assert math.isnan(table["loss (last)"][0])


def test_an_int_beyond_the_floats_is_the_extreme_of_a_metric() -> None:
    reports = [{"step": 1, "metrics": {"n": 1, "x": math.nan}}, {"step": 2, "metrics": {"n": 10**400}}]
    assert extremes_of(reports) == {"n": (1, 1, 10**400, 2)}
