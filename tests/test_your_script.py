"""docs/your_script.md: a few lines change, both versions train, and the new one continues at its checkpoint."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distrain import Result
from tests.documentation import ROOT

PAGE = (ROOT / "docs" / "your_script.md").read_text()
SECTIONS = {
    section.partition("\n")[0]: re.findall(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    for section in PAGE.split("\n## ")[1:]
}
"""Of each section, the change of the command, and that of the script."""
MOST = 10
FAILS_ONCE = """
import os
import distrain.session

def report(*args, _report=distrain.report, **options):
    if distrain.get_context().get_world_rank() == 0 and os.path.exists("reported") and not os.path.exists("failed"):
        open("failed", "w").close()
        raise OSError("before the second report")
    _report(*args, **options)
    open("reported", "w").close()

distrain.report = distrain.session.report = report
"""


def before_and_after(change: str) -> tuple[str, str]:
    """Return the text that a diff starts from, and the one that it leads to."""
    lines = change.splitlines(keepends=True)
    before, after = ("".join(line[1:] or "\n" for line in lines if line[0] != sign) for sign in "+-")
    return before, after


@pytest.mark.parametrize("section", SECTIONS)
def test_few_lines_change(section: str) -> None:
    before, after = before_and_after(SECTIONS[section][-1])
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    assert 1 < len(changed) <= MOST, "\n".join(changed)


@pytest.mark.sample(1, of="scripts of docs/your_script.md")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("section", SECTIONS)
def test_both_versions_train_and_the_new_one_continues(section: str, tmp_path: Path) -> None:
    commands, scripts = map(before_and_after, SECTIONS[section])
    if section == "Ray Train":  # Ray is not installed; the script of either version starts its workers itself
        commands = commands[1], commands[0]
    for name, command, script in zip(("before", "after"), commands, scripts, strict=True):
        folder = tmp_path / name
        folder.mkdir()
        can_continue = "get_checkpoint" in script
        (folder / "train.py").write_text(FAILS_ONCE * can_continue + script)
        output = run(command.replace("--num-workers", "--max-failures 1 --num-workers"), folder)
        if name == "after":
            (directory,) = (folder / "distrain_results").iterdir()
            assert (folder / "failed").exists() == can_continue
            reports = Result.from_path(directory).metrics_dataframe
            assert reports is not None
            assert len(reports) == 3, output  # one for each epoch


def run(command: str, folder: Path) -> str:
    environment = {**os.environ, "HOME": str(folder), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    output = done.stdout + done.stderr
    # Under torchrun, a process of gloo may abort while it exits, after its last epoch.
    assert done.returncode == 0 or (command.startswith("torchrun") and (folder / "state.pt").exists()), output
    return output
