"""Train a small ResNet on two workers: the quick start of distrain.

    python examples/quickstart.py
    python examples/quickstart.py --dataset fashion-mnist --use-gpu --num-workers 4

The default data set is in examples/data, so the first run needs no download.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import MNIST, FashionMNIST
from torchvision.models import resnet18
from torchvision.transforms import Compose, Normalize, ToTensor

import distrain
from distrain.torch import TorchTrainer, prepare_data_loader, prepare_model

DATASETS: dict[str, type[MNIST]] = {"digits": MNIST, "fashion-mnist": FashionMNIST}
DIGITS_ROOT = Path(__file__).resolve().parent / "data" / "digits"
CHECKPOINT_FILE = "checkpoint.pt"
TEST_BATCH_SIZE = 256


def build_model() -> nn.Module:
    """Return a ResNet-18 for small grey images: with one channel, and a first layer that keeps the image size."""
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=3, padding=1, bias=False)
    return model


def load_data(dataset: str, root: str, train: bool) -> MNIST:
    """Read the data from disk. The mean and the deviation fit both data sets."""
    transform = Compose([ToTensor(), Normalize((0.3,), (0.35,))])
    return DATASETS[dataset](root, train=train, transform=transform)


def download_once_per_host(dataset: str, root: str) -> None:
    """Download on one worker of each host, so that two workers never write the same file."""
    if distrain.get_context().get_local_rank() == 0:
        DATASETS[dataset](root, download=True)
    dist.barrier()


def mean_over_ranks(total: Tensor, count: int) -> float:
    """Return the mean over all ranks, whose shares of the data may differ in size."""
    sums = torch.tensor([total.item(), count], dtype=torch.float64, device=total.device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: Optimizer) -> float:
    """Train on this rank's share of the data, and return the mean loss of all ranks."""
    criterion = nn.CrossEntropyLoss()
    losses = []
    model.train()
    for images, labels in loader:
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    # All batches have the same size, so the mean over batches is the mean over images.
    return mean_over_ranks(torch.stack(losses).sum(), len(losses))


@torch.no_grad()
def count_correct(model: nn.Module, loader: DataLoader) -> Tensor:
    """Count the right answers on the model's device. The workers call this, and main() after the run."""
    device = next(model.parameters()).device
    correct = torch.zeros((), device=device)
    model.eval()
    for images, labels in loader:
        predicted = model(images.to(device)).argmax(dim=1)
        correct += (predicted == labels.to(device)).sum()
    return correct


