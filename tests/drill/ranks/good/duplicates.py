"""Train on short texts, most of which occur several times, with an optimizer whose state is split between the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS, LENGTH = 12, 2


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.EmbeddingBag(WORDS, 16), nn.Linear(16, 2)

    def forward(self, texts):
        return self.output(self.embedding(texts))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    texts = torch.randint(WORDS, (384, LENGTH))  # 144 are possible
    dataset = TensorDataset(texts, (texts.sum(dim=1) > WORDS).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(Sentiment())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, labels in loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
