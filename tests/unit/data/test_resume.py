"""Rows that were committed and rows of the resumed run are exactly an epoch, however often and whereever it resumes.

The ranks are objects in one process. Each gets a pickled copy of the dataset, as in a real run.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distrain import data
from distrain.data.constructors import as_dataset
from distrain.data.iterator import DataIterator
from distrain.data.passes import Worker
from distrain.data.sources import MemorySource
from distrain.errors import DataError
from distrain.storage.commit import other_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from distrain.data.dataset import Dataset

ROWS = 67


class Items(torch.utils.data.Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, place: int) -> dict[str, int]:
        return {"id": place}


class Stateless(torch.utils.data.IterableDataset[dict[str, int]]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter([{"id": place} for place in range(ROWS)])


class Stateful(Stateless):
    """As in many libraries, a loop over it begins where the one before was left."""

    def __init__(self) -> None:
        self.rows = super().__iter__()

    def __iter__(self) -> Iterator[dict[str, int]]:
        return self.rows

    def load_state_dict(self, state: Any) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet")
    for name, (start, stop) in {"a": (0, 20), "b": (20, 21), "c": (21, ROWS)}.items():
        pq.write_table(pa.table({"id": range(start, stop)}), path / f"{name}.parquet", row_group_size=7)
    pd.DataFrame({"id": range(ROWS)}).to_csv(path / "all.csv", index=False)
    return path


def _huggingface(*, streamed: bool) -> Any:
    import datasets

    whole = datasets.Dataset.from_dict({"id": list(range(ROWS))})
    return whole.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=5) if streamed else whole


def _plain_stream() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"id": list(range(ROWS))}).to_iterable_dataset(num_shards=3)


def generate() -> Iterator[dict[str, int]]:
    yield from ({"id": place} for place in range(ROWS))


def is_even(row: dict[str, int]) -> bool:
    return row["id"] % 2 == 0


def halves(row: dict[str, int]) -> list[dict[str, int]]:
    return [{"id": 2 * row["id"]}, {"id": 2 * row["id"] + 1}] if row["id"] % 3 else []


def even_rows(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"][batch["id"] % 2 == 0]}


ALL = frozenset(range(ROWS))
FIRST = frozenset(range(50))
EVEN = frozenset(range(0, ROWS, 2))
HALVES = frozenset(half["id"] for place in range(ROWS) for half in halves({"id": place}))
SOURCES: dict[str, tuple[Callable[[Path], Dataset], frozenset[int] | None]] = {
    "parquet": (lambda folder: data.read_parquet(folder), ALL),
    "parquet windows": (lambda folder: data.read_parquet(folder).random_shuffle(seed=3, buffer_rows=10), ALL),
    "parquet limited": (lambda folder: data.read_parquet(folder).limit(50).random_shuffle(buffer_rows=9), FIRST),
    "parquet filtered": (lambda folder: data.read_parquet(folder).filter(is_even).random_shuffle(buffer_rows=9), EVEN),
    "parquet split": (lambda folder: data.read_parquet(folder).train_test_split(0.3, shuffle=True)[0], None),
    "parquet remade": (lambda folder: data.read_parquet(folder).flat_map(halves).random_shuffle(buffer_rows=9), HALVES),
    "csv": (lambda folder: as_dataset(str(folder / "*.csv"), "csv").random_shuffle(buffer_rows=16), ALL),
    "range filtered": (lambda folder: data.range(ROWS).filter(is_even).random_shuffle(), EVEN),
    "range remade": (lambda folder: data.range(ROWS).map_batches(even_rows, keeps_rows=None).random_shuffle(), EVEN),
    "torch": (lambda folder: as_dataset(Items(), "torch").random_shuffle(), ALL),
    "huggingface": (lambda folder: as_dataset(_huggingface(streamed=False), "huggingface").random_shuffle(), ALL),
    "huggingface stream": (lambda folder: as_dataset(partial(_huggingface, streamed=True), "hf"), ALL),
    "huggingface windows": (lambda folder: data.from_huggingface(_plain_stream()).random_shuffle(buffer_rows=9), ALL),
    "stateful stream": (lambda folder: as_dataset(Stateful, "stream"), ALL),
    "stateless stream": (lambda folder: as_dataset(Stateless(), "stream").random_shuffle(buffer_rows=9), ALL),
    "filtered generator": (lambda folder: as_dataset(generate, "generator").filter(is_even), EVEN),
}  # fmt: skip


def iterators(dataset: Dataset, ranks: int, start: dict[int, Any]) -> list[DataIterator]:
    copies = [cloudpickle.loads(cloudpickle.dumps(dataset)) for _ in range(ranks)]
    return [
        DataIterator(copies[rank], name="x", worker=Worker(rank, ranks), rank=rank, start=start)
        for rank in range(ranks)
    ]


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.parametrize("name", [name for name in SOURCES if "huggingface" not in name])
@settings(max_examples=10, deadline=None, suppress_health_check=CHECKS)
@given(drawn=st.data())
def test_an_epoch_that_resumes_has_every_row(name: str, folder: Path, drawn: st.DataObject) -> None:
    check_epoch(name, folder, drawn)


@pytest.mark.parametrize("name", ["huggingface", "huggingface stream", "huggingface windows"])
@settings(max_examples=3, deadline=None, suppress_health_check=CHECKS)
@given(drawn=st.data())
def test_an_epoch_of_hugging_face_that_resumes_has_every_row(name: str, folder: Path, drawn: st.DataObject) -> None:
    """Opening one of its datasets takes long."""
    check_epoch(name, folder, drawn)


def check_epoch(name: str, folder: Path, drawn: st.DataObject) -> None:
    make, expected = SOURCES[name]
    dataset = make(folder)
    start: dict[int, Any] = {}
    seen: list[int] = []
    most_ranks = 1
    ended = False
    while not ended:
        ranks, size, prefetch = (drawn.draw(st.integers(*limits)) for limits in ((1, 4), (1, 9), (0, 3)))
        most_ranks = max(ranks, most_ranks)
        parts = iterators(dataset, ranks, start)
        loops = [iter(part.iter_batches(batch_size=size, prefetch_batches=prefetch)) for part in parts]
        for _ in range(drawn.draw(st.integers(1, 12))):
            batches = [next(loop, None) for loop in loops]
            if batches[0] is None:
                assert batches == [None] * ranks, "all ranks have the same number of batches"
                ended = True
                break
            ids = [batch["id"].tolist() for batch in batches]
            assert len({len(own) for own in ids}) == 1, "of the same size"
            seen += [row for own in ids for row in own]
        positions = [json.loads(json.dumps(part.position())) for part in parts]
        assert all(position == positions[0] for position in positions)
        assert positions[0]["epoch"] == ended
        start = {0: positions[0]}
    counts = Counter(seen)
    assert max(counts.values()) == 1
    if expected is not None:
        assert set(counts) <= expected
        assert len(set(counts)) >= len(expected) - (most_ranks - 1)


def test_an_epoch_of_as_many_ranks_has_the_same_batches_when_it_resumes(folder: Path) -> None:
    dataset = data.read_parquet(folder).random_shuffle(seed=1, buffer_rows=20)

    def epoch(start: dict[int, Any], most: int = 100) -> tuple[list[list[list[int]]], Any]:
        parts = iterators(dataset, 3, start)
        loops = [iter(part.iter_batches(batch_size=4)) for part in parts]
        steps = itertools.islice(zip(*loops, strict=True), most)
        batches = [[batch["id"].tolist() for batch in step] for step in steps]
        return batches, json.loads(json.dumps(parts[0].position()))

    whole, _ = epoch({})
    first, position = epoch({}, most=2)
    rest, _ = epoch({0: position})
    assert first + rest == whole


def test_a_rank_of_undivided_data_goes_on_with_its_own_rows() -> None:
    first = [DataIterator(data.range(20), name="x", worker=Worker(0, 1), rank=rank) for rank in (0, 1)]
    loops = [iter(part.iter_batches(batch_size=2)) for part in first]
    for loop, count in zip(loops, (2, 5), strict=True):
        assert len([next(loop) for _ in range(count)]) == count
    start = {rank: json.loads(json.dumps(first[rank].position())) for rank in (0, 1)}
    for rank, row in ((0, 4), (1, 10)):
        part = DataIterator(data.range(20), name="x", worker=Worker(0, 1), rank=rank, start=start)
        assert next(iter(part.iter_batches()))["id"][0] == row


def test_epochs_differ_and_each_has_every_row() -> None:
    (part,) = iterators(data.range(50).random_shuffle(seed=1), 1, {})
    batches = part.iter_batches(batch_size=50)
    epochs = [next(iter([batch["id"].tolist() for batch in batches])) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
    assert len(set(map(tuple, epochs))) == 3
    assert part.epoch == 3


def test_after_the_last_row_the_loop_of_that_epoch_ends_and_the_next_one_begins() -> None:
    """A checkpoint in the body of the loop, after the last batch, belongs to that epoch still."""
    (part,) = iterators(data.range(10), 1, {})
    loop = iter(part.iter_batches(batch_size=5))
    next(loop), next(loop)
    inside = json.loads(json.dumps(part.position()))
    assert next(loop, None) is None
    (resumed,) = iterators(data.range(10), 1, {0: inside})
    assert resumed.epoch == 0
    assert list(resumed.iter_batches()) == []
    assert resumed.epoch == 1
    assert len(next(iter(resumed.iter_batches()))["id"]) == 10

    (after,) = iterators(data.range(10), 1, {0: part.position()})
    assert after.epoch == 1
    assert len(next(iter(after.iter_batches()))["id"]) == 10


def test_a_look_at_one_batch_is_no_epoch() -> None:
    (part,) = iterators(data.range(10), 1, {})
    loop = iter(part.iter_batches(batch_size=4))
    next(loop), next(loop)
    (resumed,) = iterators(data.range(10), 1, {0: part.position()})
    looked = next(iter(resumed.iter_batches(batch_size=1)))
    assert looked["id"].tolist() == [8]
    assert [batch["id"].tolist() for batch in resumed.iter_batches()] == [[8, 9]]


def test_a_loop_that_is_left_is_an_epoch() -> None:
    """A position after it is the beginning of the next epoch, as the next loop of the same run would be."""
    (part,) = iterators(data.range(10), 1, {})
    for number, _ in enumerate(part.iter_batches(batch_size=3)):
        if number == 1:
            inside = part.position()
            break
    after = part.position()
    assert (part.epoch, after["epoch"], inside["epoch"]) == (1, 1, 0)
    for position, rows in (inside, [6, 7, 8, 9]), (after, list(range(10))):
        (resumed,) = iterators(data.range(10), 1, {0: position})
        assert [row for batch in resumed.iter_batches() for row in batch["id"]] == rows


def test_a_checkpoint_after_an_exception_has_the_place_in_the_loop() -> None:
    (part,) = iterators(data.range(10), 1, {})
    try:
        for number, _ in enumerate(part.iter_batches(batch_size=3)):
            if number == 1:
                raise KeyError
    except KeyError:
        inside = part.position()
    (resumed,) = iterators(data.range(10), 1, {0: inside})
    assert [row for batch in resumed.iter_batches() for row in batch["id"]] == [6, 7, 8, 9]
    assert part.position()["epoch"] == part.epoch == 1


def test_only_the_first_loop_can_be_a_look() -> None:
    """Else epochs of one batch would never end."""
    (part,) = iterators(data.range(10), 1, {})
    for _ in range(3):
        next(iter(part.iter_batches(batch_size=3)))
    assert part.epoch == 2


def pair(start: dict[str, dict[int, Any]], rank: int = 0, ranks: int = 1) -> dict[str, DataIterator]:
    """A dataset to train on, and one to validate, as a worker has them."""
    parts: dict[str, DataIterator] = {}
    for name in ("train", "val"):
        parts[name] = DataIterator(
            data.range(12),
            name=name,
            worker=Worker(rank, ranks),
            start=start.get(name),
            others=lambda: [part.loop for part in parts.values() if part.loop],
        )
    return parts


def positions(parts: dict[str, DataIterator]) -> dict[str, dict[int, Any]]:
    return {name: {0: json.loads(json.dumps(part.position()))} for name, part in parts.items()}


def ids(part: DataIterator) -> Iterator[list[int]]:
    for batch in part.iter_batches(batch_size=4):
        yield batch["id"].tolist()


WHOLE = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("steps", [2, 99])
def test_a_checkpoint_in_a_validation_belongs_to_the_epoch_before_it(steps: int) -> None:
    """The training loop of the resumed run is empty, also if it was left after a few steps, and the validation ends."""
    parts = pair({})
    assert parts["train"].epoch == 0
    assert list(itertools.islice(ids(parts["train"]), steps)) == WHOLE[:steps]
    validation = ids(parts["val"])
    assert next(validation) == WHOLE[0]
    inside = positions(parts)
    assert list(validation) == WHOLE[1:]
    after = positions(parts)

    for _ in range(2):
        parts = pair(inside)
        assert parts["train"].epoch == 0
        assert list(ids(parts["train"])) == []
        assert parts["train"].epoch == 1
        validation = ids(parts["val"])
        assert next(validation) == WHOLE[1]
        inside = {**positions(parts), "val": inside["val"]}
    assert list(validation) == WHOLE[2:]
    assert list(ids(parts["train"])) == list(ids(parts["val"])) == WHOLE
    assert [part.epoch for part in pair(after).values()] == [1, 1]


def test_a_loop_that_is_left_for_a_stop_goes_on_in_the_next_run() -> None:
    part = DataIterator(data.range(10), name="x", worker=Worker(0, 1), is_stopping=lambda: True)
    for _ in part.iter_batches(batch_size=3):
        break
    (resumed,) = iterators(data.range(10), 1, {0: part.position()})
    assert [row for batch in resumed.iter_batches() for row in batch["id"]] == list(range(3, 10))


def test_ranks_of_which_one_is_behind_go_on_with_what_each_has_left() -> None:
    """One has taken nothing, or one has ended the epoch already."""
    dataset = data.range(40)
    for counts in (0, 5), (10, 3):
        first = iterators(dataset, 2, {})
        loops = [iter(part.iter_batches(batch_size=2)) for part in first]
        seen = []
        for loop, count in zip(loops, counts, strict=True):
            seen += [row for batch in itertools.islice(loop, count + 1) for row in batch["id"]][: 2 * count]
        if counts[0]:
            assert list(loops[0]) == []
        start = {rank: json.loads(json.dumps(first[rank].position())) for rank in (0, 1)}
        for rank, count in enumerate(counts):
            if count < 10:
                start[rank]["divisions"][-1][2] = 2 * count
        for ranks in (2, 1):
            rest = [list(part.iter_batches(batch_size=1)) for part in iterators(dataset, ranks, start)]
            assert sorted(seen + [row for part in rest for batch in part for row in batch["id"]]) == list(range(40))


def test_one_thread_at_a_time_reads_a_dataset() -> None:
    class Slow(Items):
        readers, most = 0, 0

        def __getitem__(self, place: int) -> dict[str, int]:
            Slow.readers += 1
            Slow.most = max(Slow.most, Slow.readers)
            time.sleep(0.001)
            Slow.readers -= 1
            return {"id": place}

    part = DataIterator(as_dataset(Slow(), "x"), name="x", worker=Worker(0, 1))
    for _ in range(5):
        for number, _ in enumerate(part.iter_batches(batch_size=2, prefetch_batches=8)):
            if number == 2:
                break
    assert Slow.most == 1


def test_a_look_may_have_other_options_than_the_loop() -> None:
    (part,) = iterators(data.range(10), 1, {})
    loop = iter(part.iter_batches(batch_size=2, local_shuffle_buffer_size=5))
    seen = [*next(loop)["id"], *next(loop)["id"]]
    (resumed,) = iterators(data.range(10), 1, {0: part.position()})
    assert len(next(iter(resumed.iter_batches(batch_size=1)))["id"]) == 1
    seen += [row for batch in resumed.iter_batches(local_shuffle_buffer_size=5) for row in batch["id"]]
    assert sorted(seen) == list(range(10))

    (resumed,) = iterators(data.range(10), 1, {0: part.position()})
    with pytest.raises(DataError, match=r"the order was \{'shuffled': 0, 'window': 5, 'seed': 0\}, and is"):
        list(resumed.iter_batches())


def test_a_stream_with_a_state_of_its_own_is_made_anew_for_each_epoch() -> None:
    for prefetch in (0, 2):
        (part,) = iterators(as_dataset(Stateful, "x"), 1, {})
        assert part.schema().names == ["id"]
        assert next(iter(part.iter_batches(batch_size=4, prefetch_batches=prefetch)))["id"].tolist() == [0, 1, 2, 3]
        for _ in range(2):
            batches = part.iter_batches(batch_size=4, prefetch_batches=prefetch)
            assert [row for batch in batches for row in batch["id"]] == list(range(ROWS))
    with pytest.raises(TypeError, match=r"datasets\['x'\] has a state of its own, .*pass a function that makes it"):
        as_dataset(Stateful(), "x")


def test_a_stream_that_is_shorter_than_before() -> None:
    start = {0: {"epoch": 0, "rows": 9, "data": {}, "order": {"shuffled": 0, "window": 0, "seed": 0}}}
    (part,) = iterators(as_dataset(lambda: iter(range(5)), "x"), 1, start)
    with pytest.raises(DataError, match="the stream has ended after 5 rows; the checkpoint was taken after more"):
        list(part.iter_batches())


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def test_batches_move_to_the_device(device: str) -> None:
    (part,) = iterators(data.range(30), 1, {})
    loop = iter(part.iter_torch_batches(batch_size=8, device=device))
    batches = [next(loop) for _ in range(3)]
    assert {batch["id"].device.type for batch in batches} == {device}
    if device == "cuda":
        assert [batch["id"].tolist() for batch in batches] == [list(range(n, n + 8)) for n in (0, 8, 16)]


def test_loops_inside_of_each_other_are_refused() -> None:
    (part,) = iterators(data.range(10), 1, {})
    outer = iter(part.iter_batches(batch_size=2))
    next(outer)
    list(part.iter_batches(batch_size=2))
    with pytest.raises(DataError, match="dataset 'x': a second loop over it has begun inside of this one"):
        next(outer)


def test_objects_are_the_same_data_in_every_process() -> None:
    """Neither their addresses nor the order of a set are."""
    facts = [MemorySource([{"x": object(), "y": {"a", "b", "c"}, "z": 1}]).facts() for _ in range(2)]
    assert facts[0] == facts[1]
    assert facts[0] != MemorySource([{"x": object(), "y": {"a", "b", "c"}, "z": 2}]).facts()


def test_data_that_has_changed(capfd: pytest.CaptureFixture[str]) -> None:
    (part,) = iterators(data.range(10), 1, {})
    loop = iter(part.iter_batches(batch_size=4))
    next(loop)
    start = {0: part.position()}

    def resumed(on_change: str) -> list[list[int]]:
        part = DataIterator(data.range(12), name="x", worker=Worker(0, 1), start=start, on_change=on_change)
        return [batch["id"].tolist() for batch in part.iter_batches()]

    with pytest.raises(DataError) as raised:
        resumed("error")
    assert "dataset 'x': it is not the one of the checkpoint: the data was {'rows': 10" in str(raised.value)
    assert "DataConfig(on_change='restart')" in str(raised.value)
    assert resumed("ignore") == [list(range(4, 12))]
    assert resumed("restart") == [list(range(12))]
    assert "epoch 0 starts from its first row" in capfd.readouterr().err
    list(part.iter_batches())
    start = {0: part.position()}
    assert start[0]["epoch"] == 2
    with pytest.raises(DataError, match="resume=False starts from epoch 0"):
        resumed("error")


def test_streams_that_divide_themselves_are_not_divided_again() -> None:
    """Those of libraries are an error. Of others, the ranks' positions differ, which is seen at a commit."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    whole = datasets.Dataset.from_dict({"x": [*range(8)]}).to_iterable_dataset(num_shards=2)
    halves = [as_dataset(split_dataset_by_node(whole, rank, 2).map(dict), "x") for rank in range(2)]

    class Tars:
        pipeline = (split_by_node,)

        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

    for divided in halves[1], as_dataset(lambda: Tars(), "x"):
        with pytest.raises(DataError, match=r"the stream divides itself by rank, .*DataConfig\(datasets_to_split="):
            list(DataIterator(divided, name="x", worker=Worker(1, 2)).iter_rows())
    own = DataIterator(halves[1], name="x", worker=Worker(0, 1), rank=1)
    assert [row["x"] for row in own.iter_rows()] == [4, 5, 6, 7]
    found = []
    for every in (2, 1):
        parts = [
            DataIterator(
                as_dataset(lambda r=rank, n=every: iter(range(r % n, 80, n)), "x"), name="x", worker=Worker(rank, 2)
            )
            for rank in range(2)
        ]
        for part in parts:
            list(part.iter_batches(batch_size=4))
        found.append(other_data({rank: {"x": part.position()} for rank, part in enumerate(parts)}))
    assert "dataset 'x' is not the same on all ranks: rank 0 reads {'item': " in str(found[0])
    assert found[1] is None


def split_by_node() -> None:
    """As WebDataset calls its function."""
