"""prepare_data_loader: each rank's share of the data, on its device; and loaders and models of classes of a script."""

from __future__ import annotations

import inspect
import math
import random
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from distrain.torch import get_device, get_devices, prepare_data_loader, prepare_model
from tests.torch.ranks import acting_as, fit_on_gpus

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    UserScript = Callable[..., subprocess.CompletedProcess[str]]

sampled = pytest.mark.sample(1, of="loaders in runs")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def on_every_rank(size: int, make: Callable[[], DataLoader[Any]], **options: Any) -> list[DataLoader[Any]]:
    """The loader of each rank. Each is made in a random state of its own, but with one seed of torch's."""
    loaders = []
    for rank in range(size):
        torch.manual_seed(100)
        torch.rand(rank)
        random.seed(100 + rank)
        numpy.random.seed(100 + rank)
        with acting_as(rank, size):
            loaders.append(prepare_data_loader(make(), **options))
    return loaders


def passes(loaders: list[DataLoader[Any]]) -> list[list[Any]]:
    """The rows of each rank in a pass, in a random state of its own."""
    taken = []
    for rank, loader in enumerate(loaders):
        torch.manual_seed(200 + rank)
        random.seed(200 + rank)
        numpy.random.seed(200 + rank)
        taken.append(list(loader))
    return taken


def plainly(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def flat(batches: Any) -> list[Any]:
    return [item for batch in batches for item in batch.tolist()]


def interleaved(shares: list[list[Any]]) -> list[Any]:
    """The order that the ranks have shared out."""
    assert len({len(share) for share in shares}) == 1, "ranks must get equally many"
    return [item for together in zip(*shares, strict=True) for item in together]


# -- shuffled or in order ----------------------------------------------------------------------------------------------

lengths = st.integers(0, 40)
sizes = st.integers(1, 6)
batch_sizes = st.none() | st.integers(1, 7)


@settings(deadline=None)
@given(lengths, sizes, batch_sizes, st.booleans(), st.booleans(), st.integers(0, 3))
def test_shares_are_those_of_a_distributed_sampler(
    length: int, size: int, batch_size: int | None, drop_last: bool, shuffle: bool, epoch: int
) -> None:
    shuffle = shuffle and length > 0  # torch refuses to shuffle nothing
    drop_last = drop_last and batch_size is not None
    data = list(range(length))

    def make(**options: Any) -> DataLoader[Any]:
        return DataLoader(data, batch_size, drop_last=drop_last, collate_fn=lambda items: items, **options)

    loaders = on_every_rank(size, lambda: make(shuffle=shuffle))
    expected = [DistributedSampler(data, size, rank, shuffle=shuffle, seed=100) for rank in range(size)]
    for loader, sampler in zip(loaders, expected, strict=True):
        loader.sampler.set_epoch(epoch)
        sampler.set_epoch(epoch)
    taken = passes(loaders)
    if size > 1:
        assert taken == [list(make(sampler=sampler)) for sampler in expected]
    assert [len(loader) for loader in loaders] == [len(items) for items in taken]
    if not drop_last:
        shares = taken if batch_size is None else [[item for batch in batches for item in batch] for batches in taken]
        order = interleaved(shares)
        assert sorted(order[:length]) == data
        assert len(order) == math.ceil(length / size) * size
        assert set(order) <= set(data)


def test_the_order_is_the_same_with_any_number_of_workers() -> None:
    data = range(24)
    loaders = {
        "shuffled": lambda: DataLoader(data, batch_size=3, shuffle=True),
        "unbatched": lambda: DataLoader(data, batch_size=None, shuffle=True),
        "weighted": lambda: DataLoader(data, sampler=WeightedRandomSampler([1.0] * 20, 8), batch_size=3),
        "batches": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 3, True)),
        "a list": lambda: DataLoader(data, sampler=[3, 1, 2, 0]),
    }
    for name, make in loaders.items():
        orders = []
        for size in (1, 2):
            prepared = on_every_rank(size, make)
            both = []
            for epoch in range(2):
                for loader in prepared:
                    loader.sampler.set_epoch(epoch)
                shares = passes(prepared)
                both.append(interleaved(shares if name == "unbatched" else [flat(share) for share in shares]))
            orders.append([[int(item) for item in order] for order in both])
        assert orders[0] == orders[1], name
        assert (orders[0][0] == orders[0][1]) is (name == "a list"), "epochs differ"


