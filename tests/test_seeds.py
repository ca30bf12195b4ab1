"""Scripts for Ray Train, migrated as the README says and run as a user runs them: those for PyTorch.

The scripts are in tests/seeds. Each uses a part of Ray's interface as Ray's guides do. Those for TensorFlow are run by
tests/tensorflow/test_seeds.py.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain import Result

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(300)
ROWS = list(range(0, 40, 4))
"""The first number of each row of the scripts' data."""


def migrated(script: str) -> str:
    """Return a script of tests/seeds with no more edits than the README's migration names."""
    source = Path(__file__).with_name("seeds").joinpath(f"{script}.py").read_text()
    for old, new in (
        ("from ray import train", "import distrain as train"),
        ("from ray.air import", "from distrain import"),
        ("ray.train", "distrain"),
    ):
        source = source.replace(old, new)
    assert not re.search(r"\bray\b", source), f"Ray is left in:\n{source}"
    return source


@dataclass(frozen=True)
class Ran:
    """A script that has run, and its runs."""

    exit_code: int
    output: str
    errors: str
    home: Path

    @property
    def results(self) -> list[Result]:
        """Of the runs in the default place, in the order of their start."""
        runs = (self.home / "distrain_results").glob("*/run.json")
        return [Result.from_path(file.parent) for file in sorted(runs, key=lambda file: file.parent.stat().st_ctime_ns)]


def run_source(source: str, folder: Path, *arguments: str, use_gpu: bool = False, as_ray: bool = False) -> Ran:
    """Run a script in a folder that is also its home, with another one for its temporary files."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    (folder / "script.py").write_text(source)
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(temporary)}
    if not use_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    launcher = ["-m", "distrain", "run", "--as-ray"] if as_ray else []
    command = [sys.executable, *launcher, "script.py", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    return Ran(done.returncode, done.stdout, done.stderr, folder)


def finish_source(source: str, folder: Path, *arguments: str, **how: bool) -> Ran:
    """Run a script that has to reach its end without a traceback."""
    ran = run_source(source, folder, *arguments, **how)
    assert ran.exit_code == 0, f"{ran.errors}\n{ran.output}"
    assert "Traceback" not in ran.errors, ran.errors
    return ran


def reports(result: Result) -> dict[int, list[dict[str, Any]]]:
    """Return the metrics of every report, by rank."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        by_rank.setdefault(record["rank"], []).append(record["metrics"])
    return by_rank


def checkpoint_files(result: Result) -> list[str]:
    assert result.checkpoint is not None
    return sorted(path.name for path in Path(result.checkpoint.path).iterdir() if not path.name.startswith("."))


def check_the_guide(ran: Ran, storage: str) -> None:
    assert f"result: 1 {storage}/guide None\n" in ran.output
    result = Result.from_path(f"{storage}/guide")
    printed = [ast.literal_eval(metrics) for metrics in re.findall(r"rank 0: ({.*})", ran.output)]
    assert result.metrics == printed[-1]
    assert [metrics["global_batch_size"] for metrics in printed] == [4, 4]


@pytest.mark.sample(1, of="migrated scripts")
def test_the_guide(tmp_path: Path) -> None:
    storage = str(tmp_path / "runs")
    check_the_guide(finish_source(migrated("guide"), tmp_path, storage), storage)
    result = Result.from_path(f"{storage}/guide")
    assert checkpoint_files(result) == ["model.pt"]

    first, second = (reports(result)[rank] for rank in (0, 1))
    orders = [a["seen"] + b["seen"] for a, b in zip(first, second, strict=True)]
    assert [sorted(order) for order in orders] == [ROWS, ROWS], "each epoch, the workers share the rows"
    assert orders[0] != orders[1], "set_epoch() changes the order"


@pytest.mark.gpu(2)
def test_the_guide_on_gpus(tmp_path: Path) -> None:
    storage = str(tmp_path / "runs")
    check_the_guide(finish_source(migrated("guide"), tmp_path, storage, "gpu", use_gpu=True), storage)


@pytest.mark.sample(1, of="migrated scripts")
def test_a_checkpoint_in_the_temporary_directory_has_what_the_ranks_wrote_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tmp"
    for name in ("of_a_program", "model.checkpoint.old"):
        folder.joinpath(name).mkdir(parents=True)
        folder.joinpath(name, "data").touch()
    folder.joinpath("older").touch()
    os.mkfifo(folder / "pipe")
    folder.joinpath("link").symlink_to(folder / "older")
    with socket.socket(socket.AF_UNIX) as program, keep_writing(folder / "log"):
        monkeypatch.chdir(folder)  # the path of a socket is short
        program.bind("socket")
        ran = finish_source(migrated("temporary_files"), tmp_path)
    assert "has only the files that this rank wrote there: model.checkpoint. Write the files into" in ran.errors
    [result] = ran.results
    assert checkpoint_files(result) == ["model.checkpoint"]
    assert result.checkpoint is not None
    import torch  # TensorFlow's tests, which have none, import this module, too

    weights = torch.load(Path(result.checkpoint.path, "model.checkpoint"), weights_only=True)
    assert set(weights) == {"module.weight", "module.bias"}
    assert folder.joinpath("model.checkpoint").exists()


@contextlib.contextmanager
def keep_writing(path: Path) -> Iterator[None]:
    """Have another program write a file, again and again."""
    code = f"import time\nwhile True: open({str(path)!r}, 'a').write('line\\n'); time.sleep(0.01)"
    program = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def test_every_script_is_run() -> None:
    scripts = {path.stem for path in Path(__file__).with_name("seeds").glob("*.py")}
    tests = Path(__file__).read_text() + (Path(__file__).with_name("tensorflow") / "test_seeds.py").read_text()
    assert set(re.findall(r'\bmigrated\("(\w+)"\)', tests)) == scripts
