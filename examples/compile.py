"""Use torch.compile in the training function.

    python examples/compile.py
    python examples/compile.py --backend aot_eager    # without a C++ compiler

Compile the model that `prepare_model` returns. Then torch knows where DistributedDataParallel exchanges gradients, and
the exchange still overlaps with the backward pass. Each worker compiles the model itself. The workers of a machine
share the cache on its disk.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

import distrain
from distrain.torch import TorchTrainer, get_device, prepare_model


class Network(nn.Module):
    """A small network. Torch does not compile a bare nn.Sequential inside DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 128)
        self.last = nn.Linear(128, 1)
        self.is_compiled = False

    def forward(self, features: Tensor) -> Tensor:
        self.is_compiled = torch.compiler.is_compiling()
        return self.last(nn.functional.gelu(self.first(features)))


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(distrain.get_context().get_world_rank())
    network = Network()
    model = torch.compile(prepare_model(network), backend=config["backend"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    features = torch.randn(256, 32, device=get_device())
    targets = features.square().mean(dim=1, keepdim=True)
    for step in range(config["steps"]):
        begun = time.perf_counter()
        loss = nn.functional.mse_loss(model(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = {"step": step, "loss": loss.item(), "seconds": time.perf_counter() - begun}
        distrain.report({**metrics, "is_compiled": network.is_compiled})
        if step == 0 and distrain.get_context().get_world_rank() == 0:
            print(f"the first step took {metrics['seconds']:.1f} s; loss {metrics['loss']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2, help="number of training processes (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="give every worker a GPU")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile (default: inductor)")
    args = parser.parse_args()
    result = TorchTrainer(
        train_func,
        train_loop_config={"backend": args.backend, "steps": 50},
        scaling_config=distrain.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
    ).fit()
    metrics = result.metrics
    print(f"step {metrics['step']} took {metrics['seconds']:.4f} s; loss {metrics['loss']:.3f}")
    print(f"the model runs compiled: {metrics['is_compiled']}")


if __name__ == "__main__":
    main()
