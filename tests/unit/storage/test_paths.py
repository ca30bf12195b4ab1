"""Names in the run directory, and which directory a run gets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from distrain.errors import StorageError
from distrain.storage.paths import RunPaths, choose_run

if TYPE_CHECKING:
    from pathlib import Path


def test_checkpoints_are_listed_oldest_first_however_many_digits_they_have(root: Path) -> None:
    for index in (1_000_000, 2, 999_999):
        RunPaths(root).checkpoint(index).mkdir(parents=True)
    names = [path.name for path in RunPaths(root).checkpoints()]
    assert names == ["checkpoint_000002", "checkpoint_999999", "checkpoint_1000000"]


def test_only_directories_with_our_names_are_checkpoints(root: Path) -> None:
    for name in ("checkpoint_000001.new", "my_checkpoint_000001", "checkpoint_1"):
        (root / name).mkdir(parents=True)
    (root / "checkpoint_000007").write_text("a file")
    assert RunPaths(root).checkpoints() == []


TAKEN = ("run.json", "metrics.jsonl", "error.json", "error.pkl", "return_value.pkl", "logs", "evidence", "run.json.new")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (TAKEN, "as the run directory has something else of that name"),
        (("", "a/b", "..", ".hidden", "damaged-x"), "must be a plain name of a directory"),
        (("ü" * 101,), "must not be longer than 200 bytes, got 202"),
    ],
)
def test_names_that_no_checkpoint_can_have(root: Path, names: tuple[str, ...], why: str) -> None:
    assert all(why in str(RunPaths(root).name_problem(name)) for name in names)
    assert RunPaths(root).name_problem("ü" * 100) is None


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "a\x9b2J", "\udcff"])
def test_no_checkpoint_has_a_name_that_acts_on_a_terminal(root: Path, name: str) -> None:
    problem = RunPaths(root).name_problem(name)
    assert problem is not None
    assert problem.isprintable()


def made(storage_path: Path, name: str, status: str | None) -> None:
    root = storage_path / name
    root.mkdir(parents=True)
    if status is not None:
        (root / "run.json").write_text(json.dumps({"status": status}))


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        *(({"run": status}, "run") for status in ("running", "failed", "stopped", None)),
        ({"run": "finished", "run-2": "finished"}, "run-3"),
        ({"run": "finished", "run-2": "failed"}, "run-2"),
    ],
)
def test_an_unfinished_run_goes_on_and_a_finished_one_is_left_alone(
    tmp_path: Path, there: dict[str, str | None], chosen: str
) -> None:
    for name, status in there.items():
        made(tmp_path, name, status)
    assert choose_run(tmp_path, "run") == tmp_path / chosen


def test_the_home_directory_and_relative_paths_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert choose_run("~/runs", "run") == tmp_path / "runs" / "run"
    assert choose_run("runs", "run") == tmp_path / "runs" / "run"
    assert choose_run(None, "run") == tmp_path / "distrain_results" / "run"


def test_an_unreadable_manifest_is_a_storage_error(tmp_path: Path) -> None:
    made(tmp_path, "run", None)
    (tmp_path / "run" / "run.json").write_text("{torn")
    with pytest.raises(StorageError, match=r"run\.json is damaged, or another program's"):
        choose_run(tmp_path, "run")
