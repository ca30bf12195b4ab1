"""TorchTrainer with num_workers=0: under the real torchrun, whose processes are the ranks, rank 0 keeping the run; and
alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PREAMBLE = """
import json, os, sys, tempfile, time
from pathlib import Path
import distrain
from distrain import *
from distrain.collective import barrier, broadcast_from_rank_zero
from distrain.torch import TorchConfig, TorchTrainer

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
said = {}

def fit(function, name=None, **options):
    return TorchTrainer(
        function,
        train_loop_config={"name": name},
        torch_config=TorchConfig(timeout_s=20),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=name, storage_path=FOLDER / "runs"),
        **options,
    ).fit()

def outcome(function, name=None):
    try:
        return ["returned", fit(function, name).return_value]
    except Exception as error:
        return [type(error).__name__, str(error), type(getattr(error, "original", None)).__name__]

def write():
    (FOLDER / f"rank_{RANK}.json").write_text(json.dumps(said))
"""


def torchrun(
    folder: Path, source: str, *arguments: str, processes: int = 2, timeout_s: float = 60.0
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run the source with that many processes; what it came to, and what each rank has written."""
    script = folder / "script.py"
    script.write_text(PREAMBLE + source)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        str(script),
        str(folder),
    ]
    run = subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    files = [folder / f"rank_{rank}.json" for rank in range(processes)]
    return run, [json.loads(file.read_text()) if file.exists() else {} for file in files]


# -- they train together ---------------------------------------------------------------------------------------------

TOGETHER = """
def train(config):
    import torch
    from torch import distributed as dist

    context = distrain.get_context()
    total = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(total)
    before = distrain.get_checkpoint()
    said["context"] = {
        "rank": [context.get_world_rank(), context.get_local_rank(), context.get_node_rank()],
        "size": [context.get_world_size(), context.get_local_world_size(), dist.get_world_size()],
        "total": total.item(),
        "directory": context.get_trial_dir(),
        "metadata": context.get_metadata(),
        "before": before and before.path,
    }
    for step in range(2):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"of_{RANK}").write_text(str(step))
            distrain.report({"step": step, "rank": RANK}, Checkpoint(folder))
    return f"returned by {RANK}"

result = fit(train, "run", metadata={"model": "small"})
said["result"] = {
    "path": result.path,
    "checkpoint": result.checkpoint.path,
    "kept": [checkpoint.path for checkpoint, _ in result.best_checkpoints],
    "metrics": result.metrics,
    "value": result.return_value,
    "current": distrain.worker.session.Session.current is None,
}
said["threads"] = os.environ["OMP_NUM_THREADS"]
write()
"""


def test_the_ranks_train_together_and_rank_0_keeps_the_run(tmp_path: Path) -> None:
    run, ranks = torchrun(tmp_path, TOGETHER)
    assert run.returncode == 0, run.stderr
    root = tmp_path / "runs" / "run"
    for number, rank in enumerate(ranks):
        assert rank["context"] == {
            "rank": [number, number, 0],
            "size": [2, 2, 2],
            "total": 11.0,
            "directory": str(root),
            "metadata": {"model": "small"},
            "before": None,
        }
        assert rank["result"] == {
            "path": str(root),
            "checkpoint": str(root / "checkpoint_000001"),
            "kept": [str(root / f"checkpoint_00000{n}") for n in (0, 1)],
            "metrics": {"step": 1, "rank": number},
            "value": "returned by 0",
            "current": True,
        }
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["run"]
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [line["metrics"] for line in lines] == [{"step": 0, "rank": 0}, {"step": 1, "rank": 0}]
    files = {path.name for path in (root / "checkpoint_000001").iterdir()}
    assert files == {"of_0", ".manifest.json", ".metadata.json"}
    assert json.loads((root / "run.json").read_text())["status"] == "finished"
    assert run.stderr.count("distrain: training in this process") == 1
    assert run.stderr.count("distrain: finished") == 1


