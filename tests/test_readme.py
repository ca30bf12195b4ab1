"""The commands of the README run where there is only what its own commands install.

Such an environment has links to packages of the interpreter of the tests: those that the extra asks for, and what these
ask for. So it is made in milliseconds, without a network.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from tests.documentation import ROOT, blocks_of
from tests.hosts.bare import make_environment
from tests.hosts.one_machine import EXECUTES, FAKE_SSH

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = blocks_of(ROOT / "README.md")
PROGRAM = next(block.text for block in BLOCKS if block.language == "python")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TORCHRUN_SCRIPT = """\
import sys, torch, torch.distributed as dist
dist.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
print(sys.argv[1:], total.item(), "ranks")
dist.destroy_process_group()
"""
RAY_SCRIPT = """\
import ray.train
from ray.train.torch import TorchTrainer
def train():
    ray.train.report({"rank": ray.train.get_context().get_world_rank()})
print(TorchTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2)).fit().metrics)
"""
RUNS = {
    "python train.py": ("torch", {"train.py": PROGRAM}, "{'loss': "),
    "distrain drill --workers 2 --only kill,all train.py": ("torch", {"train.py": PROGRAM}, "train.py resumes exactly"),
    "distrain run --hosts alpha:4,beta:4 torchrun_script.py --lr 0.1": (
        "torch",
        {"torchrun_script.py": TORCHRUN_SCRIPT},
        "['--lr', '0.1'] 8.0 ranks",
    ),
    "distrain run --as-ray ray_train.py": ("torch", {"ray_train.py": RAY_SCRIPT}, "{'rank': 0}"),
    "scripts/quickstart --epochs 1": ("examples", {}, "accuracy of the loaded checkpoint: "),
    "scripts/docs": ("docs", {}, "The documentation is in build/site/index.html"),
}
"""By command: the extra that is installed, the files that the user has, and what is printed."""
OF_CI = {'pip install "distrain[torch]"', "scripts/test"}
"""The first makes the environment; the second runs this test."""


def test_each_command_of_the_readme_is_run() -> None:
    lines = "\n".join(block.text for block in BLOCKS if block.language == "sh").splitlines()
    commands = {line.partition("#")[0].strip() for line in lines if line}
    assert commands - OF_CI <= {command.partition(" --epochs")[0] for command in RUNS}


@pytest.mark.sample(1, of="commands of the README")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", RUNS)
def test_a_command_of_the_readme_needs_only_what_the_readme_installs(tmp_path: Path, command: str) -> None:
    extra, files, printed = RUNS[command]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(FAKE_SSH.format(body=EXECUTES))
    (tmp_path / "bin" / "ssh").chmod(0o755)
    folder = clone(tmp_path / "distrain", extra)
    for name, text in files.items():
        (folder / name).write_text(text)
    environment = {
        "HOME": str(tmp_path),
        "LANG": "C.UTF-8",
        "PATH": f"{folder}/.venv/bin:{tmp_path}/bin:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert not re.search(r"Warning|not installed|Traceback", done.stderr), done.stderr


def clone(folder: Path, extra: str) -> Path:
    """Make a directory like a clone of the repository in whose .venv scripts/setup_venv has installed an extra."""
    folder.mkdir()
    for name in ("distrain", "docs", "examples", "pyproject.toml", "scripts", "CHANGELOG.md"):
        (folder / name).symlink_to(ROOT / name)
    make_environment(folder / ".venv", None)
    [site] = (folder / ".venv" / "lib").glob("*/site-packages")
    for package in packages(Requirement(f"distrain[{extra}]"), set()):
        for top in {path.parts[0] for path in package.files or () if not path.name.endswith(".pth")}:
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
    (site / "distrain").symlink_to(ROOT / "distrain")
    program = folder / ".venv" / "bin" / "distrain"
    program.write_text(f"#!{folder}/.venv/bin/python\nfrom distrain.__main__ import main\nmain()\n")
    program.chmod(0o755)
    checksum = subprocess.run("cksum <pyproject.toml", shell=True, cwd=folder, capture_output=True, text=True)
    (folder / ".venv" / f"installed-{extra}").write_text(f"{checksum.stdout.strip()} {folder}\n")
    (folder / ".venv" / "bin" / "pip").touch(mode=0o755)
    return folder


def packages(wanted: Requirement, seen: set[str]) -> list[Distribution]:
    """Return the installed packages that a requirement asks for. distrain's own are those of pyproject.toml."""
    if str(wanted) in seen:
        return []
    seen.add(str(wanted))
    if wanted.name == "distrain":
        found, needs = [], [*PROJECT["dependencies"]]
        needs += [need for extra in wanted.extras for need in PROJECT["optional-dependencies"][extra]]
    else:
        try:
            found = [Distribution.from_name(wanted.name)]
        except PackageNotFoundError:  # what only another platform needs, such as CUDA's packages
            return []
        needs = found[0].requires or []
    for need in map(Requirement, needs):
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
            found += packages(need, seen)
    return found
