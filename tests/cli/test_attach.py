"""``distrain attach`` on a real terminal, to a run that has none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from tests.conftest import wait_until
from tests.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TRAIN = """
import time
from pathlib import Path
import distrain

def main(config):
    rank = distrain.get_context().get_world_rank()
    print("only rank", rank, flush=True)
    for step in range(1, 10_000):
        if step > 3 and (Path("go") if rank else Path("fail")).exists():
            break
        if config.get("floods") and Path("flood").exists():
            print("\\n".join(["x" * 1000] * 300), flush=True)
        print("step", step, flush=True)
        distrain.report({"loss": 1 / step}, progress=(step, 10_000))
        time.sleep(0.05)
    if rank == 0:
        raise ValueError("on purpose")
"""


def attach(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "distrain", "attach", *arguments, "--storage-path", "runs"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run without a terminal, in a session of its own."""
    (tmp_path / "train.py").write_text(TRAIN)
    own = ("run", "--storage-path", "runs", "--name", "big", "--num-workers", "2", "--set", "floods=true")
    with (tmp_path / "big.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "distrain", *own, "train.py:main"],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: (tmp_path / "runs/big/.requests").exists(), 60.0, "it takes requests")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30.0)


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Callable[[], Terminal]]:
    """Terminals with ``distrain attach``."""
    opened: list[Terminal] = []

    def open_one() -> Terminal:
        opened.append(Terminal(attach("big"), 200, 30, tmp_path))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def reports(tmp_path: Path) -> int:
    return (tmp_path / "runs/big/metrics.jsonl").read_bytes().count(b"\n")


def has(text: str) -> Callable[[list[str]], bool]:
    return lambda lines: any(text in line for line in lines)


def test_a_terminal_shows_the_run_and_leaves_it_alone_when_it_goes(
    run: subprocess.Popen[bytes], terminals: Callable[[], Terminal], tmp_path: Path
) -> None:
    """It is attached while the workers start."""
    terminal = terminals()
    terminal.wait_for(has("[rank 0,1] step 20"))
    lines = terminal.wait_for(has("at work"))
    assert has("running · ")(lines)
    assert has("2 workers · big")(lines)
    assert has("only rank 1")(lines)
    assert has("/10,000 ")(lines)
    assert has("Ctrl-C: detaches; the run continues")(lines)
    terminal.press_ctrl_c()
    lines = terminal.wait_for_end()
    assert terminal.process.returncode == 130
    assert not has("at work")(lines)
    assert lines[-1] == f"detached; the run continues. To stop it: distrain stop {tmp_path}/runs/big"
    second = terminals()
    second.wait_for(has("at work"))
    second.hang_up()
    assert second.process.wait(20.0) == -signal.SIGHUP
    before = reports(tmp_path)
    wait_until(lambda: reports(tmp_path) > before + 10, 20.0, "the run continues")
    assert run.poll() is None


def test_a_late_comer_sees_the_last_output_and_the_end_as_the_run_shows_it(
    run: subprocess.Popen[bytes], terminals: Callable[[], Terminal], tmp_path: Path
) -> None:
    wait_until(lambda: "step 5" in (tmp_path / "big.log").read_text(), 60.0, "training")
    terminal = terminals()
    lines = terminal.wait_for(has("at work"))
    assert has("] only rank 1")(lines)
    piped = tmp_path / "piped.log"
    with piped.open("w") as log:
        plain = subprocess.Popen(attach("big"), cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    wait_until(lambda: "step 5" in piped.read_text(), 20.0, "it is attached")
    (tmp_path / "fail").touch()
    lines = terminal.wait_for_end()
    assert run.wait(30.0) == 1
    assert terminal.process.returncode == 1
    own = (tmp_path / "big.log").read_text().splitlines()
    assert plain.wait(20.0) == 1
    first, *rest = piped.read_text().splitlines()
    assert first == f"distrain: attached to {tmp_path}/runs/big"
    begin = next(n for n, line in enumerate(own) if line.startswith("distrain: failed after"))
    assert rest[-len(own[begin:]) :] == own[begin:]
    shown = "\n".join(lines)
    assert shown.count("distrain: failed after") == 1
    assert "distrain: training failed" in shown
    assert "rank 0 on localhost: ValueError: on purpose" in shown
    again = subprocess.run(attach("big"), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "big is not running: its state is failed; `distrain show big` tells more" in again.stderr


def test_a_stopped_one_does_not_hold_the_run_up_nor_another_one(run: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The ranks print 60 MB, more than may wait for it."""
    with (tmp_path / "stopped.log").open("w") as its_log, (tmp_path / "other.log").open("w") as log:
        stopped = subprocess.Popen(attach("big"), cwd=tmp_path, stdout=its_log, stderr=subprocess.STDOUT)
        other = subprocess.Popen(attach("big"), cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    try:
        for name in ("stopped.log", "other.log"):
            wait_until(lambda: "step 5" in (tmp_path / name).read_text(), 60.0, "it is attached")
        stopped.send_signal(signal.SIGSTOP)
        (tmp_path / "flood").touch()
        before = reports(tmp_path)
        wait_until(lambda: reports(tmp_path) >= before + 200, 60.0, "the run continues")
        (tmp_path / "flood").unlink()
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(30.0) == 1
        assert "detached, because this process read too slowly" in (tmp_path / "stopped.log").read_text()
        assert run.poll() is other.poll() is None
        (tmp_path / "fail").touch()
        assert run.wait(30.0) == 1
        assert other.wait(30.0) == 1
        assert "rank 0 on localhost: ValueError: on purpose" in (tmp_path / "other.log").read_text()
        records = map(json.loads, (tmp_path / "runs/big/metrics.jsonl").read_text().splitlines())
        times = [record["time"] for record in records if record["rank"] == 0]
        assert max(later - earlier for earlier, later in pairwise(times)) < 3.0
    finally:
        stopped.send_signal(signal.SIGCONT)


def test_a_run_that_is_killed_ends_it_with_a_sentence(
    run: subprocess.Popen[bytes], terminals: Callable[[], Terminal]
) -> None:
    terminal = terminals()
    terminal.wait_for(has("at work"))
    os.kill(run.pid, signal.SIGKILL)
    lines = terminal.wait_for_end()
    assert terminal.process.returncode == 1
    assert has("the process that called fit() was killed")(lines)
    assert not has("Error")(lines)