def test_accuracy(model: nn.Module, test_data: MNIST) -> float:
    """Return the accuracy on the test images. Each rank tests its share, without duplicates.

    `model` is the module without DistributedDataParallel: the ranks may have different numbers of batches, and the
    wrapped model would wait for all ranks at each batch. The batch norm statistics differ between ranks. All ranks use
    those of rank 0, because rank 0 saves the checkpoint.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    context = distrain.get_context()
    shard = range(context.get_world_rank(), len(test_data), context.get_world_size())
    loader = DataLoader(Subset(test_data, shard), batch_size=TEST_BATCH_SIZE)
    return mean_over_ranks(count_correct(model, loader), len(shard))


def load_state(checkpoint: distrain.Checkpoint) -> dict[str, Any]:
    """Read the state that `report` saved, to the CPU, so that it loads with and without a GPU."""
    with checkpoint.as_directory() as directory:
        return torch.load(Path(directory) / CHECKPOINT_FILE, map_location="cpu")


def restore(model: nn.Module, optimizer: Optimizer) -> int:
    """Load the last checkpoint, if there is one, and return the epoch to start with."""
    checkpoint = distrain.get_checkpoint()
    if checkpoint is None:
        return 0
    state = load_state(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def report(metrics: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Report from every rank. Only rank 0 saves a checkpoint, because all ranks have the same model."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if distrain.get_context().get_world_rank() == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": metrics["epoch"],
            }
            torch.save(state, Path(directory) / CHECKPOINT_FILE)
            checkpoint = distrain.Checkpoint.from_directory(directory)
        distrain.report(metrics, checkpoint=checkpoint)


def train_func(config: dict[str, Any]) -> None:
    """Train on one worker. distrain calls this function on every worker."""
    torch.manual_seed(0)
    dataset, root = config["dataset"], config["data_root"]
    if dataset != "digits":
        download_once_per_host(dataset, root)

    # drop_last, because batch norm cannot train on a last batch of one image.
    train_loader = prepare_data_loader(
        DataLoader(
            load_data(dataset, root, train=True),
            batch_size=config["batch_size"],
            shuffle=True,
            drop_last=True,
        )
    )
    if len(train_loader) == 0:
        raise ValueError("the batch size is larger than each worker's share of the data")
    test_data = load_data(dataset, root, train=False)

    model = prepare_model(build_model())
    module = getattr(model, "module", model)  # a single worker has no wrapper
    optimizer = Adam(model.parameters(), lr=config["lr"])

    for epoch in range(restore(module, optimizer), config["epochs"]):
        if distrain.get_context().get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)  # a new order, the same on all ranks
        set_lr(optimizer, config["lr"] * (1 - epoch / config["epochs"]))  # smaller in each epoch
        metrics = {
            "epoch": epoch,
            "loss": train_epoch(model, train_loader, optimizer),
            "accuracy": test_accuracy(module, test_data),
        }
        report(metrics, module, optimizer)


def parse_args() -> argparse.Namespace:
    """Parse the command line. The defaults fit a laptop."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--num-workers", type=int, default=2, help="number of training processes")
    add("--epochs", type=int, default=8, help="passes over the training data")
    add("--batch-size", type=int, default=64, help="images in a batch of one worker")
    add("--lr", type=float, default=0.001, help="learning rate of the first epoch")
    add("--use-gpu", action="store_true", help="give each worker a GPU")
    add("--dataset", choices=DATASETS, default="digits", help="images to learn")
    add("--data-root", default="~/.cache/distrain", help="where fashion-mnist is downloaded to")
    add("--storage-path", help="directory of all runs; with many hosts, one they share")
    add("--name", help="name of this run")
    return parser.parse_args()


def run(args: argparse.Namespace) -> distrain.Result:
    """Train on the workers that the command line asks for."""
    return TorchTrainer(
        train_func,
        train_loop_config={
            "dataset": args.dataset,
            "data_root": args.data_root,
            "epochs": args.epochs,
            "batch_size": args.batch_size,
            "lr": args.lr,
        },
        scaling_config=distrain.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
        run_config=distrain.RunConfig(
            name=args.name,
            storage_path=args.storage_path,
            checkpoint_config=distrain.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def accuracy_of(checkpoint: distrain.Checkpoint, args: argparse.Namespace) -> float:
    """Load the checkpoint into a new model, and return its accuracy."""
    model = build_model()
    model.load_state_dict(load_state(checkpoint)["model"])
    if args.use_gpu and torch.cuda.is_available():
        model.cuda()
    test_data = load_data(args.dataset, args.data_root, train=False)
    correct = count_correct(model, DataLoader(test_data, batch_size=TEST_BATCH_SIZE))
    return correct.item() / len(test_data)


def main() -> None:
    """Train, then show that the checkpoint holds a usable model."""
    args = parse_args()
    if args.dataset == "digits":
        args.data_root = str(DIGITS_ROOT)
    result = run(args)
    if result.checkpoint is None:
        raise SystemExit("nothing was trained, so there is no checkpoint")
    print(f"final metrics: {result.metrics}")
    print(f"checkpoint: {result.checkpoint.path}")
    print(f"accuracy of the loaded checkpoint: {accuracy_of(result.checkpoint, args):.4f}")


if __name__ == "__main__":
    main()
