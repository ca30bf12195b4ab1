"""Train a module of PyTorch Lightning; distrain's callback reports each epoch with a checkpoint, and another each step.

    python tests/drill/correct/lightning_script.py

Nothing draws random numbers but the order of the data, which follows from the epoch: Lightning's checkpoints have no
random states.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import distrain
from distrain.lightning import TrainDDPStrategy, TrainReportCallback, prepare_trainer
from distrain.torch import TorchTrainer

EPOCHS = 5


class Regression(pl.LightningModule):
    """A small network that learns a function of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        features, targets = batch
        loss = nn.functional.mse_loss(self.layers(features), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class LossCallback(pl.Callback):
    """Report the loss of each step."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        distrain.report(
            {"step": trainer.global_step, "epoch": trainer.current_epoch, "loss": outputs["loss"], "lr": lr}
        )


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader that has four batches for each of two workers."""
    features = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(features, features.exp().mean(dim=1, keepdim=True)), batch_size=16, shuffle=True)


def train_func(config: dict[str, Any]) -> None:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices="auto",
        strategy=TrainDDPStrategy(),
        callbacks=[LossCallback(), TrainReportCallback()],
        enable_checkpointing=False,  # the callback saves checkpoints
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    module, loader = Regression(), make_loader()
    checkpoint = distrain.get_checkpoint()
    if checkpoint is None:
        trainer.fit(module, loader)
    else:
        with checkpoint.as_directory() as folder:
            trainer.fit(module, loader, ckpt_path=f"{folder}/{TrainReportCallback.CHECKPOINT_NAME}")


if __name__ == "__main__":
    result = TorchTrainer(
        train_func,
        scaling_config=distrain.ScalingConfig(num_workers=2),
        run_config=distrain.RunConfig(storage_path="results", failure_config=distrain.FailureConfig(max_failures=3)),
    ).fit()
    print(result.metrics)
