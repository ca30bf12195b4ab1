"""scripts/benchmark with its smallest settings: the table, the JSON, and the pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

BENCHMARK = Path(__file__).resolve().parent.parent / "scripts" / "benchmark"


def benchmark(*arguments: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def test_results_become_a_table_and_a_picture_for_the_docs_and_are_compared_with_earlier_ones(tmp_path: Path) -> None:
    def results(distrain_s: float, torchrun_s: float) -> Path:
        launchers = {"distrain fit()": distrain_s, "torchrun": torchrun_s, "<other>": None}
        rows = [
            {"measure": "start", "workers": 8, "launcher": name, "unit": "s", "median": median, "min": median}
            | {"max": median, "ratio_to_distrain": median and median / distrain_s, "values": [median]}
            for name, median in launchers.items()
        ]
        machine = {"cpus": 2, "gpus": 0}
        path = tmp_path / f"{distrain_s}.json"
        path.write_text(json.dumps({"rows": rows, "machine": machine, "rounds": 3, "versions": {"a": {"torch": "2"}}}))
        return path

    earlier, now = results(2.0, 6.0), results(1.0, 4.0)
    done = benchmark("--show", str(now), "--compare", str(earlier), "--docs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    ours, theirs = (" ".join(line.split()) for line in done.stdout.splitlines()[-2:])
    assert ours == "start 8 distrain fit() 0.50 x"
    assert theirs == "start 8 torchrun 0.67 x 3.00 -> 4.00 x distrain"
    table = (tmp_path / "benchmark.md").read_text()
    assert "\n| start | 8 | torchrun | 4.00 s | 4.00 s to 4.00 s | 4.00 | 1/1 |\n" in table
    assert "\n| start | 8 | <other> | failed |  |  | 0/1 |\n" in table
    bars = ElementTree.parse(tmp_path / "benchmark.svg").findall(".//{*}rect[@rx]")
    assert [float(bar.get("width", "")) for bar in bars] == [75.0, 300.0, 1.0]

    assert f"--show: {tmp_path}: Is a directory" in benchmark("--show", str(tmp_path)).stderr
    now.write_text("[]")
    assert f"--compare: {now}: has no results of this script" in benchmark("--compare", str(now)).stderr


def test_a_disk_that_cannot_hold_the_checkpoints_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    done = benchmark("--only", "checkpoint", "--checkpoint-mb", str(10**12), "--disk", str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"--disk {tmp_path}: 6,000,000,000,384 MB are needed" in done.stderr
