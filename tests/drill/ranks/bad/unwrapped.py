"""Fine-tune with accelerate. The prepared model is unwrapped again for the training, so nothing reduces gradients."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    set_seed(0)
    latents = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(latents, latents.flip(1)), batch_size=16, shuffle=True)
    unet = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)  # <- or here
    unet = accelerator.unwrap_model(unet)  # <- here
    for epoch in range(2):
        for noisy, target in loader:
            with accelerator.accumulate(unet):
                loss = nn.functional.mse_loss(unet(noisy), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
