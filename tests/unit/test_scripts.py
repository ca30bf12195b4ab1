"""The exit status of scripts/test, which decides in CI. The tools that it calls are stand-ins that pass or fail. And
of scripts/check_gpu, without a GPU."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distrain import forkserver

SCRIPT = Path(__file__).parents[2] / "scripts" / "test"
TOOLS = {
    "setup_venv": "scripts/setup_venv",
    "ruff": ".venv/bin/ruff",
    "mypy": ".venv/bin/mypy",
    "python": ".venv/bin/python",
    "test_tensorflow": "scripts/test_tensorflow",
}


def scripts_test(folder: Path, *arguments: str, failing: str = "") -> subprocess.CompletedProcess[str]:
    """Run a copy of scripts/test in `folder`, where the call that contains `failing` fails."""
    for name, path in TOOLS.items():
        tool = folder / path
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(
            f'#!/usr/bin/env bash\necho "{name} $*"\n[[ -z "{failing}" || " {name} $* " != *" {failing} "* ]]\n'
        )
        tool.chmod(0o755)
    script = shutil.copy(SCRIPT, folder / "scripts" / "test")
    return subprocess.run([script, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [(), ("--all",), ("tests/unit", "-x")])
def test_success_is_the_status_when_everything_passes(tmp_path, arguments):
    done = scripts_test(tmp_path, *arguments)

    assert (done.returncode, done.stderr) == (0, "")
    assert "python -m pytest" in done.stdout


@pytest.mark.parametrize(
    "failing",
    ["setup_venv", "ruff check", "ruff format", "mypy", "tests/process", "--ignore=tests/process", "test_tensorflow"],
)
def test_each_thing_that_fails_makes_it_fail(tmp_path, failing):
    assert scripts_test(tmp_path, failing=failing).returncode == 1


def test_all_tests_run_when_some_fail(tmp_path):
    done = scripts_test(tmp_path, failing="--ignore=tests/process")

    assert done.stdout.count("python -m pytest") == 2
    assert "test_tensorflow" in done.stdout


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))

    scripts_test(tmp_path)

    assert list(temporary.iterdir()) == []


# -- check_gpu -------------------------------------------------------------------------------------------------------

CHECK_GPU = SCRIPT.with_name("check_gpu")


def check_gpu(out, *arguments):
    command = [sys.executable, CHECK_GPU, "--out", out, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_without_a_driver_no_gpu_is_checked(tmp_path, monkeypatch):
    (tmp_path / "libcuda.so.1").touch()  # shadows one that there may be
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    done = check_gpu(tmp_path / "out")

    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("no GPU here")


def test_a_check_that_needs_a_gpu_is_skipped_on_the_cpu(tmp_path):
    done = check_gpu(tmp_path, "--on-cpu", "--only", "2,6")

    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["2", "skip"], ["6", "skip"], ["0", "pass,"]]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [result["summary"] for result in results] == ["needs a GPU"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "2_counting.log", "6_hang.log"}


def test_a_check_that_takes_too_long_fails(tmp_path):
    done = check_gpu(tmp_path, "--on-cpu", "--only", "4", "--limit-s", "0.2")

    assert done.returncode == 1
    assert "4  fail" in done.stdout
    assert "took longer than 0 s" in done.stdout


def test_it_asks_the_forkserver_by_names_that_exist():
    names = set(re.findall(r"\bforkserver\.(\w+)", CHECK_GPU.read_text()))

    assert names
    assert all(hasattr(forkserver, name) for name in names)
