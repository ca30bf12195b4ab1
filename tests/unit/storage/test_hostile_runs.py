"""Whatever is wrong with the files of a run, everything that reads runs ends soon, and without a surprise."""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING

import pytest

from distrain.page.data import page_data
from distrain.storage.lines import LONGEST_LINE, last_record, read_events, read_metrics
from distrain.storage.runs.listing import run_at
from tests.tables import SEED
from tests.unit.storage.hostile import SOME, apply, damages, make_whole_run, read_all
from tests.unit.storage.made import make_run

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE = 60
"""Of about 5,000 damages. All are tried with --all."""


@pytest.mark.timeout(1200)  # with --all
def test_damage_surprises_no_reader(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run, kept, target = make_whole_run(tmp_path / "runs"), tmp_path / "kept", tmp_path / "out"
    shutil.copytree(run, kept)
    target.mkdir()
    read_all(run, target)
    every = list(damages(kept))
    chosen = every if request.config.getoption("--all") else random.Random(SEED).sample(every, SAMPLE)
    for name, damage in chosen:
        apply(damage, run / name)
        try:
            read_all(run, target, SOME)
        except BaseException as error:
            raise AssertionError(f"{name}: {damage.name}") from error
        shutil.rmtree(run)
        shutil.copytree(kept, run)


def test_what_is_too_large_is_left_out_and_named(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    for name in ("run.json", "error.json", "checkpoint_000000/.manifest.json"):
        with (run / name).open("r+b") as file:
            file.truncate(8 << 30)
    found = run_at(run)
    assert (found.state, found.problem) == ("damaged", "run.json cannot be read: it has 8.6 GB, more than 67 MB")
    notes = " ".join(page_data(run)["notes"])
    assert notes.count("it has 8.6 GB, more than 67 MB") == 3


def test_a_line_without_an_end_costs_itself_only(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    line = json.dumps({"time": 1.0, "attempt": 0, "rank": 0, "index": 1, "metrics": {"loss": 1}}).encode() + b"\n"
    long = b'{"rank":0,"x":"' + b"z" * (3 * LONGEST_LINE)
    (run / "metrics.jsonl").write_bytes(line + long + b'"}\n' + line + long)
    with pytest.warns(UserWarning, match="longer than 8.4 MB") as warned:
        assert len(list(read_metrics(run / "metrics.jsonl"))) == 2
    assert [str(one.message).partition(" of ")[0] for one in warned] == ["skipped line 2", "skipped line 4"]
    last = last_record(run / "metrics.jsonl")
    assert last is not None
    assert last["metrics"] == {"loss": 1}


def test_many_damaged_lines_are_given_up(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    (run / "events.jsonl").write_bytes(b"{\n" * 1_000_000)
    with pytest.warns(UserWarning, match=r"left out from line 1,001 on"):
        assert list(read_events(run / "events.jsonl")) == []
