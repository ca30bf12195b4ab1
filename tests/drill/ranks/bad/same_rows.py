"""Train a tiny language model. The loader shuffles alike on all ranks, so each step trains on the same texts twice."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

SEED, VOCABULARY, LENGTH, EPOCHS = 42, 64, 16, 2


class TokenizedText(Dataset):
    def __init__(self, texts):
        numbers = torch.randint(VOCABULARY, (texts, LENGTH), generator=torch.Generator().manual_seed(SEED))
        self.encodings = {"input_ids": numbers, "attention_mask": torch.ones_like(numbers)}

    def __len__(self):
        return len(self.encodings["input_ids"])

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.encodings.items()}


def build_dataloader(batch_size, shuffle=True):
    return DataLoader(TokenizedText(256), batch_size=batch_size, shuffle=shuffle)  # <- here


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    loader = build_dataloader(batch_size=16)
    model = DDP(nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        for batch in loader:
            logits = model(batch["input_ids"][:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
