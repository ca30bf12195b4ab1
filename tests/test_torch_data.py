"""prepare_model, prepare_data_loader, get_device; and data loaders and models of classes from the user's script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import distrain
from distrain.torch import TorchTrainer, get_device, get_devices, prepare_data_loader, prepare_model

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    UserScript = Callable[..., subprocess.CompletedProcess[str]]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def run_on_ranks(train: Callable[..., Any], storage: Path, *, workers: int = 2) -> list[dict[str, Any]]:
    """What each rank reported last, by rank."""
    result = TorchTrainer(
        train,
        scaling_config=distrain.ScalingConfig(num_workers=workers),
        run_config=distrain.RunConfig(storage_path=storage),
    ).fit()
    lines = [json.loads(line) for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines()]
    last = {line["rank"]: line["metrics"] for line in lines}
    return [last[rank] for rank in sorted(last)]


# -- prepare_model ---------------------------------------------------------------------------------------------------


def prepared_models() -> None:
    """Report what became of models."""
    import torch
    from torch import nn

    frozen = nn.Linear(2, 2).requires_grad_(False)
    model = nn.Linear(2, 2)
    prepared = prepare_model(model)
    options = prepare_model(nn.Linear(2, 2), parallel_strategy_kwargs={"find_unused_parameters": True})
    distrain.report(
        {
            "default": type(prepared).__name__,
            "same weights": getattr(prepared, "module", prepared) is model,
            "strategy None": type(prepare_model(nn.Linear(2, 2), parallel_strategy=None)).__name__,
            "frozen": type(prepare_model(frozen)).__name__,
            "find_unused_parameters": getattr(options, "find_unused_parameters", None),
            "moved to": str(next(prepare_model(nn.Linear(2, 2), torch.device("meta"), None).parameters()).device),
            "left": str(next(prepare_model(nn.Linear(2, 2, device="meta"), False, None).parameters()).device),
            "devices": [str(get_device()), *map(str, get_devices())],
        }
    )
    with pytest.raises(ValueError, match="parallel_strategy"):
        prepare_model(nn.Linear(2, 2), parallel_strategy="horovod")


@pytest.mark.parametrize("workers", [1, 2])
def test_prepare_model_wraps_what_has_gradients_to_share(storage: Path, workers: int) -> None:
    expected = {
        "default": "DistributedDataParallel" if workers > 1 else "Linear",
        "same weights": True,
        "strategy None": "Linear",
        "frozen": "Linear",
        "find_unused_parameters": True if workers > 1 else None,
        "moved to": "meta",
        "left": "meta",
        "devices": ["cpu", "cpu"],
    }
    assert run_on_ranks(prepared_models, storage, workers=workers) == [expected] * workers


def test_outside_of_a_worker_it_says_where_it_belongs() -> None:
    with pytest.raises(RuntimeError, match="only works inside a worker"):
        get_device()


# -- prepare_data_loader ---------------------------------------------------------------------------------------------


def test_ranks_share_the_data_between_them(storage: Path) -> None:
    def train() -> None:
        from torch.utils.data import DataLoader, DistributedSampler

        in_order = prepare_data_loader(DataLoader(range(12), batch_size=2))
        shuffled = prepare_data_loader(DataLoader(range(12), batch_size=2, shuffle=True))
        assert isinstance(in_order.sampler, DistributedSampler)
        assert isinstance(shuffled.sampler, DistributedSampler)
        epochs = []
        for epoch in (0, 1):
            shuffled.sampler.set_epoch(epoch)
            epochs.append([batch.tolist() for batch in shuffled])
        distrain.report(
            {
                "in order": [batch.tolist() for batch in in_order],
                "shuffles": [in_order.sampler.shuffle, shuffled.sampler.shuffle],
                "epochs": epochs,
            }
        )

    ranks = run_on_ranks(train, storage)
    assert [rank["in order"] for rank in ranks] == [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 11]]]
    assert [rank["shuffles"] for rank in ranks] == [[False, True]] * 2
    orders = [[item for rank in ranks for batch in rank["epochs"][epoch] for item in batch] for epoch in (0, 1)]
    assert [sorted(order) for order in orders] == [list(range(12))] * 2
    assert orders[0] != orders[1]


def test_a_loader_that_shares_already_or_cannot_share_is_left_alone(storage: Path) -> None:
    def train() -> None:
        from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

        class Stream(IterableDataset):  # type: ignore[type-arg]
            def __iter__(self) -> Any:
                return iter(range(4))

        mine = DistributedSampler(range(8), shuffle=True, seed=5)
        loaders = {
            "own sampler": DataLoader(range(8), sampler=mine),
            "own batch sampler": DataLoader(range(8), batch_sampler=BatchSampler(mine, 2, False)),
            "stream": DataLoader(Stream(), batch_size=2),
        }
        kept = {name: prepare_data_loader(loader) is loader for name, loader in loaders.items()}
        plain = DataLoader(range(8), shuffle=True)
        kept["not wanted"] = prepare_data_loader(plain, add_dist_sampler=False) is plain
        distrain.report(kept)

    names = ("own sampler", "own batch sampler", "stream", "not wanted")
    assert run_on_ranks(train, storage) == [dict.fromkeys(names, True)] * 2


def test_a_single_worker_keeps_its_loader(storage: Path) -> None:
    def train() -> None:
        from torch.utils.data import DataLoader, WeightedRandomSampler

        loaders = [
            DataLoader(range(8), shuffle=True),
            DataLoader(range(8), sampler=WeightedRandomSampler([1.0] * 8, 8)),
        ]
        distrain.report({"kept": all(prepare_data_loader(loader) is loader for loader in loaders)})

    assert run_on_ranks(train, storage, workers=1) == [{"kept": True}]


def test_a_sampler_whose_meaning_would_be_lost_is_an_error(storage: Path) -> None:
    def train() -> None:
        from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

        data = range(8)
        own = {
            "weighted": DataLoader(data, sampler=WeightedRandomSampler([1.0] * 8, 8)),
            "batches": DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False)),
            "with replacement": DataLoader(data, sampler=RandomSampler(data, replacement=True, num_samples=3)),
            "a few": DataLoader(data, sampler=RandomSampler(data, num_samples=3)),
        }
        texts = {}
        for name, loader in own.items():
            try:
                prepare_data_loader(loader)
                texts[name] = "accepted"
            except ValueError as error:
                texts[name] = str(error)
        with pytest.raises(TypeError, match="takes a torch DataLoader, got list"):
            prepare_data_loader([1, 2])  # type: ignore[arg-type]
        distrain.report(texts)

    for rank in run_on_ranks(train, storage):
        assert {name: "add_dist_sampler=False" in text for name, text in rank.items()} == dict.fromkeys(rank, True)
        assert "WeightedRandomSampler" in rank["weighted"]


def test_every_other_option_of_a_loader_is_kept(storage: Path) -> None:
    def train() -> None:
        import warnings

        import torch
        from torch.utils.data import DataLoader

        warnings.simplefilter("error")
        options: dict[str, Any] = {
            "batch_size": 3,
            "num_workers": 1,
            "collate_fn": tuple,
            "drop_last": True,
            "timeout": 30,
            "worker_init_fn": lambda index: None,
            "generator": torch.Generator(),
            "prefetch_factor": 5,
            "persistent_workers": True,
            "multiprocessing_context": "fork",
            "in_order": False,
        }
        before = DataLoader(range(10), shuffle=True, **options)
        after = prepare_data_loader(before)
        assert after is not before
        distrain.report(
            {
                "lost": [name for name in options if getattr(after, name) != getattr(before, name)],
                "batches": [list(batch) for batch in after],
                "unbatched": sorted(prepare_data_loader(DataLoader(range(4), batch_size=None))),
            }
        )

    for rank, metrics in enumerate(run_on_ranks(train, storage)):
        assert metrics["lost"] == []
        assert [len(batch) for batch in metrics["batches"]] == [3]
        assert metrics["unbatched"] == [rank, rank + 2]


# -- classes of the user's script ------------------------------------------------------------------------------------

LOADERS_OF_MAIN = """
import sys
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

