"""The exit status of scripts/test, which decides in CI. The tools that it calls are stand-ins that pass or fail."""

import shutil
import subprocess
from pathlib import Path

import pytest

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
