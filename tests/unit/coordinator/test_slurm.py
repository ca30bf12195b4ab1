"""The allocation of a Slurm job, read from its variables. tests/hosts/test_slurm.py has a real one."""

from __future__ import annotations

import shutil

import pytest

from distrain.coordinator.connection import slurm
from distrain.coordinator.connection.slurm import find_allocation, run_name
from distrain.errors import HostfileError

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CONF": "/etc/slurm.conf"}


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"n[1-3]": b"n1\nn2\nn3\n", "7": b"JobId=7 BatchFlag=1 Reboot=0", "8": b"JobId=8 BatchFlag=1 Reboot=0"}
    monkeypatch.setattr(slurm, "output_of", lambda argv, folder: said.get(argv[-1]))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def slots(**variables: str) -> list[int | None]:
    return [host.slots for host in find_allocation({**JOB, **variables}).hosts]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, [2, 2, 2]),
        ({"SLURM_TASKS_PER_NODE": "4,2(x2)"}, [4, 2, 2]),
        ({"SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_GPUS_PER_NODE": "a100:8"}, [8, 8, 8]),
        ({"SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_GPUS_ON_NODE": "4"}, [4, 4, 4]),
        ({"SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_GPUS_ON_NODE": "4"}, [2, 2, 2]),
    ],
)
def test_slots_are_the_tasks_or_with_one_task_per_node_its_gpus(variables: dict[str, str], expected: list[int]) -> None:
    assert slots(**variables) == expected


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set; start this with sbatch or in salloc"),
        ({"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE=2: distrain does not support heterogeneous jobs"),
        ({"SLURM_JOB_NODELIST": "??"}, r"SLURM_JOB_NODELIST=\?\?: `scontrol show hostnames` finds no nodes"),
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, r"SLURM_TASKS_PER_NODE=2\(x2\): there are 3 nodes"),
    ],
)
def test_variables_that_cannot_be_used_are_named(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(HostfileError, match=problem):
        slots(**variables)


def test_variables_of_slurm_without_its_programs_are_an_error_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(HostfileError, match=r"SLURM_JOB_ID=7 is set, but there is no srun in PATH.*--transport local"):
        slots()


def test_a_requeued_batch_job_finds_its_runs_by_their_order_and_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(job: str, *argv: str) -> list[str | None]:
        """Return the names of two runs of a process."""
        monkeypatch.setattr(slurm, "_runs_without_name", 0)
        return [run_name({**JOB, "SLURM_JOB_ID": job}, argv) for _ in range(2)]

    names = process("7", "train.py", "1")
    assert names == process("7", "train.py", "1")
    assert len({*names, *process("7", "train.py", "2"), *process("8", "train.py", "1")}) == 6
    assert run_name({**JOB, "SLURM_JOB_ID": "9"}) is None, "in salloc, where a person may change the script"
    assert run_name({}) is None
