"""The exit status of scripts/test, its samples, scripts/check_gpu, and scripts/draw_packages.

CI relies on that exit status. The tools that scripts/test calls are stand-ins that pass or fail.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distrain.agent import forkserver
from tests.tables import left_out

SCRIPT = Path(__file__).parents[2] / "scripts" / "test"
TOOLS = {
    "setup_venv": "scripts/setup_venv",
    "ruff": ".venv/bin/ruff",
    "mypy": ".venv/bin/mypy",
    "python": ".venv/bin/python",
    "test_tensorflow": "scripts/test_tensorflow",
}
UNITS, PROCESSES, HOSTS = "tests/unit/test_units.py", "tests/process/test_runs.py", "tests/hosts/test_hosts.py"
TORCH, TENSORFLOW = "tests/torch/test_torch.py", "tests/test_tf.py"
STORAGE = "tests/process/object_storage/test_storage.py"
PASSES = "def test_it():\n    assert True\n"
FAILS_ONCE = """\
import pathlib

def test_it():
    try:
        pathlib.Path(__file__).with_suffix(".ran").touch(exist_ok=False)
    except FileExistsError:
        return
    assert not "at first"
"""
KILLS_PYTEST_ONCE = FAILS_ONCE.replace('assert not "at first"', "__import__('os')._exit(1)")
"""With the status of tests that failed, as pytest-timeout does."""
CANNOT_BE_IMPORTED = "raise RuntimeError\n"


def write_tool(folder: Path, name: str, lines: str) -> None:
    tool = folder / TOOLS[name]
    tool.parent.mkdir(parents=True, exist_ok=True)
    tool.write_text(f"#!/usr/bin/env bash\n{lines}\n")
    tool.chmod(0o755)


def scripts_test(folder: Path, *arguments: str, failing: str = "") -> subprocess.CompletedProcess[str]:
    """Run a copy of scripts/test in `folder`, where the call that contains `failing` fails."""
    for name in TOOLS:
        write_tool(folder, name, f'echo "{name} $*"\n[[ -z "{failing}" || " {name} $* " != *" {failing} "* ]]')
    return run_script(folder, *arguments)


PARTS = {
    "units": UNITS, "processes": PROCESSES, "torch": TORCH, "tensorflow": TENSORFLOW, "hosts": HOSTS,
    "storage": STORAGE,
}  # fmt: skip


def scripts_test_of(folder: Path, **sources: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of scripts/test in `folder` with the real pytest, where each part has one file of these tests."""
    for name in TOOLS:
        write_tool(folder, name, "")
    for part, path in PARTS.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(sources.get(part, PASSES))
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests/unit\n")
    write_tool(folder, "python", f'exec "{sys.executable}" "$@"')
    write_tool(folder, "test_tensorflow", f'exec "{sys.executable}" -m pytest {TENSORFLOW} "$@"')
    return run_script(folder)


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(SCRIPT.with_name("lint"), folder / "scripts" / "lint")
    script = shutil.copy(SCRIPT, folder / "scripts" / "test")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return subprocess.run([script, *arguments], capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize("arguments", [(), ("--all",), ("tests/unit", "-x")])
def test_success_is_the_status_when_everything_passes(tmp_path, arguments):
    done = scripts_test(tmp_path, *arguments)

    assert (done.returncode, done.stderr) == (0, "")
    assert "python -m pytest" in done.stdout


@pytest.mark.parametrize(
    "failing",
    [
        *("setup_venv", "ruff check", "ruff format", "mypy"),
        *("--ignore=tests/process", "pytest tests/process", "tests/hosts", "tests/torch", "test_tensorflow"),
        "pytest tests/process/object_storage",
    ],
)
def test_each_thing_that_fails_makes_it_fail(tmp_path, failing):
    assert scripts_test(tmp_path, failing=failing).returncode == 1


def test_tests_that_pass_when_they_run_again_are_flaky(tmp_path):
    done = scripts_test_of(tmp_path, **dict.fromkeys(PARTS, FAILS_ONCE))

    assert done.returncode == 0, done.stdout
    assert (done.stdout.count("= 1 failed in"), done.stdout.count("= 1 passed in")) == (6, 6)
    assert done.stdout.count('>       assert not "at first"') == 6
    first, *others = done.stdout.splitlines()[-7:]
    assert first.startswith("FLAKY: ")
    assert others == [f"    {path}::test_it" for path in PARTS.values()]


@pytest.mark.parametrize(
    ("part", "source", "status"), [("processes", KILLS_PYTEST_ONCE, 1), ("units", CANNOT_BE_IMPORTED, 2)]
)
def test_a_run_that_did_not_reach_its_end_is_not_flaky(tmp_path, part, source, status):
    done = scripts_test_of(tmp_path, **{part: source})

    assert done.returncode == status
    assert "again" not in done.stdout
    assert "FLAKY" not in done.stdout


class Item:
    """What left_out() asks a test of pytest's for."""

    def __init__(self, nodeid, *marks):
        self.nodeid = nodeid
        self.get_closest_marker = {mark.name: mark.mark for mark in marks}.get


def test_slow_tests_and_what_is_not_in_a_sample_are_left_out():
    plain, slow = Item("test_it"), Item("test_slow", pytest.mark.slow)
    sets = [Item(f"test_sets[{n}]", pytest.mark.sample(2)) for n in range(9)]
    family = [Item(f"test_{n}", pytest.mark.sample(3, of="family")) for n in range(9)]
    found = left_out([plain, slow, *sets, *family])
    assert plain not in found
    assert slow in found
    assert (len(found & set(sets)), len(found & set(family))) == (7, 6)
    assert left_out(family[:3]) == set(), "when a few are named, these run"


# -- check_gpu -------------------------------------------------------------------------------------------------------

CHECK_GPU = SCRIPT.with_name("check_gpu")


def check_gpu(out, *arguments):
    command = [sys.executable, CHECK_GPU, "--out", out, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_it_asks_the_forkserver_by_names_that_exist():
    names = set(re.findall(r"\bforkserver\.(\w+)", CHECK_GPU.read_text()))

    assert names
    assert all(hasattr(forkserver, name) for name in names)


# -- draw_packages ---------------------------------------------------------------------------------------------------

DRAW_PACKAGES = SCRIPT.with_name("draw_packages")


def draw_packages(script, *arguments):
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=60)


def test_the_picture_of_the_packages_is_up_to_date():
    done = draw_packages(DRAW_PACKAGES, "--check")

    assert (done.returncode, done.stderr) == (0, "")
