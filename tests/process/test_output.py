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


def test_a_log_directory_that_cannot_be_written_is_named_before_anything_starts(
    fit: Fit, storage: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    named = re.escape(f"cannot write logs in {tmp_path}/file/below: ")
    with pytest.raises(distrain.StorageError, match=f"{named}.*RunConfig\\(log_dir=...\\)"):
        fit(lambda: None, log_dir=tmp_path / "file/below")
    assert not storage.exists()


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
