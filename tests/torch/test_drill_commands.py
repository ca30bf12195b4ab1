"""``distrain drill`` on scripts that know nothing of distrain, with the launchers of others.

A normal run takes a sample; ``scripts/test --all`` runs them all.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import xml.etree.ElementTree as Tree
from pathlib import Path

import psutil
import pytest
import yaml

from distrain.drilling import isolation
from tests.conftest import wait_until
from tests.drill.cases import EXAMPLES, Case, drill, words
from tests.drill.ranks.cases import BAD, GOOD, REMARKS, Script
from tests.drill.rebuilt.cases import REBUILT

pytestmark = pytest.mark.timeout(400)
SAYS = {
    "batchnorm": "BatchNorm (`module.1`) is not synchronized",
    "lr-scales": "the learning rate of 2 ranks is 2 times that of one",
    "loss-scale": "the gradients of 2 ranks are 0.5 times those of one rank",
    "set-epoch": "set_epoch() is never called",
}
"""The remarks, by the names in the table."""


def ranks(script: Script) -> Case:
    """The comparison of the ranks of a script."""
    command = (*words(script.launcher), str(script.file), *script.arguments)
    return Case(("--only", "ranks", "--workers", "2", "--", *command))


@pytest.mark.sample(1)
@pytest.mark.parametrize("script", BAD, ids=lambda script: script.path)
def test_what_ranks_do_wrong_is_named_with_its_line(tmp_path: Path, script: Script) -> None:
    seen = drill(ranks(script), tmp_path)
    assert script.cause in seen.causes <= {script.cause, *script.also}, seen.output
    evidence = " ".join(cause["evidence"] for cause in seen.report["verdicts"][0]["causes"])
    assert any(f"{script.file.name}:{line})" in evidence for line in script.lines), seen.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("script", GOOD, ids=lambda script: script.path)
def test_ranks_that_train_as_one_cause_no_alarm(tmp_path: Path, script: Script) -> None:
    seen = drill(ranks(script), tmp_path)
    assert seen.report["ok"], seen.output
    assert "remark" not in seen.report["verdicts"][0]["text"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("script", REMARKS, ids=lambda script: script.path)
def test_what_may_be_on_purpose_is_a_remark(tmp_path: Path, script: Script) -> None:
    seen = drill(ranks(script), tmp_path)
    assert seen.report["ok"], seen.output
    assert SAYS[script.cause or ""] in seen.report["verdicts"][0]["text"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("old", [True, False], ids=["old", "fixed"])
@pytest.mark.parametrize("name", REBUILT)
def test_a_bug_in_the_resume_code_of_others_is_named_and_its_fix_is_exact(
    tmp_path: Path, name: str, *, old: bool
) -> None:
    rebuilt = REBUILT[name]
    command = (*words(rebuilt.launcher), *rebuilt.command(old)[len(rebuilt.launcher) :])
    seen = drill(Case(("--only", "kill", "--", *command)), tmp_path)
    assert seen.report["ok"] is not old, seen.output
    assert not old or set(rebuilt.causes) & seen.causes, seen.output


LONE = """
import os, sys, torch
from safetensors.torch import load_file, save_file
net, first = torch.nn.Linear(4, 1), 0
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
if "--continue" in sys.argv:
    first = int(sys.argv[-1].removesuffix(".safetensors"))
    net.load_state_dict(load_file(sys.argv[-1]))
