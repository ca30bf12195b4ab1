"""python -m distrain.launch, run as a user runs it: what it starts, with which arguments, files and names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain import Result
from distrain.cli.run.command import run_command
from distrain.cli.run.options import make_parser

if TYPE_CHECKING:
    from collections.abc import Callable

    Launch = Callable[..., subprocess.CompletedProcess[str]]

sampled = pytest.mark.sample(4, of="scripts and functions on the command line")


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run the command line with ``tmp_path`` as working directory and ``runs`` in it as storage."""

    def run(*arguments: str, cwd: Path = tmp_path, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "distrain.launch", "--storage-path", str(tmp_path / "runs"), *arguments]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)

    return run


def lines(run: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines that the ranks printed, in order of rank."""
    assert run.returncode == 0, run.stderr
    return sorted(run.stdout.splitlines())


# -- scripts ---------------------------------------------------------------------------------------------------------

TORCHRUN_SCRIPT = """
import argparse, os, time
from pathlib import Path
import torch
from torch import distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
args = parser.parse_args()

for epoch in range(args.epochs):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    done = Path(f"done-{epoch}")  # rank 0, too: its old store still answers before
    if os.environ["RANK"] == "0":
        done.touch()
    while not done.exists():
        time.sleep(0.001)
dist.init_process_group("gloo")  # and it stays open
dist.barrier()  # a rank that ends while another one is still connecting would make it fail
told = [os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS")]
print(int(total), args.epochs, *told)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_torchrun_script_runs_unmodified_with_its_options(launch: Launch, tmp_path: Path, start_method: str) -> None:
    """Also one that leaves its process group and makes another, over and over."""
    (tmp_path / "train.py").write_text(TORCHRUN_SCRIPT)
    options = ["--standalone", "--nnodes=1", "--nproc_per_node=2", "--max-restarts", "3"]
    ignored = ["--rdzv-backend", "c10d", "--master_port=29501"]
    run = launch(*options, *ignored, "--start-method", start_method, "train.py", "--epochs", "3")
    assert lines(run) == [f"[rank {rank}] 2 3 {rank} 2 3" for rank in range(2)], run.stderr
    assert "distrain: --master-port, --rdzv-backend: no effect; these options are for torchrun only\n" in run.stderr


@sampled
def test_a_script_may_set_variables_above_its_imports_and_its_run_goes_to_the_home_directory(tmp_path: Path) -> None:
    """Torch reads this one when it is imported, which the forkserver does before the scripts of others."""
    (tmp_path / "train.py").write_text(
        "import os\nos.environ['PYTORCH_JIT'] = '0'\nimport torch\nprint(torch.jit._state._enabled.enabled)"
    )
    command = [sys.executable, "-m", "distrain.launch", "train.py"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert lines(run) == ["[rank 0] False"]
    (folder,) = (tmp_path / "distrain_results").iterdir()
    assert str(folder) in run.stderr


@sampled
def test_a_script_sees_itself_as_under_plain_python(launch: Launch, tmp_path: Path) -> None:
    """From another directory, by a relative path: argv, file, first place on the path, working directory, siblings."""
    source = tmp_path / "project"
    source.mkdir()
    (source / "sibling.py").write_text("word = 'sibling'")
    (source / "train.py").write_text(
        "import os, sys, sibling\n"
        "print([sys.argv[0], __file__, os.path.samefile(sys.path[0], os.path.dirname(os.path.abspath(__file__))),\n"
        "       os.getcwd(), __name__, sibling.word, sys.modules['__main__'].__dict__ is globals()])\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = "../project/train.py"
    plain = subprocess.run([sys.executable, script], cwd=elsewhere, capture_output=True, text=True, check=True)
    assert lines(launch(script, cwd=elsewhere)) == [f"[rank 0] {plain.stdout.rstrip()}"]


@sampled
def test_a_module_runs_as_a_script(launch: Launch, tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nos.environ['KMP_A'] = '1'")
    (package / "other.py").write_text("word = 'other'")
    (package / "train.py").write_text(
        "import sys, torch\nfrom .other import word\nprint(__name__, __package__, word, sys.argv[1:], sys.argv[0])"
    )
    run = launch("--num-workers", "1", "-m", "pack.train", "--num-workers", "7", "-m", "x")
    script = package / "train.py"
    assert "torch may not notice the value of KMP_A, " in run.stderr
    assert lines(run) == [f"[rank 0] __main__ pack other ['--num-workers', '7', '-m', 'x'] {script}"]


@sampled
def test_files_named_like_the_standard_library_do_no_harm(launch: Launch, tmp_path: Path) -> None:
    """The script still gets the directory's own first, as under plain python."""
    for name in ("queue", "inspect", "random", "json", "socket", "selectors", "struct"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the user has a file of this name')")
    (tmp_path / "token.py").write_text("word = 'mine'")
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("import queue, inspect, random; print(queue.Queue.__name__)")
    assert lines(launch("project/train.py")) == ["[rank 0] Queue"]


# -- functions -------------------------------------------------------------------------------------------------------

FUNCTION = """
import argparse, os, sys
import helper
from torch import distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--name")
args = parser.parse_args()

def train(config):
    print(config, dist.get_world_size(), helper.word, args.epochs, args.name, os.path.samefile(sys.argv[0], __file__))
"""


@sampled
@pytest.mark.parametrize(
    ("target", "cwd", "start_method"),
    [
        ("pack/job.py:train", ".", "forkserver"),
        ("job:train", "pack", "forkserver"),
        ("job.py:train", "pack", "spawn"),
    ],
)
def test_a_function_gets_the_config_and_its_file_the_arguments_that_follow_it(
    launch: Launch, tmp_path: Path, target: str, cwd: str, start_method: str
) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "job.py").write_text(FUNCTION)
    (tmp_path / "pack" / "helper.py").write_text("import os\nword = 'helped'\nos.environ['KMP_A'] = '1'")
    options = ["--set", "a=1", "--num-workers=2", "--start-method", start_method]
    run = launch(*options, target, "--epochs=3", "--name", "mine", cwd=tmp_path / cwd)
    assert run.stderr.count("torch may not notice the value of KMP_A, ") == 1
    assert lines(run) == [f"[rank {rank}] {{'a': 1}} 2 helped 3 mine True" for rank in range(2)]
    assert "goes to" not in run.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "train", "--num_workers=2", "--name=x"], "--num_workers: goes to train, as"),
        (["--num-workers=2", "train.py:main", "--set", "a=1", "--config=x"], "--set, --config: goes to train.py:main,"),
        (["train.py", "--name", "mine", "--node-rank", "1"], None),  # its own
        (["--num-workers=2", "train.py", "--seed", "3"], None),  # it may have such an option elsewhere
    ],
)
def test_options_behind_the_target_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("add('--name')\nadd('--node_rank')\ndef main(): ...")
    monkeypatch.setattr("distrain.cli.run.command.run_work", lambda *_, **__: None)
    told: list[str] = []
    monkeypatch.setattr("distrain.cli.run.target.warn", told.append)
    assert run_command(words, []) == 0
    assert len(told) == (said is not None)
    assert all(line.startswith(said or "") for line in told)


# -- the run directory -----------------------------------------------------------------------------------------------


def test_a_script_can_report_and_its_arguments_are_its_own(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import distrain, sys\n"
        "context = distrain.get_context()\n"
        "for step in range(3):\n"
        "    distrain.report({'step': step, 'rank': context.get_world_rank()})\n"
        "print(context.get_experiment_name(), sys.argv)\n"
    )
    arguments = ["--num-workers", "7", "-m", "x", "--name=y", "--help", "--", "--set", "a b", "file.py:f", ""]
    run = launch("--num-workers", "2", "--name", "first", "--log-dir", "my-logs", "train.py", *arguments)
    printed = f"first {['train.py', *arguments]}"
    assert lines(run) == [f"[rank 0] {printed}", f"[rank 1] {printed}"]
    result = Result.from_path(tmp_path / "runs" / "first")
    assert result.metrics == {"step": 2, "rank": 0}
    assert result.error is None
    reports = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert len(reports) == 6
    logs = {path.name: path.read_text() for path in (tmp_path / "my-logs").rglob("rank_*.log")}
    assert logs == {"rank_0.log": f"{printed}\n", "rank_1.log": f"{printed}\n"}


# -- scripts that call fit() ------------------------------------------------------------------------------------------

FIT_SCRIPT = """
from distrain import DataParallelTrainer, RunConfig, ScalingConfig
def train():
    print("worker")
if __name__ == "__main__":
    scaling = ScalingConfig(num_workers={num_workers})
    DataParallelTrainer(train, scaling_config=scaling, run_config=RunConfig(storage_path="own")).fit()
"""


@sampled
@pytest.mark.parametrize("own_workers", [0, 2])
@pytest.mark.parametrize("num_workers", ["1", "2"])
def test_a_script_that_calls_fit_is_refused(launch: Launch, tmp_path: Path, num_workers: str, own_workers: int) -> None:
    """Each worker would start a run of its own."""
    (tmp_path / "script.py").write_text(FIT_SCRIPT.format(num_workers=own_workers))
    run = launch("--num-workers", num_workers, "script.py", "--lr", "0.1")
    assert run.returncode == 1
    assert "LaunchError: this script was started by `distrain run`, and calls fit()" in run.stderr
    assert "Run it with `python script.py --lr 0.1`" in run.stderr
    assert not (tmp_path / "own").exists()


# -- a wrong command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--num-worker", "2", "train.py"],
            "there is no option --num-worker; did you mean --num-workers? (see --help)",
        ),
        (["--xyz", "3", "train.py"], "there is no option --xyz; options of a script come after its name (see --help)"),
        (["--set", "lr", "0.1", "train.py:train"], "--set 'lr': must be KEY=VALUE"),
        (["python", "train.py"], "leave python out: name the script"),
        (["train.py:train()"], "'train.py:train()': name a function as train.py:train"),
        (["--ssh-key", "id", "train.py"], "there is no option --ssh-key; use --ssh-args='-i KEY'"),
        (["-m", "pack:fit"], "-m pack:fit: is a function; leave out -m"),
        (["pack"], "'pack' is a directory; name a script in it, or run a package with -m"),
        ([], "nothing to run: name a script, `-m MODULE`, or file.py:function"),
        (["-m"], "-m needs the name of a module"),
        (["--num-workers", "two", "train.py"], "argument --num-workers: must be a number such as 4, or 2:8, gpu, cpu"),
        (["--num-workers", "1", "--nproc-per-node", "3", "train.py"], "--num-workers 1, but --nproc-per-node 3"),
        (["--nnodes", "2", "train.py"], "--nnodes 2, but 1 host(s); name all hosts with --hostfile or --hosts"),
        (["--nproc-per-node", "gpu", "train.py"], "one worker for each GPU was asked for, but no usable NVIDIA GPU"),
        (
            ["--ranks-shown", "0,3-1", "train.py"],
            "argument --ranks-shown/--local-ranks-filter: '0,3-1': must be ranks such as 0,2-5, the lower rank first",
        ),
        (["--name", "a/b", "train.py"], "--name must be a plain file name"),
        (
            ["--config", "nowhere.json", "train.py:train"],
            "--config nowhere.json: must name a JSON file: No such",
        ),
        (["--config", "train.py", "train.py:train"], "--config train.py: must name a JSON file: Expecting value"),
        (["--config", "list.json", "train.py:train"], "--config list.json: must hold a JSON object"),
        (["--set", "a=1", "--set", "a.b=2", "train.py:train"], "--set a.b: 'a' is not an object in the config"),
        (["--set", "a=1", "train.py"], "--config and --set are for functions"),
    ],
)
def test_a_wrong_command_line_gives_one_line_before_anything_starts(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("def train(config): ...")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "pack").mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("__init__", "age"):
        (tmp_path / "pack" / f"{name}.py").write_text("def fit(): ...")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run_command(["--storage-path", "runs", *arguments], [""])
    error = capsys.readouterr().err
    assert error.startswith(f"python -m distrain.launch: error: {said}")
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


# -- help ------------------------------------------------------------------------------------------------------------


HELP = Path(__file__).with_name("launch_help.txt")


def test_the_help_is_the_one_that_is_kept_beside_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes an option, an exit code or an example, changes scripts of users, and says so in that file.
    Pythons before 3.13 repeat what an option takes behind each of its names."""
    monkeypatch.setenv("COLUMNS", "100")
    assert re.sub(r"(--[\w-]+) \S+(?=, --)", r"\1", make_parser().format_help()) == HELP.read_text()
