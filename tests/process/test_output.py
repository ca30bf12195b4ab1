"""Output of workers: whole lines with the rank on the console, raw bytes in one file per rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import distrain
from tests.process.conftest import Fit, log_of

Captured = pytest.CaptureFixture[str]
FLOOD = 50_000


def lines_of(text: str, rank: int, width: int = 1) -> list[str]:
    """Console lines of a rank, without the prefix."""
    prefix = f"[rank {rank:>{width}}] "
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


def test_lines_carry_the_rank_and_keep_their_stream(any_fit: Fit, capsys: Captured) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        print(f"out of {rank}")
        print(f"error of {rank}", file=sys.stderr)

    any_fit(train, workers=3)
    console = capsys.readouterr()
    assert sorted(console.out.splitlines()) == [f"[rank {rank}] out of {rank}" for rank in range(3)]
    for rank in range(3):
        assert lines_of(console.err, rank) == [f"error of {rank}"]


def test_prefixes_have_one_width(fit: Fit, capsys: Captured) -> None:
    def train() -> None:
        print("here")

    fit(train, workers=11)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(f"[rank {rank:>2}] here" for rank in range(11))


def test_a_line_written_in_pieces_is_shown_whole(any_fit: Fit, capsys: Captured) -> None:
    def train() -> None:
        for piece in ("one ", "line ", "in pieces"):
            os.write(1, piece.encode())
            time.sleep(0.02)
        os.write(1, b"\n")

    any_fit(train)
    assert capsys.readouterr().out.splitlines().count("[rank 0] one line in pieces") == 1


def test_a_last_line_without_an_end_is_shown(any_fit: Fit, capsys: Captured) -> None:
    def train() -> None:
        print("first\nlast", end="")

    result = any_fit(train, workers=1)
    assert capsys.readouterr().out == "[rank 0] first\n[rank 0] last\n"
    assert log_of(result.path, 0) == "first\nlast"


def test_of_a_progress_bar_the_last_state_is_shown(fit: Fit, capsys: Captured) -> None:
    def train() -> None:
        for percent in (10, 50, 100):
            print(f"\r{percent} %", end="")
        print("\nnext\r\nlast")

    result = fit(train, workers=1)
    assert lines_of(capsys.readouterr().out, 0) == ["100 %", "next", "last"]
    assert b"\r10 %\r50 %\r100 %\nnext\r\nlast\n" in Path(result.path, "logs/attempt_0/rank_0.log").read_bytes()


def test_lines_are_shown_at_once_also_before_a_pause(fit: Fit, tmp_path: Path) -> None:
    """Lines that come in quick succession travel together, but none waits for the next one."""
    script = tmp_path / "pauses.py"
    script.write_text(
        "import sys, time, distrain\n"
        "def train():\n"
        "    for _ in range(2):\n"
        "        for _ in range(100):\n"
        "            print(time.monotonic())\n"
        "        time.sleep(1.0)\n"
        "run = distrain.RunConfig(storage_path=sys.argv[1])\n"
        "distrain.DataParallelTrainer(train, run_config=run).fit()\n"
    )
    with subprocess.Popen([sys.executable, str(script), str(fit.storage)], stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        delays = [time.monotonic() - float(line.removeprefix(b"[rank 0] ")) for line in user.stdout]
    assert len(delays) == 200
    assert max(delays) < 0.5  # 0.02 s on an idle machine


def test_hidden_ranks_have_logs_and_words_on_the_failure_screen(fit: Fit, capsys: Captured) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        print(f"rank {rank} prints")
        if rank == 1:
            os._exit(3)
        time.sleep(60)

    with pytest.raises(distrain.WorkerGroupError) as raised:
        fit(train, workers=2, logging_config=distrain.LoggingConfig(ranks=[]))
    assert capsys.readouterr().out == ""
    assert raised.value.last_lines[1] == ["rank 1 prints"]
    assert log_of(raised.value.result.path, 1) == "rank 1 prints\n"


def test_every_rank_has_a_log_of_its_own(any_fit: Fit, tmp_path: Path) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        print(f"rank {rank} prints")
        os.system(f"echo a child of {rank}")
        os.write(2, f"descriptor 2 of {rank}\n".encode())

    for where in (None, tmp_path / "my logs"):
        result = any_fit(train, log_dir=where)
        logs = Path(where, Path(result.path).name) if where else Path(result.path, "logs")
        for rank in (0, 1):
            log = Path(logs, "attempt_0", f"rank_{rank}.log").read_text()
            expected = [f"rank {rank} prints", f"a child of {rank}", f"descriptor 2 of {rank}"]
            assert sorted(log.splitlines()) == sorted(expected)


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/nowhere"])
def test_a_log_directory_that_cannot_be_written_is_named_before_anything_starts(
    fit: Fit, storage: Path, tmp_path: Path, where: str
) -> None:
    (tmp_path / "file").touch()
    named = re.escape(f"cannot write logs in {tmp_path / where}: ")
    with pytest.raises(distrain.StorageError, match=f"{named}.*RunConfig\\(log_dir=...\\)"):
        fit(lambda: None, log_dir=tmp_path / where)
    assert not storage.exists()


def test_bytes_that_are_no_text_do_no_harm(fit: Fit, capsys: Captured) -> None:
    def train() -> None:
        os.write(1, b"\xff\xfe broken \xc3\n\x00\n")

    result = fit(train, workers=1)
    assert "broken" in capsys.readouterr().out
    assert Path(result.path, "logs/attempt_0/rank_0.log").read_bytes() == b"\xff\xfe broken \xc3\n\x00\n"


def test_what_a_worker_printed_before_it_died_is_there(any_fit: Fit, capsys: Captured) -> None:
    def train() -> None:
        for number in range(1000):
            print(f"line {number}")
        os.kill(os.getpid(), 9)

    with pytest.raises(distrain.WorkerGroupError):
        any_fit(train, workers=1)
    assert lines_of(capsys.readouterr().out, 0) == [f"line {number}" for number in range(1000)]


def test_a_flood_arrives_completely_and_in_order(any_fit: Fit, capsys: Captured) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        for number in range(FLOOD):
            print(f"rank {rank} line {number}")

    result = any_fit(train)
    console = capsys.readouterr().out
    for rank in (0, 1):
        expected = [f"rank {rank} line {number}" for number in range(FLOOD)]
        assert lines_of(console, rank) == expected
        assert log_of(result.path, rank).splitlines() == expected


def test_a_flood_does_not_fill_the_memory_of_a_slow_reader(fit: Fit, tmp_path: Path) -> None:
    """The console does not read for a while: nobody collects the flood, and the lines that it misses are counted."""
    script = tmp_path / "flood.py"
    script.write_text(
        "import sys, distrain\n"
        "def train():\n"
        "    for _ in range(1000):\n"
        "        sys.stdout.write(('x' * 99 + '\\n') * 1000)\n"
        "run = distrain.RunConfig(storage_path=sys.argv[1])\n"
        "distrain.DataParallelTrainer(train, run_config=run).fit()\n"
    )
    command = [sys.executable, str(script), str(fit.storage)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as user:
        assert user.stdout is not None
        import psutil

        family = psutil.Process(user.pid)
        shown = user.stdout.read(1 << 20)
        time.sleep(0.5)
        resident = sum(p.memory_info().rss for p in [family, *family.children(recursive=True)])
        shown += user.stdout.read()
    assert user.returncode == 0
    missed = sum(map(int, re.findall(rb"distrain: (\d+) lines are not shown", shown)))
    assert shown.count(b"[rank 0]") + missed == 1_000_000
    print("RES", resident >> 20)
    assert resident < 160 << 20


def test_a_console_that_is_gone_ends_no_training(fit: Fit, tmp_path: Path) -> None:
    script = tmp_path / "head.py"
    script.write_text(
        "import sys, distrain\n"
        "def train():\n"
        "    for number in range(20_000):\n"
        "        print('line', number)\n"
        "    open(sys.argv[2], 'w').close()\n"
        "run = distrain.RunConfig(storage_path=sys.argv[1], name='run')\n"
        "distrain.DataParallelTrainer(train, run_config=run).fit()\n"
    )
    done = tmp_path / "done"
    command = f"{sys.executable} {script} {fit.storage} {done} | head -n 3"
    head = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30)
    assert head.stdout.splitlines() == [f"[rank 0] line {number}" for number in range(3)]
    assert done.exists()
    assert log_of(fit.storage / "run", 0).splitlines()[-1] == "line 19999"