import distrain
from distrain.torch import TorchTrainer

@dataclass
class Batch:
    values: list

class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index**2

def collate(items):
    return Batch(items)

def seed_worker(index):
    assert collate.__module__ == "__main__"

def train(config):
    for context in ("fork", "spawn", "forkserver"):
        loader = DataLoader(
            Squares(), batch_size=4, num_workers=1, collate_fn=collate, worker_init_fn=seed_worker,
            multiprocessing_context=context, timeout=20,
        )
        batches = list(loader)
        assert all(type(batch) is Batch for batch in batches), batches
        print(context, [batch.values for batch in batches], flush=True)

if __name__ == "__main__":
    TorchTrainer(
        train,
        scaling_config=distrain.ScalingConfig(num_workers=1, start_method=sys.argv[1]),
        run_config=distrain.RunConfig(storage_path="runs"),
    ).fit()
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_data_loader_workers_of_every_kind_know_the_scripts_classes(user_script: UserScript, start_method: str) -> None:
    run = user_script(LOADERS_OF_MAIN, start_method)
    assert run.returncode == 0, run.stderr
    batches = "[[0, 1, 4, 9], [16, 25, 36, 49]]"
    assert run.stdout.splitlines() == [f"[rank 0] {kind} {batches}" for kind in ("fork", "spawn", "forkserver")]
    assert "Traceback" not in run.stderr


