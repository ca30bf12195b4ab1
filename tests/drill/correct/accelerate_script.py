"""Train with accelerate: save_state() and load_state(), with dropout, in mid-epoch as well.

distrain run --num-workers 2 tests/drill/correct/accelerate_script.py:train_func
"""

import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrain

EPOCHS, STEPS_PER_CHECKPOINT = 4, 4


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return a loader that has six batches for each of two workers."""
    points = torch.rand(192, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    data = TensorDataset(points, (points.norm(dim=1) < 0.8).long())
    generator = torch.Generator()  # or each loop over the loader would begin by drawing one of torch's random numbers
    return DataLoader(data, batch_size=16, shuffle=True, generator=generator)


def train_func(config: dict[str, Any]) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.get("lr", 5e-3))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * EPOCHS * 6)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, make_loader(), scheduler)
    set_seed(0, device_specific=True)  # each rank draws its own dropout masks

    first = position = 0
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            accelerator.load_state(folder)
        first, position = divmod(checkpoint.get_metadata()["step"], len(loader))
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, position) if position else loader
        for step, (points, labels) in enumerate(batches, start=epoch * len(loader) + position + 1):
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            metrics = {"step": step, "epoch": epoch, "loss": loss.item(), "lr": scheduler.get_last_lr()[0]}
            if step % STEPS_PER_CHECKPOINT:
                distrain.report(metrics)
                continue
            with tempfile.TemporaryDirectory() as folder:
                accelerator.save_state(folder)  # each rank saves its own random state
                checkpoint = distrain.Checkpoint.from_directory(folder)
                checkpoint.set_metadata({"step": step})
                distrain.report(metrics, checkpoint=checkpoint)
        position = 0
