"""The directories of jobs, and the options that travel with one."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest

from distrain.cli.run.options import make_parser, parse
from distrain.cli.submitting import _delete_old, _without

if TYPE_CHECKING:
    from pathlib import Path


def test_jobs_that_ended_long_ago_are_deleted_with_what_was_sent_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state = tmp_path / "distrain"
    for name, age_s in (("old-1", 8 * 86400), ("new-1", 86400), ("runs-1", None)):
        directory = state / f"project-{name}" / "code" / "work"
        directory.mkdir(parents=True)
        job = state / "jobs" / name
        job.mkdir(parents=True)
        (job / "job.json").write_text(json.dumps({"directory": str(directory)}))
        if age_s is not None:
            (job / "ended").touch()
            os.utime(job / "ended", (time.time() - age_s,) * 2)
    (tmp_path / "work").mkdir()
    (state / "jobs" / "old-1-elsewhere").mkdir()
    (state / "jobs" / "old-1-elsewhere" / "job.json").write_text(json.dumps({"directory": str(tmp_path / "work")}))
    (state / "jobs" / "old-1-elsewhere" / "ended").touch()
    os.utime(state / "jobs" / "old-1-elsewhere" / "ended", (0, 0))
    (state / "jobs" / "cut").mkdir()
    (state / "jobs" / "cut" / "job.json").write_text("{")
    (state / "jobs" / "cut" / "ended").touch()
    os.utime(state / "jobs" / "cut" / "ended", (0, 0))
    _delete_old()
    assert sorted(os.listdir(state / "jobs")) == ["cut", "new-1", "runs-1"]
    assert sorted(os.listdir(state)) == ["jobs", "project-new-1", "project-runs-1"]
    assert (tmp_path / "work").is_dir(), "the user's own"


@pytest.mark.parametrize("target", [["train.py", "--resume", "--hosts", "x"], ["-m", "pack.train", "--resume"]])
def test_options_are_left_out_before_the_target_only(target: list[str]) -> None:
    arguments = ["--resume", "--hosts", "a:1", "--on-host=b", "--num-workers", "2", *target]
    options = parse(make_parser("distrain submit"), arguments)
    assert _without(options, arguments, "--hosts", "--on-host") == ["--resume", "--num-workers", "2", *target]
    assert _without(options, arguments, flag="--resume") == arguments[1:]
