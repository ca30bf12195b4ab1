"""distrain.torch.snapshot() and restore()."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import distrain
from distrain import Checkpoint, CheckpointError, CheckpointUploadMode
from distrain.torch import prepare_model, restore, snapshot
from tests.torch.ranks import acting_as, fit

if TYPE_CHECKING:
    from pathlib import Path

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

SYNC, ASYNC, NO_UPLOAD, MEMORY = CheckpointUploadMode


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def state(*objects: Any) -> list[Any]:
    return [each.state_dict() for each in objects]


def test_what_was_saved_is_restored(tmp_path: Path) -> None:
    before, after = trained(1), trained(2)
    with acting_as(0, 2):
        checkpoint = Checkpoint(snapshot(*before, step=7, text="é").to_directory(tmp_path))
    with acting_as(1, 2):
        assert restore(checkpoint, *after) == {"step": 7, "text": "é"}
    torch.testing.assert_close(state(*after), state(*before), rtol=0, atol=0)
    assert {path.suffix for path in tmp_path.iterdir()} == {".pkl", ".bin"}


def test_other_ranks_hand_in_nothing_and_pickle_nothing(tmp_path: Path) -> None:
    with acting_as(1, 2):
        snapshot(*trained(1), unpicklable=(_ for _ in ())).to_directory(tmp_path)
    assert not list(tmp_path.iterdir())


def test_each_rank_may_keep_its_own(tmp_path: Path) -> None:
    before = [trained(rank) for rank in range(2)]
    for rank, objects in enumerate(before):
        with acting_as(rank, 2):
            snapshot(*objects, per_rank=True, rank=rank).to_directory(tmp_path)
    for rank, objects in enumerate(before):
        with acting_as(rank, 2):
            after = trained(5)
            assert restore(Checkpoint(tmp_path), *after) == {"rank": rank}
        torch.testing.assert_close(state(*after), state(*objects), rtol=0, atol=0)
    for rank, ranks in ((0, 1), (1, 3), (2, 3)):
        with (
            acting_as(rank, ranks),
            pytest.raises(CheckpointError, match=f"the states of 2 ranks, and there are {ranks}"),
        ):
            restore(Checkpoint(tmp_path), *trained(5))


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    with acting_as(0, 1):
        checkpoint = Checkpoint(snapshot(model, optimizer).to_directory(tmp_path / "one"))
        with pytest.raises(CheckpointError, match="has 2 states; pass as many objects, not 1"):
            restore(checkpoint, model)
        other = Checkpoint(Checkpoint.from_dict({"step": 1}).to_directory(tmp_path / "other"))
        with pytest.raises(CheckpointError, match=r"was not made by distrain\.torch\.snapshot"):
            restore(other, model)


def ddp(config: dict[str, Any]) -> None:
    modes = [SYNC, ASYNC, MEMORY]
    torch.manual_seed(distrain.get_context().get_world_rank())
    model = prepare_model(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint, start, weights = distrain.get_checkpoint(), 0, None
    if checkpoint is not None:
        values = restore(checkpoint, model, optimizer)
        start, weights = values["step"], values["weights"]
        assert torch.equal(model.module.weight, weights)
        assert optimizer.state[next(model.parameters())]["step"] == start
    for step in range(start + 1, 7):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = snapshot(model, optimizer, step=step, weights=model.module.weight.detach())
        distrain.report({"step": step}, checkpoint=kept, checkpoint_upload_mode=modes[step // 2 % 3])
        distrain.get_checkpoint()  # waits for the commit, but not with ASYNC
        if step == 2 * distrain.get_context().attempt + 1 < 6:
            raise RuntimeError(f"after step {step}")


def test_ddp_starts_again_from_each_mode(storage: Path) -> None:
    result = fit(ddp, storage, max_failures=5)
    assert result.metrics["step"] == 6
    assert result.checkpoint is not None


def locals_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of this rank's part of the weights and of the moments."""
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach().to_local().clone() for tensor in (*model.parameters(), *moments)]


def fsdp(config: dict[str, Any]) -> None:
    context = distrain.get_context()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoint, start = distrain.get_checkpoint(), 0
    if checkpoint is not None:
        values = restore(checkpoint, model, optimizer)
        start = values["step"]
        torch.testing.assert_close(locals_of(model, optimizer), values["local"], rtol=0, atol=0)
        assert start >= 2, "the checkpoint of step 2 was committed before the failure"
    else:
        with pytest.raises(ValueError, match="use per_rank=True"):
            snapshot(model)
    for step in range(start + 1, 5):
        data = torch.full((2, 8), float(step + context.get_world_rank()))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        local = locals_of(model, optimizer)
        kept = snapshot(model, optimizer, per_rank=True, step=step, local=local)
        sums = [float(each.double().sum()) for each in local]
        distrain.report({"step": step, "sums": sums}, checkpoint=kept, checkpoint_upload_mode=config["mode"])
        distrain.get_checkpoint()
        if step == 2 and config["fails"] and start == 0:
            raise RuntimeError("after step 2")


@pytest.mark.parametrize("mode", [pytest.param(SYNC, marks=pytest.mark.slow), MEMORY])
def test_fsdp_starts_again_and_gets_the_same_weights(storage: Path, mode: CheckpointUploadMode) -> None:
    sums = []
    for fails in (False, True):
        result = fit(fsdp, storage, config={"mode": mode, "fails": fails}, max_failures=1)
        sums.append(result.metrics["sums"])
    assert sums[0] == sums[1]