for step in range(first, 12):
    torch.manual_seed(step)
    net(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    save_file(net.state_dict(), f"{step + 1:02}.safetensors")
"""


def test_the_fixture_fails_and_the_action_passes_once_a_script_is_told_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lib").mkdir()
    Path("lib/sitecustomize.py").write_text("import builtins; builtins.mine = 1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"), prepend=":")
    Path("train.py").write_text("print(mine)\n" + LONE)
    Path("conftest.py").write_text("pytest_plugins = ['distrain.pytest_plugin']")
    Path("test_train.py").write_text(f"def test_it(drill):\n    drill({[sys.executable, 'train.py']}, only=['all'])")
    done = subprocess.run([sys.executable, "-m", "pytest"], capture_output=True, text=True, check=False)
    assert "drifts from step" in done.stdout
    assert "training starts again from the beginning" in done.stdout
    assert "1 failed" in done.stdout
    action = yaml.safe_load((EXAMPLES.parent / ".github/actions/drill/action.yml").read_text())
    inputs = {name: value.get("default", "") for name, value in action["inputs"].items()} | {
        "command": f"{sys.executable} train.py",
        "only": "kill,all",
        "resume-with": "--continue $(ls *.safetensors | tail -1)",
    }
    step = action["runs"]["steps"][-1]
    given = {name: inputs[value.removeprefix("${{ inputs.").removesuffix(" }}")] for name, value in step["env"].items()}
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    subprocess.run(["bash", "-e", "-c", step["run"]], env=os.environ | given, check=True)
    suite = Tree.parse("drill.xml").getroot()
    assert [case.get("name") for case in suite.iter("testcase")] == [
        "undisturbed, twice", "kill -9 of rank 0", "everything is killed, then a new start"
    ]  # fmt: skip
    assert suite.find(".//failure") is None
    assert not list(tmp_path.glob("*.safetensors"))


NESTED = """
import os, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    def forward(self, inputs):
        return self.net(inputs).square().mean()
task, first, rank = Task(), 0, torch.distributed.get_rank()
optimizer = torch.optim.Adam(task.parameters())
if os.path.exists("last.pt"):
    first, state = torch.load("last.pt")
    task.load_state_dict(state)
for step in range(first, 12):
    torch.manual_seed(2 * step + rank)
    task(torch.randn(4, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        torch.save((step + 1, task.state_dict()), "new.pt")
        os.replace("new.pt", "last.pt")
    torch.distributed.barrier()
"""


def test_buffers_that_ddp_replaces_are_no_cause_even_if_it_is_a_part_of_another_module(tmp_path: Path) -> None:
    """The script forgets its optimizer; rank 1 begins with the buffers of rank 0, which its next forward() replaces."""
    (tmp_path / "train.py").write_text(NESTED)
    command = (*words(("torchrun", "--standalone", "--nproc-per-node", "2")), "train.py")
    seen = drill(Case(("--only", "all", "--", *command)), tmp_path)
    assert seen.causes == {"optimizer"}, seen.output


def test_ranks_die_with_a_drill_that_is_killed(tmp_path: Path) -> None:
    """The launcher has left one of them alone, as torchrun does if it is killed."""
    launcher = "(sleep 600 & echo $! > {drill}/orphan); sleep 600 & echo $! > {drill}/rank; wait"
    command = [sys.executable, "-m", "distrain", "drill", "--", "sh", "-c", launcher]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as drilling:
        assert drilling.stdout is not None
        folder = Path(drilling.stdout.readline().rpartition(" ")[2].strip())
        files = [folder / "undisturbed-1/files" / name for name in ("orphan", "rank")]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), what="the command has started")
        processes = [psutil.Process(int(file.read_text())) for file in files]
        drilling.kill()
    try:
        wait_until(lambda: not any(process.is_running() for process in processes), what="they are dead", timeout_s=10)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        isolation.remove(folder)


def test_bad_commands_are_explained(tmp_path: Path) -> None:
    for arguments, text in {
        ("--workers", "2", "--", "true"): "write {workers} into the command",
        ("--", "true", "{workers}"): "pass --workers N",
        ("--resume-with", "x", "train.py"): "only for `-- COMMAND`",
        ("--", "false"): "fails without any disturbance",
        ("--only", "ranks", "--", sys.executable, "-c", "import torch"): "there are no ranks to compare",
    }.items():
        assert text in drill(Case(arguments), tmp_path).output
