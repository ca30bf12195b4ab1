"""``distrain resume`` and ``distrain note``: what they make of run directories."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from distrain.cli.main import run_main
from distrain.storage.runs.listing import run_at
from distrain.storage.runs.notes import Notes
from distrain.system.remote_path import RemotePath
from tests.unit.storage.made import make_run

if TYPE_CHECKING:
    from pathlib import Path

ARGV = ["/x/bin/distrain", "run", "--num-workers", "2", "--storage-path", "{storage}", "train.py", "--lr", "0.1"]


def resume(tmp_path: Path, argv: list[str], **fields: Any) -> int:
    """Resume a run that was started by a command line."""
    fields = {"status": "stopped", "directory": str(tmp_path), **fields}
    make_run(tmp_path / "runs", "train-1", argv=[word.format(storage="runs") for word in argv], **fields)
    return run_main(["resume", "train", "--storage-path", str(tmp_path / "runs")], [])


# -- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["failed", "stopped", "running"])  # nobody holds its lock: it was killed
def test_a_run_is_started_again_as_it_was_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str
) -> None:
    executed: list[Any] = []
    monkeypatch.chdir("/")
    monkeypatch.setattr(os, "execv", lambda path, argv: executed.append((path, argv, os.getcwd())))
    resume(tmp_path, ARGV, status=status)
    words = ["run", "--name=train-1", f"--storage-path={tmp_path}/runs", *ARGV[2:5], "runs", *ARGV[6:]]
    assert executed == [(sys.executable, [sys.executable, "-m", "distrain", *words], str(tmp_path))]
    assert capsys.readouterr().err == f"in {tmp_path}: distrain {' '.join(words)}\n"


@pytest.mark.parametrize(
    ("argv", "fields", "said"),
    [
        (ARGV, {"status": "finished"}, "train-1 is finished; only a run that has failed, or was stopped or killed, is"),
        (["train.py", "--lr", "1"], {}, "python train.py --lr 1\nIt continues if it has the name train-1 again: "),
        (["/x/bin/distrain", "run", "--as-ray", "t.py"], {}, "its script calls fit(). Start it again as before, in "),
        ([*ARGV, "--api-key", "***"], {}, "the command had a secret, which was not stored. Start it again as before"),
        (
            ARGV,
            {"directory": "/missing"},
            "the directory in which train-1 was started is not on this machine: /missing",
        ),
        ([*ARGV[:5], "elsewhere", *ARGV[6:]], {}, "/runs/train-1 has been moved since it was started. Start it again"),
        ([*ARGV[:2], "--name", "first", "train.py"], {}, "/runs/train-1 has been moved since it was started. Start it"),
    ],
)
def test_what_cannot_be_resumed_is_refused_with_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    fields: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it was started"))
    assert resume(tmp_path, argv, **fields) == 2
    assert said in capsys.readouterr().err


# -- notes -----------------------------------------------------------------------------------------------------------


def note(run: object, *words: str) -> int:
    return run_main(["note", str(run), *words], [])


def test_a_note_and_tags_are_kept_changed_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "run")
    make_run(tmp_path, "other", age_s=60)
    assert note(run, "lr is\n too high", "--tag", "baseline", "--tag", "bad") == 0
    assert note(run, "--tag", "baseline", "--tag", "é", "--untag", "bad") == 0
    assert run_at(run).notes == Notes("lr is\n too high", ("baseline", "é"))
    assert note(run) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "run: #baseline #é lr is too high"
    for words in (["ls", str(tmp_path), "--tag", "é"], ["show", str(run)]):
        assert run_main(words, []) == 0
        assert "#baseline #é lr is too high" in (shown := capsys.readouterr().out)
        assert "other" not in shown
    assert run_main(["ls", str(tmp_path), "--json"], []) == 0
    noted = [(one["note"], one["tags"]) for one in json.loads(capsys.readouterr().out)["runs"]]
    assert noted == [("lr is\n too high", ["baseline", "é"]), ("", [])]
    assert note(run, "", "--untag", "baseline", "--untag", "é") == 0
    assert run_at(run).notes == Notes()
    assert run_main(["ls", str(tmp_path), "--tag", "é"], []) == 0
    assert f"there are no runs with the tag é in {tmp_path}" in capsys.readouterr().err


def test_a_note_that_cannot_be_written_is_refused_and_a_damaged_one_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, "run")
    (run / "notes.json").mkdir()
    assert note(run, "text") == 2
    assert f"the note cannot be written into {run}: Is a directory" in capsys.readouterr().err
    (run / "notes.json").rmdir()
    for text in ("{", "[]", '{"text": 1}', '{"text": "x", "tags": 1}'):
        (run / "notes.json").write_text(text)
        assert run_at(run).notes == Notes()


def test_remote_runs_have_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RemotePath("memory://noted/run")
    (folder / "run.json").write_bytes((make_run(tmp_path, "run") / "run.json").read_bytes())
    assert note("memory://noted/run", "far away") == 0
    assert run_at(folder).notes.text == "far away"
    folder.remove()