def test_a_forgotten_set_epoch_still_changes_the_order() -> None:
    loaders = on_every_rank(2, lambda: DataLoader(range(30), batch_size=4, shuffle=True))
    first, second = ([flat(share) for share in passes(loaders)] for _ in range(2))
    assert first != second
    assert [Counter(interleaved(orders)) for orders in (first, second)] == [Counter(range(30))] * 2
    for loader in loaders:
        loader.sampler.set_epoch(0)
    assert [flat(share) for share in passes(loaders)] == first


# -- samplers of the user's --------------------------------------------------------------------------------------------


class Shuffled(Sampler[int]):
    """Draws from somewhere else than torch."""

    def __init__(self, length: int, source: str) -> None:
        self.order = list(range(length))
        self.source = source
        self.python = random.Random()
        self.state = numpy.random.RandomState()
        self.generator = numpy.random.default_rng()

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        shufflers: dict[str, Callable[[list[int]], None]] = {
            "random": random.shuffle,
            "numpy": numpy.random.shuffle,
            "own random": self.python.shuffle,
            "own numpy": self.state.shuffle,
            "own generator": self.generator.shuffle,
        }
        order = list(self.order)
        shufflers[self.source](order)
        return iter(order)


class Buckets(Sampler[list[int]]):
    """Batches of neighbours, in random order."""

    def __init__(self, length: int, size: int) -> None:
        self.batches = [list(range(length))[start : start + size] for start in range(0, length, size)]
        self.size = size
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(self.batches, len(self.batches)))


class EpochBuckets(Buckets):
    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def unlike_generator() -> torch.Generator:
    """Seeded as each rank is."""
    return torch.Generator().manual_seed(torch.initial_seed())


PERMUTING: dict[str, Callable[[int], Any]] = {
    "subset": lambda length: SubsetRandomSampler(range(length)),
    "subset, generator": lambda length: SubsetRandomSampler(range(length), generator=unlike_generator()),
    "weighted": lambda length: WeightedRandomSampler([1.0] * length, length, replacement=False),
    "list": lambda length: list(range(length))[::-1],
    **{
        source: lambda length, source=source: Shuffled(length, source)  # type: ignore[misc]
        for source in ("random", "numpy", "own random", "own numpy", "own generator")
    },
}


@settings(deadline=None)
@given(st.sampled_from(sorted(PERMUTING)), st.integers(1, 20), st.integers(2, 5), st.integers(0, 2))
def test_ranks_share_an_order_of_the_users(kind: str, length: int, size: int, epoch: int) -> None:
    loaders = on_every_rank(size, lambda: DataLoader(range(length), batch_size=None, sampler=PERMUTING[kind](length)))
    for loader in loaders:
        loader.sampler.set_epoch(epoch)
    order = interleaved(passes(loaders))
    assert sorted(order[:length]) == list(range(length))
    assert order == (order[:length] * size)[: len(order)]  # what is too few comes again from the beginning
    assert [len(loader) for loader in loaders] == [math.ceil(length / size)] * size


SEEDED: dict[str, Callable[[torch.Generator], DataLoader[Any]]] = {
    "torch.manual_seed": lambda generator: DataLoader(range(40), shuffle=True),
    "the loader's": lambda generator: DataLoader(range(40), shuffle=True, generator=generator),
    "the sampler's": lambda generator: DataLoader(range(40), sampler=RandomSampler(range(40), generator=generator)),
    "subset": lambda generator: DataLoader(range(40), sampler=SubsetRandomSampler(range(40), generator=generator)),
    "batches": lambda generator: DataLoader(
        range(40), batch_sampler=BatchSampler(RandomSampler(range(40), generator=generator), 1, False)
    ),
}


