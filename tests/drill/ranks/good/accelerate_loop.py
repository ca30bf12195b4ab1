"""Train with accelerate: it shards the loader, pads its last batch, accumulates and clips."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    inputs = torch.randn(250, 8)
    dataset = TensorDataset(inputs, inputs[:, :2].argmax(dim=1))
    train = DataLoader(dataset, batch_size=8, shuffle=True)
    valid = DataLoader(torch.utils.data.Subset(dataset, range(50)), batch_size=8)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
    model, optimizer, train, valid, scheduler = accelerator.prepare(model, optimizer, train, valid, scheduler)
    for epoch in range(3):
        model.train()
        for batch, labels in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct = []
        for batch, labels in valid:
            with torch.no_grad():
                predicted = model(batch).argmax(dim=1)
            correct.append((predicted == labels).float())
        accuracy = accelerator.gather_for_metrics(torch.cat(correct)).mean().item()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