DELETES = """
ASYNC = CheckpointUploadMode.ASYNC
MODES = {"sync": {"delete_local_checkpoint_after_upload": True}, "async": {"checkpoint_upload_mode": ASYNC}}

def train(config):
    here = []
    for step in range(2):
        for mode, options in MODES.items():
            for owner in ("all", f"rank_{RANK}"):
                folder = FOLDER / f"of_{owner}_{mode}_{step}"
                folder.mkdir(exist_ok=True)
                (folder / f"by_{RANK}").write_text(str(step))
                barrier()
                if RANK == config["late"]:
                    wait_for_the_others()
                distrain.report({}, Checkpoint(folder), **options)
                if RANK != config["late"]:
                    (FOLDER / "reported").touch()
                here.append(len(list(FOLDER.glob("of_*"))))
                barrier()
                (FOLDER / "reported").unlink(missing_ok=True)
                barrier()
    return here

def wait_for_the_others():
    while not (FOLDER / "reported").exists():
        time.sleep(0.01)

said["here"] = TorchTrainer(
    train,
    train_loop_config={"late": int(sys.argv[2])},
    torch_config=TorchConfig(timeout_s=20),
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(name="run", storage_path=FOLDER / "runs"),
).fit().return_value
write()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("late", [0, 1])
def test_local_files_are_deleted_when_no_rank_can_need_them(tmp_path: Path, late: int) -> None:
    run, ranks = torchrun(tmp_path, DELETES, str(late))
    assert run.returncode == 0, run.stderr
    assert max(ranks[0]["here"]) <= 5, "they pile up"
    assert not list(tmp_path.glob("of_*"))
    checkpoints = sorted((tmp_path / "runs" / "run").glob("checkpoint_*"))
    both = [sorted(path.name for path in folder.glob("by_*")) for folder in checkpoints]
    assert both == [["by_0", "by_1"], ["by_0"]] * 4


ONE_AFTER_THE_OTHER = """
def fails_at_1(config):
    checkpoint = distrain.get_checkpoint()
    start = int(Path(checkpoint.path, "step").read_text()) + 1 if checkpoint else 0
    said.setdefault("starts", []).append(start)
    for step in range(start, 3):
        if step == 1 and checkpoint is None:
            raise ValueError("once")
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            distrain.report({"step": step}, Checkpoint(folder))

def waits(config):
    barrier()
    for late in (1, 2):
        barrier()
        if RANK == late:
            time.sleep(0.3)
        came = time.time()
        barrier()
        said.setdefault("barriers", []).append([came, time.time()])
    return [broadcast_from_rank_zero(RANK + number) for number in (5, 6)]

def mixes_up(config):
    barrier()
    try:
        broadcast_from_rank_zero(1) if RANK else barrier()
    except CollectiveError as error:
        said["mix-up"] = str(error)
    return broadcast_from_rank_zero(f"from {RANK}")

def rank_0_finishes(config):
    if RANK != 0:
        barrier()

def rank_1_finishes(config):
    if RANK != 1:
        barrier()

for workers, trainer in ((2, TorchTrainer), (0, DataParallelTrainer)):
    run = RunConfig(storage_path=FOLDER / "runs")
    try:
        trainer(lambda: 1, scaling_config=ScalingConfig(num_workers=workers), run_config=run).fit()
    except LaunchError as error:
        said[f"refused_{workers}"] = str(error)
said["before"] = (FOLDER / "runs").exists()

for function in (fails_at_1, fails_at_1, waits, mixes_up, rank_0_finishes, rank_1_finishes, waits):
    said.setdefault(function.__name__, []).append(outcome(function, function.__name__))
    write()