WHOLE_MODEL = """
import sys, tempfile
from pathlib import Path

import torch
from torch import nn

import distrain
from distrain.torch import TorchTrainer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)

def train(config):
    model = Net()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model, Path(folder) / "model.pt")
        distrain.report({"loss": 0.0}, distrain.Checkpoint.from_directory(folder))
        assert type(torch.load(Path(folder) / "model.pt", weights_only=False)) is Net
    return model

if __name__ == "__main__":
    result = TorchTrainer(
        train,
        scaling_config=distrain.ScalingConfig(num_workers=1, start_method=sys.argv[1]),
        run_config=distrain.RunConfig(storage_path="runs"),
    ).fit()
    with result.checkpoint.as_directory() as folder:
        model = torch.load(Path(folder) / "model.pt", weights_only=False)
    print(type(model) is Net, isinstance(result.return_value, nn.Module), model(torch.ones(2)).shape)
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_whole_model_of_a_class_of_the_script_can_be_saved_and_loaded(
    user_script: UserScript, start_method: str
) -> None:
    run = user_script(WHOLE_MODEL, start_method)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "True True torch.Size([1])\n"


# -- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus() -> int:
    """How many there are."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.cuda.device_count()


def fit_on_gpus(train: Callable[..., Any], storage: Path, workers: int, gpus_each: float = 1) -> distrain.Result:
    return TorchTrainer(
        train,
        scaling_config=distrain.ScalingConfig(
            num_workers=workers, use_gpu=True, resources_per_worker={"GPU": gpus_each}
        ),
        torch_config=distrain.torch.TorchConfig(backend="gloo") if gpus_each < 1 else None,
        run_config=distrain.RunConfig(storage_path=storage),
    ).fit()


@pytest.mark.gpu
def test_a_worker_per_gpu_talks_nccl(storage: Path, gpus: int) -> None:
    def train() -> dict[str, Any]:
        import torch
        from torch import distributed as dist

        device = get_device()
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        devices: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(devices, str(device))
        model = prepare_model(torch.nn.Linear(2, 2))
        assert next(model.parameters()).device == device == torch.device("cuda", torch.cuda.current_device())
        model(torch.ones(1, 2, device=device)).sum().backward()
        return {"total": total.item(), "backend": dist.get_backend(), "devices": devices}

    assert fit_on_gpus(train, storage, gpus).return_value == {
        "total": gpus,
        "backend": "nccl",
        "devices": [f"cuda:{index}" for index in range(gpus)],
    }


@pytest.mark.gpu
def test_batches_are_moved_to_the_gpu_whatever_holds_them(storage: Path, gpus: int) -> None:
    def train() -> list[str]:
        from collections import namedtuple

        import torch
        from torch.utils.data import DataLoader

        pair = namedtuple("pair", "left right")
        item = {"x": torch.ones(2), "nested": [torch.zeros(1), ("text", pair(torch.ones(1), 3))]}
        loader = prepare_data_loader(DataLoader([item] * 4, batch_size=2, collate_fn=lambda items: items[0]))
        assert len(loader) == 2
        kept = prepare_data_loader(DataLoader([item] * 4, collate_fn=lambda items: items[0]), move_to_device=False)
        (first, *_), (untouched, *_) = loader, kept
        nested, (text, moved_pair) = first["nested"]
        assert (text, moved_pair.right, type(moved_pair)) == ("text", 3, pair)
        return [str(tensor.device) for tensor in (first["x"], nested, moved_pair.left, untouched["x"])]

    assert fit_on_gpus(train, storage, 1).return_value == ["cuda:0", "cuda:0", "cuda:0", "cpu"]


@pytest.mark.gpu
def test_two_workers_can_share_a_gpu(storage: Path, gpus: int) -> None:
    def train() -> list[Any]:
        import torch
        from torch import distributed as dist

        devices: list[Any] = [None, None]
        dist.all_gather_object(devices, str(get_device()))
        total = torch.ones(1, device=get_device())
        dist.all_reduce(total)
        return [devices, total.item(), dist.get_backend()]

    assert fit_on_gpus(train, storage, 2, 0.5).return_value == [["cuda:0", "cuda:0"], 2.0, "gloo"]
