"""Our claims about other tools: the pages agree, every cell has a fact, and a fact notices what changes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.documentation import ROOT

sys.path.append(str(ROOT / "scripts"))
from comparison.claims import PHRASES, elastic, torchrun_waits
from comparison.documents import BENCHMARK, COMPARISON, README, differences
from comparison.sources import Sources

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = ROOT / "scripts" / "check_comparison"


def check(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True)


def test_our_pages_agree_and_every_cell_has_a_fact() -> None:
    done = check("--documents")
    assert done.returncode == 0, done.stdout
    assert done.stdout == "all of it is true\n"


@pytest.mark.parametrize(
    ("page", "old", "new", "named"),
    [
        (
            BENCHMARK,
            "| start | 8 | Ray Train | 28.3 s |",
            "| start | 8 | Ray Train | 31.9 s |",
            "'28.3 s' instead of '31.9 s'",
        ),
        (README, "NCCL, opt-in", "no", "README.md: finds hangs / Ray Train: says 'no' instead of 'NCCL, opt-in'"),
        (
            COMPARISON,
            "| nothing | nothing |",
            "| nothing | values |",
            "returns to the caller / accelerate: says 'values'",
        ),
        (COMPARISON, "Ray 2.60.0", "Ray 2.61.0", "'Ray 2.60.0' is missing"),
        (COMPARISON, "torch 2.13.0", "torch 2.15.0", "'on two CPUs with torch 2.13.0' is missing"),
        (README, "one H100 and one H200,", "one GPU,", "README.md, Status: 'one H100 and one H200' is missing"),
        (
            "docs/failures.md",
            "torchrun waits 30 s",
            "torchrun waits 5 s",
            "'torchrun waits 30 s' is missing",
        ),
    ],
)
def test_what_one_page_says_otherwise_is_named(tmp_path: Path, page: str, old: str, new: str, named: str) -> None:
    for name in {README, COMPARISON, BENCHMARK, *(claim.place for claim in PHRASES)}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    text = (tmp_path / page).read_text()
    assert old in text
    (tmp_path / page).write_text(text.replace(old, new))
    found = differences(tmp_path)
    assert any(named in line for line in found), found


RUN = """\
def get_args_parser():
    parser.add_argument("--nnodes", action=env, default={nnodes!r})
"""
AGENT = """\
class Agent:
    def run(self):
        if num_nodes_waiting > 0:
            self._restart_workers(self._worker_group)
"""
PROCESSES = """\
class PContext:
    def close(self, death_sig=None, timeout: int = {timeout}) -> None: ...
"""
LAUNCH = """\
class LaunchConfig:
    def __post_init__(self):
        self.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
"""


def torch_sources(folder: Path, *, nnodes: str = "1:1", timeout: int = 30) -> Sources:
    files = {
        "run.py": RUN.format(nnodes=nnodes),
        "elastic/agent/server/api.py": AGENT,
        "elastic/multiprocessing/api.py": PROCESSES.format(timeout=timeout),
        "launcher/api.py": LAUNCH,
    }
    for name, text in files.items():
        path = folder / "torch" / "distributed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(folder)


def test_a_fact_reads_defaults_of_options_and_of_parameters(tmp_path: Path) -> None:
    there = torch_sources(tmp_path / "there")
    assert elastic(there)
    assert torchrun_waits(30)(there)
    other = torch_sources(tmp_path / "other", nnodes="1", timeout=5)
    assert not elastic(other)
    assert not torchrun_waits(30)(other)


def test_a_fact_reads_fields_methods_exports_and_constants(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "import os\n"
        "try:\n    from package import exported\nexcept ImportError:\n    pass\n"
        "LIMITS = ['pdsh', 'slurm']\n"
        "class Result:\n    value: int | None = None\n    retries: int = field(default=3)\n"
        "    def rank(self, index, *, strict=True): ...\n"
    )
    sources = Sources(tmp_path)
    assert sources.defines("module.py", "exported")
    assert sources.defines("module.py", "Result.rank")
    assert not sources.defines("module.py", "Result.replica")
    assert sources.default("module.py", "LIMITS")[0] == "pdsh"
    assert sources.default("module.py", "Result.value") is None
    assert sources.default("module.py", "Result.retries") == 3
    assert sources.default("module.py", "Result.rank(strict)") is True
    with pytest.raises(KeyError):
        sources.default("module.py", "Result.removed")
    with pytest.raises(FileNotFoundError):
        sources.lacks("removed.py", "ssh")


def test_a_cell_whose_fact_does_not_hold_is_named(tmp_path: Path) -> None:
    """An interpreter whose torchrunx has neither restarts nor anything else."""
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    [site] = (tmp_path / "lib").glob("*/site-packages")
    (site / "torchrunx-0.4.0.dist-info").mkdir()
    (site / "torchrunx-0.4.0.dist-info" / "METADATA").write_text("Name: torchrunx\nVersion: 0.4.0\n")
    (site / "torchrunx").mkdir()
    (site / "torchrunx" / "launcher.py").write_text("def run(): ...\n")
    done = check("--python", str(tmp_path / "bin" / "python"))
    assert done.returncode == 1
    assert "starts many hosts / torchrunx: 'ssh' is not true of torchrunx 0.4.0" in done.stdout
    assert "restarts / torchrunx" not in done.stdout
    assert "read: torchrunx 0.4.0\n" in done.stdout


@pytest.mark.slow
def test_what_we_say_is_true_of_what_is_installed() -> None:
    done = check("--python", sys.executable)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^read: .*torch \d", done.stdout)
