"""What happens to a DDP training over gloo when its ranks die, raise, or finish early."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import distrain
from distrain.torch import TorchTrainer, prepare_model

if TYPE_CHECKING:
    from collections.abc import Callable

sampled = pytest.mark.sample(4, of="failures under torch")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def fit(
    train: Callable[..., Any],
    storage: Path,
    *,
    workers: int = 2,
    config: dict[str, Any] | None = None,
    max_failures: int = 0,
) -> distrain.Result:
    return TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=distrain.ScalingConfig(num_workers=workers),
        run_config=distrain.RunConfig(
            storage_path=storage,
            failure_config=distrain.FailureConfig(max_failures=max_failures, retry_same_failure=True),
        ),
    ).fit()


def reports(result: distrain.Result) -> list[dict[str, Any]]:
    """Every report of every rank and attempt."""
    lines = (Path(result.path) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# -- restarts --------------------------------------------------------------------------------------------------------


def train_with_a_kill(config: dict[str, Any]) -> None:
    """Ten steps of DDP with a checkpoint each; in the first attempt rank 1 is killed in the middle of a backward."""
    import torch
    from torch import nn

    context = distrain.get_context()
    model = prepare_model(nn.Linear(4, 4))
    checkpoint = distrain.get_checkpoint()
    first = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        first = state["step"] + 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, 10):
        loss = model(torch.ones(2, 4)).pow(2).mean()
        if step == 5 and context.get_world_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": model.state_dict(), "step": step}, Path(folder) / "state.pt")
            distrain.report({"step": step}, distrain.Checkpoint.from_directory(folder))


@sampled
def test_a_killed_rank_is_answered_by_a_restart_from_the_last_checkpoint(storage: Path) -> None:
    result = fit(train_with_a_kill, storage, max_failures=1)
    assert result.error is None
    assert result.metrics == {"step": 9}
    steps = {
        attempt: [
            line["metrics"]["step"] for line in reports(result) if (line["attempt"], line["rank"]) == (attempt, 0)
        ]
        for attempt in (0, 1)
    }
    assert steps == {0: [0, 1, 2, 3, 4], 1: [5, 6, 7, 8, 9]}


# -- who is to blame -------------------------------------------------------------------------------------------------


def fail_in_a_collective(config: dict[str, Any]) -> None:
    """Rank 2 goes in the given way, while the others wait for it."""
    import torch
    from torch import distributed as dist

    dist.all_reduce(torch.ones(1))
    if dist.get_rank() != 2:
        for _ in range(1000):
            dist.all_reduce(torch.ones(1000))
        return
    match config["how"]:
        case "raises":
            raise ValueError("the real reason")
        case "raises after leaving the group":
            try:
                raise ValueError("the real reason")
            finally:
                dist.destroy_process_group()  # so the others may hear of its end first
        case "loses a connection of its own":
            raise ConnectionResetError(104, "Connection reset by peer")
        case "exits":
            sys.exit(7)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "ends by os._exit":
            os._exit(9)


@sampled
@pytest.mark.parametrize(
    ("how", "summary", "exit_code"),
    [
        ("raises", "ValueError: the real reason", 1),
        ("raises after leaving the group", "ValueError: the real reason", 1),
        ("loses a connection of its own", "ConnectionResetError: ", 1),
        ("exits", "sys.exit(7)", 7),
        ("is killed", "SIGKILL", 137),
        ("ends by os._exit", "code 9", 9),
    ],
)
def test_the_culprit_is_the_rank_that_failed_by_itself(
    storage: Path, capsys: pytest.CaptureFixture[str], how: str, summary: str, exit_code: int
) -> None:
    """Not one of the three whose collective broke. Every restart is one more try."""
    tries = 3
    with pytest.raises(distrain.WorkerGroupError) as caught:
        fit(fail_in_a_collective, storage, workers=4, config={"how": how}, max_failures=tries - 1)
    blamed = re.findall(r"^distrain: ranks? (\S+) (?:failed|exited|was killed)", capsys.readouterr().err, re.MULTILINE)
    assert blamed == ["2"] * (tries - 1)
    assert (caught.value.culprit, caught.value.exit_code) == (2, exit_code)
    assert "rank 2 " in str(caught.value).splitlines()[0]
    assert summary in str(caught.value).splitlines()[0]


@sampled
def test_a_second_process_group_is_explained(storage: Path) -> None:
    def train() -> None:
        from torch import distributed as dist

        dist.init_process_group("gloo")

    with pytest.raises(distrain.WorkerGroupError, match=r"(?s)group twice.*distrain: TorchTrainer has set up"):
        fit(train, storage, workers=1)


# -- finishing early -------------------------------------------------------------------------------------------------


@sampled
def test_the_store_outlives_a_rank_0_that_finishes_first(storage: Path) -> None:
    def train() -> None:
        from torch import distributed as dist

        if dist.get_rank() == 0:
            return
        with pytest.raises(distrain.CollectiveError, match="finished"):
            distrain.collective.barrier()
        store = dist.distributed_c10d._get_default_store()
        store.set("late", "words")
        alone = dist.new_group([1], use_local_synchronization=True)
        dist.barrier(group=alone)
        distrain.report({"read": store.get("late").decode()})

    (line,) = reports(fit(train, storage))
    assert (line["rank"], line["metrics"]) == (1, {"read": "words"})


def test_ranks_that_can_only_wait_for_one_that_has_finished_do_not_wait_forever(tmp_path: Path) -> None:
    def has_fewer_batches() -> None:
        import torch

        model = prepare_model(torch.nn.Linear(2, 1))
        for _ in range(3 + distrain.get_context().get_world_rank()):
            model(torch.ones(2, 2)).sum().backward()

    with pytest.raises(distrain.HangError) as raised:
        fit(has_fewer_batches, tmp_path)
    assert "rank 1 can only wait for rank 0, which finished train_func" in str(raised.value)
    assert raised.value.culprit == 0
