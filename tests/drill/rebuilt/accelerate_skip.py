"""Train with accelerate, and resume in the middle of an epoch with ``skip_first_batches``.

    accelerate launch --multi_gpu --num_processes 2 accelerate_skip.py [--old]

Rebuilt from https://github.com/huggingface/accelerate/pull/4071. Until then, the loader that ``skip_first_batches``
makes began with iteration 0, whatever that of the loader it came from, and told so to the sampler: the rest of an epoch
was read in the order of the first one. ``--old`` does the same to the loader that a fixed version makes.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OUT = Path("out")
EPOCHS, STEPS_PER_EPOCH, BATCH_SIZE, SAVE_EVERY = 4, 8, 8, 3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--old", action="store_true", help="resume as accelerate did before the pull request")
    args = parser.parse_args()

    configuration = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    set_seed(42)
    inputs = torch.randn(STEPS_PER_EPOCH * BATCH_SIZE * accelerator.num_processes, 8)
    dataset = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10 * accelerator.num_processes, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    completed = 0
    latest = OUT / "latest"
    if latest.exists():
        accelerator.load_state(str(OUT / latest.read_text()))
        completed = int(latest.read_text().removeprefix("step_"))
        accelerator.print(f"resumed after step {completed}")
    accelerator.wait_for_everyone()
    first_epoch, skip = divmod(completed, STEPS_PER_EPOCH)

    for epoch in range(first_epoch, EPOCHS):
        loader.set_epoch(epoch)
        active = loader
        if epoch == first_epoch and skip:
            active = accelerator.skip_first_batches(loader, skip)
            if args.old:
                active.iteration = 0
        for batch, targets in active:
            loss = nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            completed += 1
            accelerator.print(f"step {completed}: loss {loss.item()!r}", flush=True)
            if completed % SAVE_EVERY == 0:
                accelerator.save_state(str(OUT / f"step_{completed}"))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    latest.with_suffix(".new").write_text(f"step_{completed}")
                    latest.with_suffix(".new").replace(latest)
    accelerator.end_training()


if __name__ == "__main__":
    main()