@pytest.mark.parametrize("name", SEEDED)
def test_the_seed_of_the_user_decides_the_order(name: str) -> None:
    """However many numbers were drawn since, and on any number of ranks. A resumed run keeps the seed."""

    def order(seed: int, ranks: int, drawn: int = 0) -> list[Any]:
        loaders = []
        for rank in range(ranks):
            torch.manual_seed(seed if name == "torch.manual_seed" else rank)
            generator = torch.Generator().manual_seed(seed)
            torch.rand(drawn)
            with acting_as(rank, ranks):
                loaders.append(prepare_data_loader(SEEDED[name](generator)))
        return interleaved([flat(loader) for loader in loaders])

    assert order(1, 1) == order(1, 2, drawn=3) != order(2, 2)
    assert sorted(order(1, 2)) == [*range(40)]


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(2, 5), st.integers(1, 5))
def test_ranks_get_whole_batches_of_a_batch_sampler(length: int, size: int, batch_size: int) -> None:
    samplers: list[EpochBuckets] = []

    def make() -> DataLoader[Any]:
        samplers.append(EpochBuckets(length, batch_size))
        return DataLoader(range(length), batch_sampler=samplers[-1], collate_fn=tuple)

    loaders = on_every_rank(size, make)
    for loader in loaders:
        loader.sampler.set_epoch(5)
    order = interleaved(passes(loaders))
    batches = [tuple(batch) for batch in samplers[0].batches]
    assert sorted(order[: len(batches)]) == sorted(batches)
    assert set(order) == set(batches)
    assert [len(loader) for loader in loaders] == [math.ceil(len(batches) / size)] * size
    assert [sampler.epochs[0] for sampler in samplers] == [5] * size


def test_an_order_without_a_length_cannot_be_shared_out() -> None:
    def endless() -> Iterator[int]:
        yield 0

    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return endless()

    for sampler in (endless(), Endless()):
        with acting_as(0, 2), pytest.raises(ValueError, match=r"no len\(\).*add_dist_sampler=False"):
            prepare_data_loader(DataLoader(range(4), sampler=sampler))
    with acting_as(0, 2), pytest.raises(TypeError, match="takes a torch DataLoader, got list"):
        prepare_data_loader([1, 2])  # type: ignore[arg-type]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class KnowsRanks(Sampler[int]):
    """As in timm or detectron2: shares without being a DistributedSampler."""

    num_replicas = 2

    def __iter__(self) -> Iterator[int]:
        return iter([1, 3])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("size", [1, 2])
def test_the_order_of_a_loader_that_shares_already_or_cannot_share_is_left_alone(size: int) -> None:
    loaders = [
        DataLoader(range(8), sampler=KnowsRanks()),
        DataLoader(range(8), batch_sampler=BatchSampler(KnowsRanks(), 2, False)),
        DataLoader(Stream(), batch_size=2),
    ]
    with acting_as(0, size):
        for loader in loaders:
            prepared = prepare_data_loader(loader)
            assert (prepared.sampler, prepared.batch_sampler) == (loader.sampler, loader.batch_sampler)
            assert plainly(prepared) == plainly(loader)
        plain = DataLoader(range(8), shuffle=True)
        assert prepare_data_loader(plain, add_dist_sampler=False).sampler is plain.sampler
        once = prepare_data_loader(plain)
        twice = prepare_data_loader(once)
    assert len(twice) == len(once) == 8 // size
    assert len(plain) == 8
    assert len(list(twice)) == 8 // size