"""


@pytest.fixture(scope="module")
def one_after_the_other(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run, ranks = torchrun(tmp_path_factory.mktemp("torchrun"), ONE_AFTER_THE_OTHER, processes=3, timeout_s=90)
    assert run.returncode == 0, run.stderr
    return ranks


def test_what_cannot_work_under_torchrun_is_refused_at_once(one_after_the_other: list[dict[str, Any]]) -> None:
    assert not one_after_the_other[0]["before"]
    for said in one_after_the_other:
        assert "under torchrun, in each of its 3 processes, and would start 2 worker(s) in each" in said["refused_2"]
        assert "ScalingConfig(num_workers=0)" in said["refused_2"]
        assert "TorchTrainer" in said["refused_0"]


def test_an_unfinished_run_goes_on_at_the_same_checkpoint_on_all_ranks(
    one_after_the_other: list[dict[str, Any]],
) -> None:
    for rank, said in enumerate(one_after_the_other):
        first, second = said["fails_at_1"]
        assert "once" in first[1], rank
        assert second == ["returned", None], rank
        assert said["starts"] == [0, 1], rank


def test_nobody_leaves_a_barrier_before_the_last_has_come(one_after_the_other: list[dict[str, Any]]) -> None:
    for ranks in zip(*(said["barriers"] for said in one_after_the_other), strict=True):
        assert min(left for _, left in ranks) >= max(came for came, _ in ranks)


def test_one_fit_after_the_other(one_after_the_other: list[dict[str, Any]]) -> None:
    """Each has a process group of its own, though torchrun has one store for all."""
    for said in one_after_the_other:
        assert said["waits"] == [["returned", [5, 6]]] * 2


def test_all_ranks_hear_of_a_mix_up_and_meet_again(one_after_the_other: list[dict[str, Any]]) -> None:
    for said in one_after_the_other:
        assert said["mixes_up"] == [["returned", "from 0"]]
        assert "barrier()" in said["mix-up"]
        assert "broadcast_from_rank_zero()" in said["mix-up"]


@pytest.mark.parametrize("finished", [0, 1])
def test_a_rank_that_has_finished_is_named(one_after_the_other: list[dict[str, Any]], finished: int) -> None:
    for rank in {0, 1, 2} - {finished}:
        kind, text, *cause = one_after_the_other[rank][f"rank_{finished}_finishes"][0]
        assert "CollectiveError" in (kind, *cause)
        assert "finished" in text
        assert "barrier()" in text


# -- they fail -------------------------------------------------------------------------------------------------------

FAILS = """
def train(config):
    distrain.report({"loss": 1})
    if RANK == int(sys.argv[2]):
        while not (FOLDER / "the other one").exists():
            time.sleep(0.01)
        raise ValueError("the real reason")
    (FOLDER / "the other one").touch()
    if sys.argv[3] == "waits":
        barrier()

fit(train, "run")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("rank", "others"), [("0", "waits"), ("1", "finishes")])
def test_a_failing_rank_ends_torchrun(tmp_path: Path, rank: str, others: str) -> None:
    run, _ = torchrun(tmp_path, FAILS, rank, others, timeout_s=90)
    assert run.returncode == 1
    assert "SIGKILL" not in run.stderr  # which torchrun sends to ranks that hang for 30 s
    assert "ValueError: the real reason" in run.stderr
    assert json.loads((tmp_path / "runs" / "run" / "run.json").read_text())["status"] in ("failed", "aborted")


# -- without torchrun ------------------------------------------------------------------------------------------------

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
said["own"] = [outcome(train, "own")[1], dist.is_initialized()]
write()
"""


def test_alone_in_this_process(tmp_path: Path, user_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    preamble = PREAMBLE.replace('int(os.environ["RANK"])', "0")
    run = user_script(preamble + ALONE, str(tmp_path))
    assert run.returncode == 0, run.stderr
    said = json.loads((tmp_path / "rank_0.json").read_text())
    assert said["values"] == [[1.0, 1, "gloo"]] * 2
    assert not said["group"]
    assert said["environment"]
    words, users_own_group_is_left_alone = said["own"]
    assert "process group" in words
    assert users_own_group_is_left_alone
