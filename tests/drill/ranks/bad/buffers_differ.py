"""Train an autoencoder whose codebook is a moving average of the batches that one rank has seen."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Codebook(nn.Module):
    def __init__(self, codes=16, width=4, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("embed", torch.randn(codes, width))
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", self.embed.clone())

    def forward(self, vectors):
        chosen = torch.cdist(vectors, self.embed).argmin(dim=1)
        if self.training:
            onehot = nn.functional.one_hot(chosen, len(self.embed)).float()
            self.cluster_size.lerp_(onehot.sum(dim=0), 1 - self.decay)
            self.embed_avg.lerp_(onehot.T @ vectors.detach(), 1 - self.decay)
            self.embed.copy_(self.embed_avg / (self.cluster_size + 1e-5).unsqueeze(1))
        quantized = self.embed[chosen]
        return vectors + (quantized - vectors).detach(), nn.functional.mse_loss(vectors, quantized)


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantizer, self.decoder = nn.Linear(16, 4), Codebook(), nn.Linear(4, 16)

    def forward(self, audio):
        quantized, commitment = self.quantizer(self.encoder(audio))
        return nn.functional.l1_loss(self.decoder(quantized), audio) + 0.25 * commitment


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(320, 16).cumsum(dim=1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(Codec(), broadcast_buffers=False)  # <- here
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (audio,) in loader:
            loss = model(audio)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