# -- the loader's other sides ------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "batch_size": 3, "shuffle": True, "collate_fn": tuple, "pin_memory": True, "drop_last": True,
    "worker_init_fn": print, "generator": torch.Generator(),
}  # fmt: skip
OF_WORKERS: dict[str, Any] = {
    "num_workers": 2, "timeout": 9, "multiprocessing_context": "spawn", "prefetch_factor": 4,
    "persistent_workers": True,
    **({"in_order": False} if "in_order" in inspect.signature(DataLoader).parameters else {}),  # since torch 2.6
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("given_options", [{}, OPTIONS, OPTIONS | OF_WORKERS])
def test_every_other_option_of_a_loader_is_kept(given_options: dict[str, Any], size: int) -> None:
    before = DataLoader(range(10), **given_options)
    with acting_as(size - 1, size):
        after = prepare_data_loader(before)
    assert isinstance(after, DataLoader)
    assert after is not before
    lost = [name for name in vars(before) if getattr(after, name) is not getattr(before, name)]
    assert sorted(lost) == ["batch_sampler", "sampler"]
    assert before.sampler is not after.sampler
    for name in ("batch_size", "drop_last"):
        assert getattr(after.batch_sampler, name) == getattr(before.batch_sampler, name)


class Tagged(DataLoader[Any]):
    """A loader of the user's, whose constructor is its own."""

    def __init__(self, tag: str) -> None:
        super().__init__(range(6), batch_size=2)
        self.tag = tag

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return ((self.tag, batch) for batch in super().__iter__())


@pytest.mark.parametrize("move", [False, True])
def test_a_loader_of_the_users_class_stays_one(monkeypatch: pytest.MonkeyPatch, move: bool) -> None:
    monkeypatch.setattr("distrain.torch.data.get_device", lambda: torch.device("meta"))
    loader = on_every_rank(2, lambda: Tagged("mine"), move_to_device=move)[1]
    assert isinstance(loader, Tagged)
    assert (type(loader).__module__, type(loader).__name__) == (Tagged.__module__, "Tagged")
    batches = list(loader)
    assert [tag for tag, _ in batches] == ["mine"] * len(loader)
    assert {str(batch.device) for _, batch in batches} == {"meta" if move else "cpu"}


# -- to the device -----------------------------------------------------------------------------------------------------


def test_devices_are_those_of_the_context() -> None:
    with acting_as(0, 1, devices=(3, 5)):
        assert [str(device) for device in get_devices()] == ["cuda:3", "cuda:5"]
        assert str(get_device()) == "cuda:3"
    with acting_as(0, 1):
        assert [str(device) for device in get_devices()] == ["cpu"]
    with pytest.raises(RuntimeError, match="only works inside a worker"):
        get_device()


pair = namedtuple("pair", "left right")


class Encoding(UserDict[str, Any]):
    """As in transformers: a mapping that moves itself."""

    def __init__(self, data: dict[str, Any], tag: str) -> None:
        super().__init__(data)
        self.tag = tag

    def to(self, device: torch.device) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()}, self.tag)


class Graph:
    """As in PyG: an object that moves itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


def nested_batch() -> dict[str, Any]:
    lists = defaultdict(list, {"a": [torch.ones(1)]})
    return {
        "tensor": torch.ones(2),
        "list": [torch.zeros(1), ("text", pair(torch.ones(1), 3))],
        "ordered": OrderedDict(x=torch.ones(1)),
        "default": lists,
        "encoding": Encoding({"x": torch.ones(1)}, "tag"),
        "graph": Graph(torch.ones(1)),
        "rest": ["text", 1, 2.0, None, b"bytes"],
        "class": OrderedDict,
    }


def check_moved(batch: dict[str, Any], device: str) -> None:
    nested, (text, moved_pair) = batch["list"]
    assert (text, moved_pair.right, type(moved_pair)) == ("text", 3, pair)
    tensors = [batch["tensor"], nested, moved_pair.left, batch["ordered"]["x"], batch["default"]["a"][0]]
    tensors += [batch["encoding"]["x"], batch["graph"].x]
    assert {str(tensor.device) for tensor in tensors} == {device}
    kinds = [type(batch[name]) for name in ("ordered", "default", "encoding", "graph")]
    assert kinds == [OrderedDict, defaultdict, Encoding, Graph]
    assert batch["encoding"].tag == "tag"
    assert batch["rest"] == ["text", 1, 2.0, None, b"bytes"]
    assert batch["class"] is OrderedDict


def test_batches_are_moved_whatever_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distrain.torch.data.get_device", lambda: torch.device("meta"))
    given_batch = nested_batch()
    with acting_as(0, 1):
        loader = prepare_data_loader(DataLoader([given_batch] * 2, collate_fn=lambda items: items[0]))
        again = prepare_data_loader(loader)
        kept = prepare_data_loader(DataLoader([given_batch], collate_fn=lambda items: items[0]), move_to_device=False)
    assert len(loader) == 2
    for batch in [*loader, *again]:
        check_moved(batch, "meta")
    check_moved(next(iter(kept)), "cpu")
    check_moved(given_batch, "cpu")  # nothing was changed in place


def test_a_batch_that_is_none_does_not_end_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distrain.torch.data.get_device", lambda: torch.device("meta"))
    with acting_as(0, 1):
        loader = prepare_data_loader(DataLoader([0, 1, 2], collate_fn=lambda items: items[0] or None))
    assert list(loader) == [None, 1, 2]


# -- classes of the user's script ------------------------------------------------------------------------------------

CLASSES_OF_MAIN = """
import sys, tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
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

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)

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


