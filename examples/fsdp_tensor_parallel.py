"""Train with tensor parallelism and FSDP on one mesh of workers, and resume exactly.

    python examples/fsdp_tensor_parallel.py

The four workers are a mesh of 2 x 2. The two workers of a row hold the columns and rows of the same weights (tensor
parallelism), and train on the same batch. The two rows shard what each of their workers holds (FSDP), and train on
different batches. A checkpoint has one file per worker. The second run starts from the checkpoint in the middle of the
first one, and ends with exactly the same loss.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distrain
from distrain import Checkpoint, ScalingConfig
from distrain.torch import TorchTrainer, get_device

ROWS, COLUMNS = 2, 2
"""Workers that share the data, and workers that share each layer. On GPUs, COLUMNS are the GPUs of a host."""
STEPS, SAVE_EVERY = 20, 10


class FeedForward(nn.Module):
    """The block of a transformer that tensor parallelism suits best: two matrices, and one sum over the workers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build_model(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(FeedForward(16) for _ in range(2))).to(get_device())
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def make_batch(step: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step for the workers of a row."""
    features = torch.randn(64, 16, generator=torch.Generator().manual_seed(step * ROWS + row)).to(get_device())
    return features, features.flip(1)


def train_func() -> None:
    mesh = init_device_mesh(get_device().type, (ROWS, COLUMNS), mesh_dim_names=("data", "tensor"))
    model = build_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoint = distrain.get_checkpoint()
    first = 0 if checkpoint is None else load(checkpoint, model, optimizer) + 1
    up = model[0].up.weight.to_local()  # the columns of this worker, sharded over the rows of the mesh

    for step in range(first, STEPS):
        features, targets = make_batch(step, mesh["data"].get_local_rank())
        loss = nn.functional.mse_loss(model(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / (ROWS * COLUMNS)
        dist.all_reduce(mean)
        metrics = {"step": step, "loss": mean.item(), "numbers_of_a_worker": up.numel()}
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            with tempfile.TemporaryDirectory() as folder:
                save(folder, model, optimizer, step)
                distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder))
        else:
            distrain.report(metrics)


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save what this worker has of the weights and of the optimizer's state. All workers call this."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=folder)


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the part of this worker, also with another mesh than that which saved it, and return the step."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    with checkpoint.as_directory() as folder:
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return state["step"]


def run(resume_from: Checkpoint | None = None) -> distrain.Result:
    scaling = ScalingConfig(num_workers=ROWS * COLUMNS)
    return TorchTrainer(train_func, scaling_config=scaling, resume_from_checkpoint=resume_from).fit()


def main() -> None:
    straight = run()
    weights = 16 * 4 * 16
    print(f"each of {ROWS * COLUMNS} workers has {straight.metrics['numbers_of_a_worker']} of {weights} weights")
    checkpoint, metrics = straight.best_checkpoints[0]
    print(f"after {metrics['step'] + 1} steps: loss {metrics['loss']:.4f}")
    resumed = run(resume_from=checkpoint)
    print(f"after {STEPS} steps: loss {straight.metrics['loss']!r}")
    print(f"resumed in the middle: loss {resumed.metrics['loss']!r}")
    assert resumed.metrics["loss"] == straight.metrics["loss"]
    print("the same, to the last bit")


if __name__ == "__main__":
    main()
