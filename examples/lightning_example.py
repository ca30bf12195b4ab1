"""Train a PyTorch Lightning module.

    pip install lightning
    python examples/lightning_example.py

The module needs no change. The Trainer gets a strategy that uses the workers of distrain, and a callback that reports
each epoch with a checkpoint. If a worker fails, distrain restarts the run from the last epoch, at most two times.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import MNIST

import distrain
from distrain.lightning import TrainDDPStrategy, TrainReportCallback, prepare_trainer
from distrain.torch import TorchTrainer

DIGITS_ROOT = Path(__file__).resolve().parent / "data" / "digits"


def load_digits(train: bool) -> TensorDataset:
    """Return the 8x8 images of handwritten digits in examples/data."""
    digits = MNIST(str(DIGITS_ROOT), train=train)
    return TensorDataset(digits.data.float() / 255, digits.targets)


class Digits(pl.LightningModule):
    """A small network that classifies digits."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        accuracy = (self.layers(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def train_func(config: dict[str, Any]) -> None:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        accelerator="auto",
        devices="auto",
        strategy=TrainDDPStrategy(),
        callbacks=[TrainReportCallback()],
        enable_checkpointing=False,  # the callback saves checkpoints
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    train_loader = DataLoader(load_digits(train=True), batch_size=32, shuffle=True)
    valid_loader = DataLoader(load_digits(train=False), batch_size=90)
    module = Digits(lr=config["lr"])

    checkpoint = distrain.get_checkpoint()
    if checkpoint is None:
        trainer.fit(module, train_loader, valid_loader)
    else:
        with checkpoint.as_directory() as folder:
            trainer.fit(module, train_loader, valid_loader, ckpt_path=f"{folder}/{TrainReportCallback.CHECKPOINT_NAME}")


def main() -> None:
    result = TorchTrainer(
        train_func,
        train_loop_config={"lr": 3e-3, "epochs": 5},
        scaling_config=distrain.ScalingConfig(num_workers=2),
        run_config=distrain.RunConfig(failure_config=distrain.FailureConfig(max_failures=2)),
    ).fit()
    print(f"metrics: {result.metrics}")
    with result.checkpoint.as_directory() as folder:
        file = f"{folder}/{TrainReportCallback.CHECKPOINT_NAME}"
        module = Digits.load_from_checkpoint(file, lr=0.0, map_location="cpu")
    images, labels = load_digits(train=False).tensors
    accuracy = (module.layers(images).argmax(dim=1) == labels).float().mean().item()
    print(f"accuracy of the loaded checkpoint: {accuracy:.3f}")


if __name__ == "__main__":
    main()
