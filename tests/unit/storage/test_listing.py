"""Runs in a storage path: their states, whatever else is there, and how they are found by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from distrain.storage.run_lock import LocalLock
from distrain.storage.runs.listing import NoSuchRun, find_run, list_runs, storage_at
from tests.unit.storage.made import make_run

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.system.remote_path import RemotePath


def states(storage: Path | RemotePath) -> dict[str, str]:
    return {run.name: run.state for run in list_runs(storage)}


def test_runs_are_listed_the_newest_first(tmp_path: Path) -> None:
    for name, age_s in (("b", 50.0), ("a", 10.0), ("c", 90.0)):
        make_run(tmp_path, name, age_s=age_s)
    continued = make_run(tmp_path, "d", age_s=500.0)
    manifest = json.loads((continued / "run.json").read_text())
    (continued / "run.json").write_text(json.dumps({**manifest, "continued": manifest["started"] + 470.0}))
    assert [run.name for run in list_runs(tmp_path)] == ["a", "d", "b", "c"]


def test_a_run_that_says_running_is_killed_if_nobody_holds_its_lock(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", status="running")
    assert states(tmp_path) == {"run": "killed"}
    lock = LocalLock(run / ".lock", run)
    assert states(tmp_path) == {"run": "running"}
    lock.release()
    assert states(tmp_path) == {"run": "killed"}


def test_what_is_damaged_half_written_or_foreign_is_shown_as_such(tmp_path: Path) -> None:
    make_run(tmp_path, "good")
    (make_run(tmp_path, "torn") / "run.json").write_text('{"status": "fini')
    (make_run(tmp_path, "empty") / "run.json").write_text("")
    make_run(tmp_path, "odd", status="dancing")
    (make_run(tmp_path, "list") / "run.json").write_text("[1, 2]")
    (make_run(tmp_path, "other_program") / "run.json").write_text('{"status": "finished"}')
    (make_run(tmp_path, "bytes") / "run.json").write_bytes(b"\xff\xfe\x00")
    (make_run(tmp_path, "just_begun") / "run.json").unlink()
    starting = make_run(tmp_path, "starting")
    (starting / "run.json").unlink()
    lock = LocalLock(starting / ".lock", starting)
    (tmp_path / "photos").mkdir()
    (tmp_path / "folder_as_manifest" / "run.json").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "notes.txt").write_text("a file")
    (tmp_path / "broken_link").symlink_to(tmp_path / "nowhere")
    assert states(tmp_path) == {
        "good": "finished",
        "torn": "damaged",
        "empty": "damaged",
        "odd": "damaged",
        "bytes": "damaged",
        "folder_as_manifest": "damaged",
        "list": "not a run",
        "other_program": "not a run",
        "just_begun": "damaged",
        "starting": "starting",
        "photos": "not a run",
    }
    lock.release()
    assert list_runs(tmp_path)[-1].state == "not a run"


# -- by name ---------------------------------------------------------------------------------------------------------


def test_a_run_is_found_by_path_name_prefix_and_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, age_s in (("train-1", 50.0), ("train-12", 20.0), ("eval", 90.0)):
        make_run(tmp_path, name, age_s=age_s)
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    for given, name in {
        str(tmp_path / "eval"): "eval",
        "./eval": "eval",
        "train-1": "train-1",  # also the beginning of another name
        "train-12": "train-12",
        "ev": "eval",
        "last": "train-12",
    }.items():
        assert find_run(given, tmp_path).name == name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("train", r"2 names in .* begin with 'train'.*\n  train-1\n  train-12$"),
        ("nothing", "no run in .* has a name that begins with 'nothing'"),
        ("trian-1", "`distrain ls` lists them; did you mean train-1"),
        ("photos", "photos is not a run: it has no run.json"),
        ("/nowhere/run", "there is no directory /nowhere/run"),
        ("torn", "torn is damaged: run.json is damaged"),
    ],
)
def test_a_name_that_is_not_one_run_is_explained(tmp_path: Path, given: str, said: str) -> None:
    make_run(tmp_path, "train-1")
    make_run(tmp_path, "train-12")
    (make_run(tmp_path, "torn") / "run.json").write_text("{")
    (tmp_path / "photos").mkdir()
    with pytest.raises(NoSuchRun, match=f"(?s){said}"):
        find_run(given, tmp_path)


def test_there_may_be_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match="there is no run in"):
        find_run("last", storage_at(tmp_path))
    with pytest.raises(NoSuchRun, match="no run in"):
        find_run("run", storage_at(tmp_path / "missing"))
