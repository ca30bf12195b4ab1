"""The batch script of ``--slurm``. tests/hosts/test_slurm.py submits one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distrain.cli.run.options import make_parser, parse
from distrain.cli.run.slurm_job import batch_job

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _outside_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)


def script(*arguments: str) -> str:
    return batch_job(parse(make_parser(), arguments), arguments).script


def options_of(*arguments: str) -> list[str]:
    """Return the options for sbatch."""
    lines = script(*arguments, "train.py").splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def command_of(*arguments: str) -> str:
    """Return the command line in the job, after the interpreter and without the name of the run."""
    [line] = [line for line in script(*arguments).splitlines() if " -m distrain.launch " in line]
    return line.partition(" -m distrain.launch ")[2]


def test_options_go_to_sbatch_after_ours_and_replace_them() -> None:
    given = ["--slurm", "partition=gpu,time=1:00:00,nodelist=n1,n2", "--slurm", "exclusive", "--slurm=signal=USR2@30"]
    assert options_of(*given) == [
        *("--job-name=train", "--requeue", "--open-mode=append", "--no-kill", "--signal=USR2@30"),
        *("--partition=gpu", "--time=1:00:00", "--nodelist=n1,n2", "--exclusive"),
    ]


def test_the_number_of_workers_is_the_number_of_tasks_unless_slurm_is_asked_for_others() -> None:
    assert "--ntasks=4" in options_of("--slurm", "partition=p", "--num-workers", "4")
    assert "--ntasks=8" in options_of("--slurm", "partition=p", "--num-workers", "2:8")
    assert "--ntasks=4" not in options_of("--slurm", "gpus=4", "--num-workers", "4")


def test_the_job_runs_the_same_command_line_and_names_the_run() -> None:
    given = ["--slurm", "partition=p", "--name", "my run", "--env", "A=1"]
    assert command_of(*given, "train.py", "--slurm", "x", "--dry-run") == (
        "--name 'my run' --env A=1 train.py --slurm x --dry-run"
    )
    assert command_of(*given, "-m", "package.train", "--slurm=x") == (
        "--name 'my run' --env A=1 -m package.train --slurm=x"
    )
    assert (
        command_of("train.py:train", "--name=n", "--slurm=time=1", "--set", "a=1")
        == "train.py:train --name=n --set a=1"
    )
    assert command_of("--dry_run", "--slurm", "x", "--name", "n", "train.py") == "--name n train.py"
    assert command_of("--slurm", "partition=p", "train.py").startswith("--name train-2")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--slurm", "partition=p", "--hosts", "a:1"], "--hosts and --slurm: the nodes of the job are the hosts"),
        (["--slurm", "Partition=p"], "--slurm 'Partition=p': must be an option of sbatch, such as partition=gpu"),
        (["--slurm", "time=1 hour"], "--slurm 'time=1 hour': must be an option of sbatch"),
        (["--slurm", "partition=p", "--num-workers", "auto"], "--num-workers auto with --slurm: give a number"),
    ],
)
def test_what_does_not_go_together_is_named(arguments: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        options_of(*arguments)


def test_a_job_does_not_submit_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(ValueError, match="this is a job of Slurm already"):
        options_of("--slurm", "partition=p")
