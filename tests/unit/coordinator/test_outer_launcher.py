"""Which launcher has started this process, from its environment variables."""

from __future__ import annotations

from typing import Any

import pytest

from distrain import LaunchError, ScalingConfig
from distrain.api.backend import BackendConfig
from distrain.coordinator.ranks.outer_launcher import OuterLauncher, check_launcher, find_launcher
from distrain.system import process
from distrain.worker.job.job import FunctionWork, ScriptWork

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "alpha",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1298202625",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_JOB_NODELIST": "n[2-4],m1",
}
SRUN = BATCH_SCRIPT | {
    "SLURM_PROCID": "6",
    "SLURM_NODEID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "n[2-4],m1",
}
PYTORCH_JOB = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
TRAIN_JOB = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}


def facts(environment: dict[str, str]) -> list[Any]:
    found = find_launcher(environment)
    assert found is not None
    place = [found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_rank]
    return [found.name, *place, found.address]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, ["torchrun", 5, 8, 1, 4, 1, "alpha"]),
        (OPEN_MPI, ["mpirun", 1, 2, 1, 2, None, "127.0.0.1"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "a"}, ["mpirun", 1, 2, 1, 1, None, "a"]),
        (OPEN_MPI | SRUN, ["mpirun", 1, 2, 1, 2, None, "127.0.0.1"]),
        (SRUN, ["srun", 6, 7, 0, 1, 3, "n2"]),
        (SRUN | {"PMI_RANK": "6", "PMI_SIZE": "7"}, ["srun", 6, 7, 0, 1, 3, "n2"]),
        (SRUN | TORCHRUN, ["torchrun", 5, 8, 1, 4, 1, "alpha"]),
        (PYTORCH_JOB, ["another launcher", 1, 3, 0, 1, 1, "job-master-0"]),
        (TRAIN_JOB, ["Kubeflow", 1, 3, 0, 1, 1, "job-node-0-0.job"]),
        (TRAIN_JOB | TORCHRUN, ["torchrun", 5, 8, 1, 4, 1, "alpha"]),
    ],
)
def test_the_launcher_is_found(environment: dict[str, str], expected: list[Any]) -> None:
    assert facts(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH_SCRIPT,
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"},
        TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        PYTORCH_JOB | {"WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        TRAIN_JOB | {"PET_NNODES": "1:4"},
        {"WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        TORCHRUN | {"TORCHELASTIC_RUN_ID": "abc", process.RUN_IDS: "outer:abc"},  # a worker of distrain
        PYTORCH_JOB | {process.WITHIN_RUN: "abc"},
    ],
)
def test_there_is_no_launcher(environment: dict[str, str]) -> None:
    assert find_launcher(environment) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun -x MASTER_ADDR=HOST"),
        (MPICH | {"MPI_LOCALNRANKS": "1"}, "mpirun -genv MASTER_ADDR HOST"),
        (PYTORCH_JOB | {"LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE.*unset RANK WORLD_SIZE"),
        (SRUN | {"SLURM_NODEID": "9"}, "damaged"),
        (TORCHRUN | {"RANK": "x"}, "damaged"),
    ],
)
def test_what_is_missing_is_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        find_launcher(environment)


@pytest.mark.parametrize(("one", "other"), [(OPEN_MPI, {"PMIX_NAMESPACE": "2"}), (SRUN, {"SLURM_STEP_ID": "1"})])
def test_two_jobs_have_different_ports_and_all_ranks_of_one_the_same(
    one: dict[str, str], other: dict[str, str]
) -> None:
    environments = (one, {**one, "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "0"}, one | other)
    found = [find_launcher(environment) for environment in environments]
    first, same, different = [each.port for each in found if each is not None]
    assert first == same != different
    assert 15000 <= first < 30000
    chosen = find_launcher(one | {"MASTER_PORT": "4711"})
    assert chosen is not None
    assert chosen.port == 4711


# -- the workers that the user wants -----------------------------------------------------------------------------------


class Gathers(BackendConfig):
    def gather(self, value: Any) -> list[Any]:
        return [value]


def check(backend: BackendConfig, **scaling: Any) -> OuterLauncher | None:
    return check_launcher(ScalingConfig(**scaling), FunctionWork(function=print, config={}, backend=backend))


@pytest.fixture
def _torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_torchrun")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": 4}, "each of 8 processes that torchrun has started, but num_workers is 4. Leave num_workers"),
        ({"num_workers": 4}, "RANK=5, WORLD_SIZE=8, .* are left over: unset RANK WORLD_SIZE MASTER_ADDR"),
        ({"num_workers": (2, 7)}, r"num_workers is \(2, 7\)"),
        ({"num_workers": 8, "hosts": "a:8"}, "leave hosts= and hostfile= out"),
    ],
)
def test_other_workers_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        check(Gathers(), **options)


@pytest.mark.usefixtures("_torchrun")
def test_work_that_its_processes_cannot_share_is_refused() -> None:
    with pytest.raises(LaunchError, match="such as TorchTrainer"):
        check(BackendConfig())
    with pytest.raises(LaunchError, match="of `distrain run`"):
        check_launcher(ScalingConfig(), ScriptWork(backend=Gathers(), path="train.py"))
