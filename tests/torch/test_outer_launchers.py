"""fit() in processes that torchrun, mpirun, srun or pods have started, which are all equal."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import wait_until
from tests.hosts.slurm import start_slurm
from tests.torch import launchers

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.hosts.slurm import SlurmLab
    from tests.torch.launchers import Launcher, Started

LAUNCHERS = ("torchrun", "mpirun", "srun", "pods")

PREAMBLE = (
    launchers.PREAMBLE
    + """
from distrain.api import current
from distrain.torch import TorchConfig, TorchTrainer
from distrain.worker.session import Session

def fit(function, name=None, workers=1, trainer=TorchTrainer, scaling={}, **options):
    return trainer(
        function,
        train_loop_config={"name": name},
        scaling_config=ScalingConfig(num_workers=workers, **scaling),
        run_config=RunConfig(name=name, storage_path=FOLDER / "runs"),
        **({"torch_config": TorchConfig(timeout_s=20)} if trainer is TorchTrainer else {}),
        **options,
    ).fit()
"""
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    with start_slurm(tmp_path_factory.mktemp("slurm") / "lab") as lab:
        yield lab


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    slurm = request.getfixturevalue("slurm") if request.param == "srun" else None
    return launchers.launcher(request.param, slurm)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start(launcher: Launcher, source: str, *arguments: str, ranks: int = 2) -> Started:
        started.append(launcher.start(tmp_path, source, *arguments, ranks=ranks))
        return started[-1]

    yield start
    for one in started:
        launchers.end(one)


def said_by(started: Started) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in started.files()]


def reports(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# -- every launcher ----------------------------------------------------------------------------------------------------

TOGETHER = """
def train(config):
    import torch
    from torch import distributed as dist

    context = distrain.get_context()
    total = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(total)
    said.setdefault("contexts", []).append({
        "rank": [context.get_world_rank(), int(os.environ["RANK"]), dist.get_rank()],
        "size": [context.get_world_size(), int(os.environ["WORLD_SIZE"]), dist.get_world_size()],
        "local": [int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])],
        "total": total.item(),
        "directory": context.get_trial_dir(),
        "metadata": context.get_metadata(),
    })
    start = first_step()
    said.setdefault("starts", []).append(start)
    for step in range(start, 3):
        distrain.report({"step": step, "rank": RANK})
        if step == 2:
            folder = FOLDER / f"local_{RANK}"
            folder.mkdir()
            (folder / f"of_{RANK}").touch()
            checkpoint = Checkpoint(folder)
            distrain.report({"step": 2, "rank": RANK}, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
        else:
            store(step)
        if step == 1 and start == 0:
            if RANK == 1:
                raise ValueError("the real reason")
            barrier()
    said["known"] = [Path(one.checkpoint.path).name for one in distrain.get_all_reported_checkpoints()]
    said["word"] = broadcast_from_rank_zero(f"from {RANK}")
    return f"returned by {RANK}"

environment = dict(os.environ)
said["three"] = outcome(train, workers=3)
said["elsewhere"] = outcome(train, trainer=DataParallelTrainer)
if "SLURM_PROCID" in os.environ:  # the only one with several hosts
    said["network"] = outcome(train, scaling={"interface": "ib77"})
said["before"] = (FOLDER / "runs").exists()
said["first"] = outcome(train, "run", workers=2, metadata={"model": "small"}, scaling={"ssh_args": "-v"})
result = fit(train, "run", workers=(1, 4), metadata={"model": "small"})
said["result"] = {
    "path": result.path,
    "checkpoint": result.checkpoint.path,
    "kept": [checkpoint.path for checkpoint, _ in result.best_checkpoints],
    "metrics": result.metrics,
    "value": result.return_value,
    "current": current.session is None,
}
said["deleted"] = not (FOLDER / f"local_{RANK}").exists()
said["same environment"] = dict(os.environ) == environment
write()
"""


def test_all_ranks_are_equal(start: Callable[..., Started], tmp_path: Path, launcher: Launcher) -> None:
    """Reports, sharded checkpoints, a crash of one rank, a resume, and the Result."""
    started = start(launcher, PREAMBLE + TOGETHER)
    assert started.wait() == [0] * len(started.processes), started.output
    run = tmp_path / "runs" / "run"
    for number, said in enumerate(said_by(started)):
        assert said["three"][0] == said["elsewhere"][0] == "LaunchError"
        assert "2 processes" in said["three"][1]
        assert "num_workers is 3" in said["three"][1]
        assert "TorchTrainer" in said["elsewhere"][1]
        if launcher.name == "srun":
            assert "it has no network interface ib77" in said["network"][1]
        assert not said["before"]
        for context in said["contexts"]:
            assert context["rank"] == [number] * 3
            assert context["size"] == [2] * 3
            assert context["local"] == ([number, 2] if launcher.name in ("torchrun", "mpirun") else [0, 1])
            assert (context["total"], context["directory"]) == (11.0, str(run))
            assert context["metadata"] == {"model": "small"}
        kind, text, cause = said["first"]
        assert (kind, cause) == ("WorkerGroupError", "ValueError"), text
        assert text.startswith("rank 1 on ")
        assert "the real reason" in text
        assert said["starts"] == [0, 2]
        names = [f"checkpoint_00000{n}" for n in (0, 1, 2)]
        assert said["known"] == names
        assert said["word"] == "from 0"
        assert said["result"] == {
            "path": str(run),
            "checkpoint": str(run / "checkpoint_000002"),
            "kept": [str(run / name) for name in names],
            "metrics": {"step": 2, "rank": 0},
            "value": "returned by 0",
            "current": True,
        }
        assert said["deleted"]
        assert said["same environment"]
    for rank in (0, 1):
        steps = [line["metrics"]["step"] for line in reports(run) if line["rank"] == rank]
        assert steps == [0, 0, 1, 1, 2, 2]
    files = {path.name for path in (run / "checkpoint_000001").iterdir()}
    assert files == {"step", "of_0", "of_1", ".manifest.json", ".metadata.json"}
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    name = launcher.name if launcher.name != "pods" else "another launcher"
    assert started.output.count(f"distrain: training in the 2 processes that {name} has started") == 2
    assert started.output.count("ScalingConfig.ssh_args: no effect because ") == 1
    assert started.output.count("distrain: finished") == 1


STOPS = """
def train(config):
    start = first_step()
    said["start"] = start
    for step in range(start, start + 2000):
        time.sleep(0.005 * (1 + RANK))  # so that they call should_stop() at different times
        if distrain.should_stop() or (start and step == start + 2):
            store(step)
            said["end"] = step
            return
        if step == start + 3:
            write()

try:
    fit(train, "run")
    said["outcome"] = "finished"
except PreemptionError as error:
    said["outcome"] = str(error)
    raise
finally:
    write()
"""
STOPPED_BY = {"torchrun": signal.SIGTERM, "mpirun": signal.SIGUSR1, "srun": signal.SIGUSR1, "pods": signal.SIGTERM}


@pytest.mark.sample(1)
def test_a_signal_stops_all_ranks_at_the_same_step_and_the_next_start_continues(
    start: Callable[..., Started], tmp_path: Path, launcher: Launcher
) -> None:
    """The signal goes to the launcher, which passes it on; of the pods, only one gets it."""
    number = STOPPED_BY[launcher.name]
    started = start(launcher, launchers.WITHOUT_TORCH + STOPS)
    wait_until(lambda: all(file.exists() for file in started.files()), 40)
    started.processes[-1].send_signal(number)
    codes = started.wait()
    ranks = said_by(started)
    assert 0 not in codes, started.output
    assert ranks[0]["end"] == ranks[1]["end"] > 0, started.output
    for said in ranks:
        assert f"the run was stopped by {number.name}" in said["outcome"]
        assert "checkpoint: checkpoint_000000, " in said["outcome"]
    assert json.loads((tmp_path / "runs" / "run" / "run.json").read_text())["status"] == "stopped"

    again = start(launcher, launchers.WITHOUT_TORCH + STOPS)
    assert again.wait() == [0] * len(again.processes), again.output
    for said in said_by(again):
        assert (said["start"], said["outcome"]) == (ranks[0]["end"] + 1, "finished")


# -- ranks that die ----------------------------------------------------------------------------------------------------

DIES = """
def train(config):
    distrain.report({"loss": 1})
    write()
    if RANK == int(sys.argv[2]):
        child = os.fork()
        if not child:
            os.closerange(1, 3)
            time.sleep(60)
        (FOLDER / "new").write_text(str(child))
        (FOLDER / "new").rename(FOLDER / "child")
        time.sleep(60)
    barrier()

said["outcome"] = outcome(train, "run")
write()
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_nobody_waits_for_a_killed_rank(start: Callable[..., Started], tmp_path: Path, victim: int) -> None:
    """Its child, such as a worker of a DataLoader, does not keep its connections open."""
    started = start(launchers.launcher("pods"), launchers.WITHOUT_TORCH + DIES, str(victim), ranks=3)
    wait_until(lambda: all(file.exists() for file in [*started.files(), tmp_path / "child"]))
    started.processes[victim].send_signal(signal.SIGKILL)
    codes = started.wait(20)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(3)], started.output
    for rank, said in enumerate(said_by(started)):
        if rank != victim:
            kind, text, _ = said["outcome"]
            assert kind == "WorkerGroupError"
            assert f"rank {victim}" in text
    status = json.loads((tmp_path / "runs" / "run" / "run.json").read_text())["status"]
    assert status == ("failed" if victim else "running")


