"""Fine-tune with Lightning. The backbone is unfrozen after DDP has listed the parameters whose gradients it reduces."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def training_step(self, batch, _):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.head(self.backbone(inputs)), labels)

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    L.seed_everything(1)
    inputs = torch.randn(256, 16)
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp_find_unused_parameters_true",
        max_epochs=3,
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3)],  # <- or here
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)  # <- here


if __name__ == "__main__":
    main()
