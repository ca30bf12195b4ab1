"""DDP training over gloo whose ranks die, raise, or finish early."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import distrain
from distrain.torch import prepare_model
from tests.torch.ranks import fit, reports

if TYPE_CHECKING:
    from pathlib import Path

sampled = pytest.mark.sample(4, of="failures under torch")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


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
