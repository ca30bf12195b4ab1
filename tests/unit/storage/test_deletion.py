"""Deletion of runs: only of those that have ended, and never by halves."""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING

import pytest

from distrain.cli.main import run_main
from distrain.errors import StorageError
from distrain.storage.run_lock import LocalLock, RemoteLock
from distrain.storage.runs.deletion import delete_run
from distrain.storage.runs.listing import list_runs, run_at
from distrain.system.remote_path import RemotePath
from tests.unit.storage.made import make_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Runs of each kind, all of them a day old, and a directory that is none."""
    folder = tmp_path / "runs"
    for status in ("finished", "failed", "stopped"):
        make_run(folder, status, status=status, age_s=86400.0)
    make_run(folder, "killed", status="running", age_s=86400.0)
    make_run(folder, "young", age_s=60.0)
    (make_run(folder, "damaged") / "run.json").write_text("{")
    (folder / "photos").mkdir()
    (folder / "photos" / "1.jpg").write_bytes(b"x")
    return folder


def clean(*arguments: str) -> int:
    return run_main(["clean", *arguments], [])


def left(storage: Path) -> set[str]:
    return {path.name for path in storage.iterdir()}


ALL = {"finished", "failed", "stopped", "killed", "young", "damaged", "photos"}


@pytest.mark.parametrize(
    ("options", "deleted"),
    [
        (["--older-than", "12h"], {"finished", "failed", "stopped", "killed"}),
        (["--older-than", "1w"], set()),
        (["--failed"], {"failed"}),
        (["--finished", "--killed"], {"finished", "killed", "young"}),
        (["--finished", "--older-than", "0.5d"], {"finished"}),
    ],
)
def test_what_was_asked_for_is_deleted_and_nothing_else(storage: Path, options: list[str], deleted: set[str]) -> None:
    assert clean(str(storage), *options, "--yes") == 0
    assert left(storage) == ALL - deleted


def test_a_killed_run_has_ended_with_its_last_report(storage: Path) -> None:
    line = {"time": time.time(), "attempt": 0, "rank": 0, "index": 1, "metrics": {}}
    (storage / "killed" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert clean(str(storage), "--killed", "--older-than", "12h", "--yes") == 0
    assert left(storage) == ALL


def test_nothing_is_deleted_without_a_yes_and_a_choice(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert clean(str(storage), "--older-than", "1h") == 0
    assert re.search(r"\n4 runs, .+; nothing was deleted without --yes\n", capsys.readouterr().out)
    for arguments in ([], ["--yes"]):
        assert clean(str(storage), *arguments) == 2
        said = capsys.readouterr()
        assert {line.split()[0] for line in said.out.splitlines()} == ALL - {"damaged", "photos"}
        assert "have ended. Nothing was deleted; name what to delete: --older-than 30d" in said.err
    assert left(storage) == ALL


def test_a_running_run_is_never_deleted(storage: Path) -> None:
    run = storage / "killed"
    lock = LocalLock(run / ".lock", run)
    listed = next(one for one in list_runs(storage) if one.name == "killed")
    assert clean(str(storage), "--killed", "--older-than", "0s", "--yes") == 0
    with pytest.raises(StorageError, match="another run"):
        delete_run(listed._replace(state="killed"), time.time())
    lock.release()
    assert left(storage) == ALL


def test_a_run_that_was_continued_since_it_was_listed_is_left(storage: Path) -> None:
    listed = next(one for one in list_runs(storage) if one.name == "failed")
    before = time.time() - 3600
    make_run(storage, "new", status="failed")
    os.replace(storage / "new" / "run.json", storage / "failed" / "run.json")
    with pytest.raises(StorageError, match="changed meanwhile"):
        delete_run(listed, before)
    assert (storage / "failed" / "run.json").exists()


def test_a_link_to_a_run_and_a_run_given_as_storage_are_left(storage: Path, tmp_path: Path) -> None:
    (storage / "link").symlink_to(make_run(tmp_path, "elsewhere", status="failed", age_s=86400.0))
    assert clean(str(storage), "--failed", "--yes") == 1
    assert {"link"} <= left(storage)
    assert (tmp_path / "elsewhere" / "run.json").exists()
    assert clean(str(storage / "finished"), "--finished", "--yes") == 0
    assert "finished" in left(storage)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[RemotePath]:
    """A finished remote run."""
    folder = RemotePath("memory://runs/run")
    made = make_run(tmp_path, "run", age_s=86400.0)
    (folder / "run.json").write_bytes((made / "run.json").read_bytes())
    (folder / "checkpoint_000000" / "model.pt").write_bytes(b"x")
    yield folder
    folder.remove()


def test_a_remote_run_is_deleted_if_nobody_uses_it(remote: RemotePath) -> None:
    lock = RemoteLock.take(remote)
    (remote / "run.json").write_bytes((remote / "run.json").read_bytes().replace(b"finished", b"running"))
    assert run_at(remote).state == "running"
    with pytest.raises(StorageError, match="it is running"):
        delete_run(run_at(remote), time.time())
    (remote / "run.json").write_bytes((remote / "run.json").read_bytes().replace(b"running", b"finished"))
    lock.release()
    delete_run(run_at(remote), time.time())
    assert remote.files() == {}
