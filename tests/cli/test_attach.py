"""The return to runs at work: real processes on real pseudo-terminals."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import wait_until
from tests.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Open = Callable[..., Terminal]

TRAIN = """
import time
from pathlib import Path
import distrain

while not Path("import").exists():
    time.sleep(0.01)

def main(config):
    again = distrain.get_checkpoint() is not None
    for step in (1, 2, 3):
        print("step", step, flush=True)
        checkpoint = distrain.Checkpoint.from_dict({}) if step == 2 and config.get("fails") == "once" else None
        distrain.report({"loss": 1 / step}, checkpoint=checkpoint, progress=(step, 3))
        while not Path(f"go-{step}").exists() and not distrain.should_stop():
            time.sleep(0.01)
    if config.get("fails") and not again:
        raise SystemExit(7)
"""
PLACE = ("--storage-path", "runs")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "distrain", *arguments, *PLACE]


def training(*options: str, name: str = "run") -> list[str]:
    return [*command("run"), "--name", name, "--num-workers", "2", *options, "train.py:main"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a script that waits for files: ``import``, and ``go-N`` in step N."""
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.fixture
def window(folder: Path) -> Iterator[Open]:
    """Open a terminal with a program."""
    opened: list[Terminal] = []

    def start(argv: list[str]) -> Terminal:
        opened.append(Terminal(argv, 100, 24, folder))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def let(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def attach(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    argv = command("attach", "run", *arguments)
    return subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / "run" / "run.json").read_bytes())
    return found


def wait_for_line(process: subprocess.Popen[str], part: str) -> None:
    assert process.stdout is not None
    while part not in (line := process.stdout.readline()):
        assert line, f"no line with {part!r}"


def test_attach_shows_the_footer_leaves_the_run_alone_and_sees_its_restart_and_its_end(
    folder: Path, window: Open
) -> None:
    let(folder, "import")
    argv = training("--max-failures", "1", "--set", "fails=once")
    run = subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: (folder / "runs" / "run" / "metrics.jsonl").exists(), 60.0, "the first report")

    beginnings = ("running · ", "━", "loss 1", "ranks ●●", "Ctrl-C leaves the run alone; `distrain stop run ")

    def has_footer(lines: list[str]) -> bool:
        return [line.startswith(start) for line, start in zip(lines[-5:], beginnings, strict=False)] == [True] * 5

    first = window(command("attach", "run"))
    footer = first.wait_for(has_footer)[-5:]
    assert " 1/3 · 33%" in footer[1]
    first.press_ctrl_c()
    left = first.wait_for(lambda lines: False)
    assert first.process.wait() == 130
    assert left[-1] == "distrain: the run keeps running; `distrain stop run --storage-path runs` stops it"
    assert "ranks" not in str(left)

    second = window(command("attach", "run", "-n", "1"))
    second.wait_for(has_footer)
    with attach(folder) as third:
        wait_for_line(third, "step 1")
        let(folder, "go-1", "go-2", "go-3")
        shown = second.wait_for(lambda lines: False)
        out, _ = third.communicate(timeout=60)
    assert (second.process.wait(), third.returncode) == (0, 0)
    assert run.wait(60) == 0
    assert [line for line in shown if "step 3" in line].count("[rank 0] step 3") == 2
    for lines in (shown, out.splitlines()):
        text = "\n".join(lines)
        assert "1 restart" in text
        assert text.index("step 3") < text.index("distrain: run: finished after ")
    assert "ranks ●●" not in "".join(shown)


@pytest.mark.sample(1)
def test_a_failure_is_shown_once_and_its_exit_code_is_that_of_attach(folder: Path) -> None:
    let(folder, "import")
    argv = training("--set", "fails=always")
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        wait_until(lambda: (folder / "runs" / "run" / "metrics.jsonl").exists(), 60.0, "the first report")
        with attach(folder) as following:
            wait_for_line(following, "step 1")
            let(folder, "go-1", "go-2", "go-3")
            during, _ = following.communicate(timeout=60)
    with attach(folder) as later:
        after, _ = later.communicate(timeout=60)
    assert run.returncode == 7
    assert (following.returncode, later.returncode, manifest(folder)["exit_code"]) == (7, 7, 7)
    assert after.startswith("distrain: run has already ended\n")
    for text in (during, after):
        assert text.count("─ distrain: training failed ─") == 1
        assert text.index("failed after ") < text.index("training failed") < text.rindex("sys.exit(7)")
