"""``distrain show`` and ``page``: what they make of the files of a run."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from distrain.cli.main import command_of as command
from distrain.cli.main import run_main
from distrain.cli.showing import run_in_words
from distrain.storage.runs.listing import find_run
from tests.unit.storage.made import add_reports, make_run

if TYPE_CHECKING:
    from pathlib import Path


def test_paths_stay_whole_on_a_narrow_screen_and_nan_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "a-long-name-" * 6)
    add_reports(run, {"loss": 1.0}, {"loss": math.nan, "eval": {"loss": math.nan, "acc": 0.5}})
    lines = run_in_words(find_run(run.name, tmp_path), 80).splitlines()
    assert [f"run          {run}", "loss and eval/loss are nan"] == [lines[2], lines[1].partition("but ")[2]]
    monkeypatch.setenv("FORCE_COLOR", "1")
    command_of_ls, function = command("ls")
    function(command_of_ls.parse_args([str(tmp_path)]))
    assert "\033[33mfinished\033[0m" in (listed := capsys.readouterr().out)
    assert "  loss and eval/loss are nan: loss=nan eval/loss=nan eval/acc=0.5" in listed


@pytest.mark.filterwarnings("ignore:skipped")
def test_what_is_damaged_costs_its_own_part_and_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    (run / "metrics.jsonl").write_text("nonsense\n" * 2)
    (run / "events.jsonl").mkdir()
    said = run_in_words(find_run("run", tmp_path), 120)
    assert f"damage       [Errno 21] Is a directory: '{run}/events.jsonl'"[:80] in said
    assert " 2 damaged lines of metrics.jsonl were skipped" in said
    assert " 0 +0 s 1 min the beginning finished " in " ".join(said.split())


@pytest.mark.parametrize("through", ["itself", "a link"])
def test_a_pipe_is_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "run", status="failed")
    pipe, output = tmp_path / "pipe.html", tmp_path / "link.html" if through == "a link" else tmp_path / "pipe.html"
    os.mkfifo(pipe)
    if output != pipe:
        output.symlink_to(pipe)
    reader, writer = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), os.open(pipe, os.O_WRONLY)  # nobody waits for another
    os.set_blocking(reader, True)
    with open(reader, "rb") as file, ThreadPoolExecutor() as threads:
        reading = threads.submit(file.read)
        code = run_main(["page", "run", "--storage-path", "runs", "-o", str(output)], [])
        os.close(writer)
        said = reading.result()
    assert code == 0
    assert said.startswith(b"<!DOCTYPE html>")
    assert pipe.is_fifo()
    assert output.is_symlink() == (through == "a link")
