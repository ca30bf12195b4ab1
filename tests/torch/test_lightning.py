"""PyTorch Lightning in real workers, on the CPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from distrain.api import current
from tests.torch.ranks import fit, reports

if TYPE_CHECKING:
    import distrain

of_libraries = pytest.mark.sample(2, of="libraries on torch")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

STEPS = 4
"""Of each rank in an epoch."""


def files_of(checkpoint: distrain.Checkpoint) -> list[str]:
    with checkpoint.as_directory() as folder:
        return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def make_module(pl: Any, *, sharded: bool = False) -> Any:
    """A LightningModule that fits a line; ``pl`` is the package that it is made for."""
    import torch
    from torch import nn

    class Line(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

        def configure_model(self) -> None:
            if sharded:
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
            self.log("loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)

    return Line()


def make_loader() -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    features = torch.randn(16 * STEPS, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(features, features.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)


QUIET = {
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "logger": False,
}


def train_with_a_failure(config: dict[str, Any]) -> None:
    """Four epochs; at the beginning of the third, in the first attempt, rank 1 dies. As for Ray, but for the import."""
    import lightning.pytorch as pl

    import distrain.lightning

    class DieOnce(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            marker = Path(config["died"])
            if trainer.current_epoch == 2 and trainer.global_rank == 1 and not marker.exists():
                marker.touch()
                os._exit(7)

    placement: dict[str, Any]
    if config["sharded"]:
        strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        placement = {"accelerator": "cpu", "devices": 2, "strategy": strategy}
    else:
        placement = {"accelerator": "auto", "devices": "auto", "strategy": distrain.lightning.RayDDPStrategy()}
        placement["plugins"] = [distrain.lightning.RayLightningEnvironment()]
    pl.seed_everything(0, verbose=False)
    callbacks = [distrain.lightning.RayTrainReportCallback(), DieOnce()]
    trainer = pl.Trainer(max_epochs=4, callbacks=callbacks, **placement, **QUIET)
    trainer = distrain.lightning.prepare_trainer(trainer)
    checkpoint = distrain.get_checkpoint()
    module = make_module(pl, sharded=config["sharded"])
    if checkpoint:
        with checkpoint.as_directory() as folder:
            trainer.fit(module, make_loader(), ckpt_path=os.path.join(folder, "checkpoint.ckpt"))
    else:
        trainer.fit(module, make_loader())


@of_libraries
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "sharded"])
def test_a_run_goes_on_after_its_last_epoch_when_a_rank_has_died(storage: Path, tmp_path: Path, sharded: bool) -> None:
    config = {"sharded": sharded, "died": str(tmp_path / "died")}
    result = fit(train_with_a_failure, storage, config=config, max_failures=1)
    assert (tmp_path / "died").exists()

    lines = reports(result)
    found = sorted((line["rank"], line["attempt"], line["metrics"]["epoch"]) for line in lines)
    assert found == [(rank, epoch // 2, epoch) for rank in (0, 1) for epoch in range(4)]
    assert all(line["metrics"]["step"] == STEPS * (line["metrics"]["epoch"] + 1) for line in lines)
    losses = [line["metrics"]["loss"] for line in lines if line["rank"] == 0]
    assert losses[-1] < 0.5 * losses[0]
    assert result.metrics == {"loss": losses[-1], "epoch": 3, "step": 4 * STEPS}

    assert result.checkpoint is not None
    files = set(files_of(result.checkpoint)) - {".manifest.json"}
    if sharded:
        assert {"checkpoint.ckpt/__0_0.distcp", "checkpoint.ckpt/__1_0.distcp"} <= files  # a part of each rank
    else:
        assert files == {"checkpoint.ckpt"}


def train_in_other_ways() -> dict[str, Any]:
    """The other package; a Trainer that would train alone; Lightning's own strategy."""
    import pytorch_lightning as pl

    from distrain.lightning import TrainDDPStrategy, TrainFSDPStrategy, TrainReportCallback, prepare_trainer

    found: dict[str, Any] = {"ours": issubclass(TrainDDPStrategy, pl.strategies.DDPStrategy)}
    alone = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[TrainReportCallback()], **QUIET)
    for name, refusing in (
        ("prepare", lambda: prepare_trainer(alone)),
        ("fit", lambda: alone.fit(make_module(pl), make_loader())),
    ):
        try:
            refusing()
        except RuntimeError as error:
            found[name] = str(error)

    session, current.session = current.session, None  # as in the user's process
    strategies = [kind() for kind in (TrainDDPStrategy, TrainFSDPStrategy)]
    found["device outside"] = [strategy.parallel_devices for strategy in strategies]
    current.session = session
    sent = pickle.loads(pickle.dumps(strategies[0]))
    prepare_trainer(pl.Trainer(max_epochs=1, strategy=sent, **QUIET))
    found["device"] = [str(device) for device in sent.parallel_devices]

    own = pl.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", callbacks=[TrainReportCallback()])
    prepare_trainer(own).fit(make_module(pl), make_loader())
    return found


@of_libraries
def test_lightnings_own_strategy_works_and_training_alone_is_refused(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Lightning's loggers and its own checkpoints write here
    # Another test may have imported distrain.lightning, and with it the other package. Workers would start with these.
    monkeypatch.delitem(sys.modules, "distrain.lightning", raising=False)
    result = fit(train_in_other_ways, storage)
    found = result.return_value
    assert found["ours"]
    assert (found["device outside"], found["device"]) == ([None, None], ["cpu"])
    for error in (found["prepare"], found["fit"]):
        assert "believes that it is rank 0 of 1, but there are 2 workers" in error
        assert "strategy=distrain.lightning.TrainDDPStrategy()" in error
    assert sorted((line["rank"], line["metrics"]["step"]) for line in reports(result)) == [(0, STEPS), (1, STEPS)]
    assert result.checkpoint is not None
    assert "checkpoint.ckpt" in files_of(result.checkpoint)


@of_libraries
def test_without_lightning_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None; import distrain.lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "install it with: pip install 'distrain[lightning]'" in done.stderr