REFUSES = """
if RANK == int(sys.argv[2]):
    from distrain.coordinator.ranks import joined
    joined.storage_problem = lambda *asked: "cannot be opened: No such file or directory"
if RANK == 0 and sys.argv[2] == "0":
    (FOLDER / "runs").write_text("no directory")
said["outcome"] = outcome(lambda: write(), "run")
write()
"""


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_cannot_use_the_storage_is_named_on_all(start: Callable[..., Started], culprit: int) -> None:
    started = start(launchers.launcher("pods"), launchers.WITHOUT_TORCH + REFUSES, str(culprit))
    assert started.wait(20) == [0, 0], started.output
    for rank, said in enumerate(said_by(started)):
        kind, text, _ = said["outcome"]
        assert kind == ("StorageError" if rank == culprit == 0 else "LaunchError")
        assert str(started.folder / "runs") in text
        assert f"rank {culprit} on " in text or rank == culprit


# -- without a launcher -----------------------------------------------------------------------------------------------

ALONE = """
def train(config):
    import torch
    from torch import distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and config["name"] == "fails":
        raise ValueError("once")
    return [total.item(), dist.get_world_size(), dist.get_backend()]

def again(name):
    once_more = FailureConfig(max_failures=1)
    run = RunConfig(name=name, storage_path=FOLDER / "runs", failure_config=once_more)
    scaling = ScalingConfig(num_workers=0)
    return TorchTrainer(train, train_loop_config={"name": name}, scaling_config=scaling, run_config=run).fit()

environment = dict(os.environ)
said["values"] = [again("fails").return_value, again("works").return_value]

from torch import distributed as dist

said["group"] = dist.is_initialized()
said["environment"] = dict(os.environ) == environment
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
said["own"] = [outcome(train, "own", workers=0)[1], dist.is_initialized()]
write()
"""


def test_alone_in_this_process(tmp_path: Path, user_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    run = user_script(PREAMBLE + ALONE, str(tmp_path))
    assert run.returncode == 0, run.stderr
    said = json.loads((tmp_path / "rank_0.json").read_text())
    assert said["values"] == [[1.0, 1, "gloo"]] * 2
    assert not said["group"]
    assert said["environment"]
    words, users_own_group_is_left_alone = said["own"]
    assert "process group" in words
    assert users_own_group_is_left_alone
