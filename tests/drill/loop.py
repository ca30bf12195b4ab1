"""A training loop that resumes exactly, in mid-epoch as well, unless ``forget`` names a part of its state.

    distrain run --num-workers 2 --set forget=optimizer tests/drill/loop.py:train_func

``forget`` is one of FORGETS, or empty.
"""

import math
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import distrain
from distrain.torch import prepare_model

EPOCHS, STEPS_PER_EPOCH, BATCH_SIZE = 4, 8, 16
STEPS = EPOCHS * STEPS_PER_EPOCH
STEPS_PER_CHECKPOINT = 5

FORGETS = {
    "optimizer": "the optimizer's state is not loaded",
    "scheduler": "the scheduler's state is not loaded",
    "scaler": "the gradient scaler's state is not loaded",
    "random": "no random state is loaded",
    "python": "the state of Python's random is not loaded",
    "numpy": "the state of NumPy's random is not loaded",
    "torch": "the state of torch's random numbers is not loaded",
    "rank0": "all ranks load the random state of rank 0",
    "sampler_epoch": "set_epoch() gets an epoch that is counted from 0 after the resume",
    "epoch": "the epochs are counted from 0 again",
    "position": "the epoch starts over from its first batch",
    "step": "the global step is 0 again",
    "buffers": "only the parameters are saved, not the running statistics of BatchNorm",
    "ema": "the moving average of the weights is not loaded",
    "prefix": "the keys are saved with DDP's prefix, so none fits the bare module",
    "early": "the model is saved as it was before the step",
}


class Average:
    """An exponential moving average of the weights."""

    def __init__(self, module: nn.Module, decay: float = 0.9) -> None:
        self.decay = decay
        self.weights = {name: weight.detach().clone() for name, weight in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        for name, weight in module.named_parameters():
            self.weights[name].lerp_(weight, 1 - self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.weights)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, weight in state.items():
            self.weights[name].copy_(weight)


def make_data(rows: int, seed: int) -> TensorDataset:
    features = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(features, features.sin().sum(dim=1, keepdim=True))


def make_module() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_random_state(state: dict[str, Any]) -> None:
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "torch" in state:
        torch.set_rng_state(state["torch"])


def augmented(features: Tensor) -> Tensor:
    """Scale a batch by one random factor, and each feature by another, and add noise."""
    factors = torch.from_numpy(np.random.normal(1.0, 0.05, size=(1, features.shape[1])))
    return features * random.uniform(0.9, 1.1) * factors.float() + 0.05 * torch.randn_like(features)


def learning_rate(step: int) -> float:
    """Return the factor of the learning rate: a warm-up, then half a cosine."""
    return min(1.0, (step + 1) / 4) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / (STEPS + 8))))


def penalty_weight(step: int) -> float:
    """Return the weight of the penalty on large outputs, which is annealed over the whole training."""
    return 0.5 * min(1.0, step / STEPS)


@torch.no_grad()
def evaluate(module: nn.Module, weights: dict[str, Tensor], data: TensorDataset) -> float:
    """Return the loss on these data, with these weights and the module's running statistics."""
    features, targets = data.tensors
    module.eval()
    loss = nn.functional.mse_loss(torch.func.functional_call(module, weights, (features,)), targets)
    module.train()
    return loss.item()


def train_func(config: dict[str, Any]) -> None:
    forget = config.get("forget") or ""
    if forget and forget not in FORGETS:
        raise ValueError(f"forget={forget!r}: must be one of {', '.join(FORGETS)}")
    context = distrain.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()

    seed_all(0)  # the same weights on all ranks
    module = make_module()
    model = prepare_model(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
    ema = Average(module)
    validation = make_data(32, seed=1)
    data = make_data(STEPS_PER_EPOCH * BATCH_SIZE * world_size, seed=0)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True, seed=0)
    generator = torch.Generator()  # or each new iterator of the loader would draw one of torch's random numbers
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler, generator=generator)
    seed_all(1 + rank)  # different dropout masks and noise on each rank
    global_step = first_epoch = position = 0

    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "training.pt"), weights_only=True)
            own = torch.load(Path(folder, f"rank_{rank}.pt"), weights_only=False)
            if forget == "rank0":
                own["random"] = torch.load(Path(folder, "rank_0.pt"), weights_only=False)["random"]
        module.load_state_dict(state["model"], strict=forget not in ("prefix", "buffers"))
        module.load_state_dict(own["buffers"], strict=False)
        if forget != "optimizer":
            optimizer.load_state_dict(state["optimizer"])
        if forget != "scheduler":
            scheduler.load_state_dict(state["scheduler"])
        if forget != "scaler":
            scaler.load_state_dict(state["scaler"])
        if forget != "ema":
            ema.load_state_dict(state["ema"])
        if forget != "step":
            global_step = state["global_step"]
        if forget != "epoch":
            first_epoch = state["epoch"]
        if forget != "position":
            position = state["position"]
        if forget != "random":
            set_random_state({name: each for name, each in own["random"].items() if name != forget})

    def save(folder: str) -> None:
        """Save what belongs to this rank and, on rank 0, what is the same on all ranks."""
        buffers = {} if forget == "buffers" else dict(module.named_buffers())
        torch.save({"random": random_state(), "buffers": buffers}, Path(folder, f"rank_{rank}.pt"))
        if rank != 0:
            return
        weights = module.state_dict()
        if forget == "buffers":
            weights = dict(module.named_parameters())
        elif forget == "prefix":
            weights = {f"module.{name}": weight for name, weight in weights.items()}  # as model.state_dict() does
        elif forget == "early":
            weights = before
        state = {
            "model": weights,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
            "ema": ema.state_dict(),
            "global_step": global_step,
            "epoch": epoch,
            "position": position,
        }
        torch.save(state, Path(folder, "training.pt"))

    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch - first_epoch if forget == "sampler_epoch" else epoch)
        generator.manual_seed(epoch)
        for index, (features, targets) in enumerate(loader):
            if index < position:  # read before the restart
                continue
            if forget == "early":
                before = {name: each.clone() for name, each in module.state_dict().items()}
            with torch.autocast("cpu", dtype=torch.float16):
                outputs = model(augmented(features))
            outputs = outputs.float()
            error = nn.functional.mse_loss(outputs, targets)
            loss = error + penalty_weight(global_step) * outputs.square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 5.0)
            lr, scale = optimizer.param_groups[0]["lr"], scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= scale:  # or the gradients were not finite, and the optimizer took no step
                scheduler.step()
            ema.update(module)
            global_step += 1
            position = index + 1

            metrics = {
                "step": global_step,
                "epoch": epoch,
                "loss": loss.item(),
                "eval_loss": evaluate(module, dict(module.named_parameters()), validation),
                "ema_loss": evaluate(module, ema.weights, validation),
                "lr": lr,
            }
            is_stopping = distrain.should_stop()
            if is_stopping or global_step % STEPS_PER_CHECKPOINT == 0:
                with tempfile.TemporaryDirectory() as folder:
                    save(folder)
                    distrain.report(metrics, checkpoint=distrain.Checkpoint.from_directory(folder))
            else:
                distrain.report(metrics)
            if is_stopping:
                return
        position = 0