@sampled
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_workers_and_their_data_loader_workers_know_the_scripts_classes(
    user_script: UserScript, start_method: str
) -> None:
    run = user_script(CLASSES_OF_MAIN, start_method)
    assert run.returncode == 0, run.stderr
    batches = "[[0, 1, 4, 9], [16, 25, 36, 49]]"
    kinds = [f"[rank 0] {kind} {batches}" for kind in ("fork", "spawn", "forkserver")]
    assert run.stdout.splitlines() == [*kinds, "True True torch.Size([1])"]
    assert "Traceback" not in run.stderr


# -- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu(2))])
def test_a_worker_per_gpu_talks_nccl(storage: Path, workers: int) -> None:
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

    assert fit_on_gpus(train, storage, workers) == {
        "total": workers,
        "backend": "nccl",
        "devices": [f"cuda:{index}" for index in range(workers)],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("auto_transfer", [True, False])
def test_batches_are_moved_to_the_gpu(storage: Path, auto_transfer: bool) -> None:
    def train() -> None:
        data = [nested_batch()] * 3
        loader = prepare_data_loader(DataLoader(data, collate_fn=lambda items: items[0]), auto_transfer=auto_transfer)
        for batch in loader:
            check_moved(batch, str(get_device()))
        nones = DataLoader([0, 1, 2], collate_fn=lambda items: items[0] or None)
        assert list(prepare_data_loader(nones, auto_transfer=auto_transfer)) == [None, 1, 2]

    fit_on_gpus(train, storage, 1)


@pytest.mark.gpu
def test_batches_copied_ahead_arrive_whole(storage: Path) -> None:
    """The memory of a batch must not be given to the next one while kernels still read it."""

    def train() -> list[Any]:
        data = [torch.full((1 << 20,), float(index)) for index in range(60)]
        loader = prepare_data_loader(DataLoader(data, batch_size=2, pin_memory=True))
        weights = torch.rand(2048, 2048, device=get_device())
        sums = []
        for batch in loader:
            for _ in range(20):
                weights = weights @ weights / 2048  # the stream is busy
            sums.append(batch.mean(dim=1))
        return torch.cat(sums).tolist()

    expected = [float(index) for index in range(60)]
    assert fit_on_gpus(train, storage, 1) == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
def test_two_workers_can_share_a_gpu(storage: Path) -> None:
    """And train together, over the backend that is chosen for them."""

    def train() -> list[Any]:
        import torch
        from torch import distributed as dist

        devices: list[Any] = [None, None]
        dist.all_gather_object(devices, str(get_device()))
        total = torch.ones(1, device=get_device())
        dist.all_reduce(total)
        model = prepare_model(torch.nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), 1.0 + dist.get_rank(), device=get_device())).sum().backward()
        gradient = next(model.parameters()).grad.item()
        return [devices, total.item(), dist.get_backend(), type(model).__name__, gradient]

    expected = [["cuda:0", "cuda:0"], 2.0, "gloo", "DistributedDataParallel", 1.5]
    assert fit_on_gpus(train, storage, 2, 0.5) == expected
