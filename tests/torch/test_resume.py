"""A prepared loader resumes where a checkpoint was reported: committed and resumed rows are exactly an epoch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from distrain.errors import DataError
from distrain.storage.commit import merged_positions
from distrain.torch import prepare_data_loader
from tests.torch.ranks import acting_as

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrain.worker.session import Session

Make = Callable[[int, int], DataLoader[Any]]


class Ranks:
    """The loaders of all ranks, and their sessions."""

    def __init__(self, ranks: int, make: Make, start: dict[int, Any] | None = None, **options: Any) -> None:
        self.loaders: list[DataLoader[Any]] = []
        self.sessions: list[Session] = []
        self._loops: list[Iterator[Any]] = []
        for rank in range(ranks):
            with acting_as(rank, ranks) as session:
                vars(session)["_positions_at_start"] = {"loader 1": start} if start else {}
                self.loaders.append(prepare_data_loader(make(rank, ranks), **options))
                self.sessions.append(session)

    def take(self, most: int = 1000) -> tuple[list[list[int]], bool]:
        """Take batches from all loaders at once. Return the rows of each step, and whether the pass has ended."""
        loops = self._loops = [iter(loader) for loader in self.loaders]  # kept: a loop that is left is over
        steps = []
        for _ in range(most):
            batches = [next(loop, None) for loop in loops]
            if batches[0] is None:
                assert batches == [None] * len(loops), "all ranks have equally many batches"
                return steps, True
            steps.append([row for batch in batches for row in torch.as_tensor(batch).flatten().tolist()])
        return steps, False

    def positions(self, *, merged: bool = False) -> dict[int, Any]:
        """Those of all ranks; ``merged``: those that a checkpoint keeps."""
        found = {rank: session.positions["loader 1"]() for rank, session in enumerate(self.sessions)}
        if merged:
            kept = merged_positions({rank: {"loader": position} for rank, position in found.items()})["loader"]
            found = {int(rank): position for rank, position in kept.items()}
        return {rank: json.loads(json.dumps(position)) for rank, position in found.items()}


def loader(kind: str, rows: int, size: int, **options: Any) -> Make:
    data = range(rows)
    if kind == "distributed":
        return lambda rank, ranks: DataLoader(data, size, sampler=DistributedSampler(data, ranks, rank), **options)
    if kind == "batches":
        batches = lambda: BatchSampler(RandomSampler(data), size, False)  # noqa: E731
        return lambda rank, ranks: DataLoader(data, batch_sampler=batches(), **options)
    if kind == "custom":
        return lambda rank, ranks: DataLoader(data, size, sampler=list(reversed(data)), **options)
    if kind == "unbatched":
        return lambda rank, ranks: DataLoader(data, batch_size=None, shuffle=True, **options)
    return lambda rank, ranks: DataLoader(data, size, shuffle=kind == "shuffled", **options)


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(["shuffled", "in order", "distributed", "batches", "custom", "unbatched"]),
    st.integers(1, 60),
    st.data(),
)
def test_an_epoch_that_resumes_has_every_row(kind: str, rows: int, drawn: st.DataObject) -> None:
    start: dict[int, Any] = {}
    seen: Counter[int] = Counter()
    ended, most_ranks = False, 1
    while not ended:
        ranks, size = drawn.draw(st.integers(1, 4)), drawn.draw(st.integers(1, 7))
        group = Ranks(ranks, loader(kind, rows, size), start)
        steps, ended = group.take(drawn.draw(st.integers(1, 12)))
        seen.update(row for step in steps for row in step)
        most_ranks = max(ranks, most_ranks)
        positions = group.positions()
        assert all(position == positions[0] for position in positions.values())
        start = {0: positions[0]}
    assert set(seen) == set(range(rows))
    assert sum(seen.values()) - rows < most_ranks, "only padding comes twice"
    assert (positions[0]["epoch"], positions[0]["rows"]) == (1, 0)


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_loader_processes_do_not_matter(options: dict[str, Any]) -> None:
    """Rows that were fetched ahead are not taken. Later epochs are whole."""
    first = Ranks(1, loader("shuffled", 40, 4, **options))
    taken, _ = first.take(3)
    rest_of_first = Ranks(1, loader("shuffled", 40, 4, **options), first.positions())
    assert len(rest_of_first.loaders[0]) == 10
    some, _ = rest_of_first.take(2)
    again = Ranks(1, loader("shuffled", 40, 4), rest_of_first.positions())
    epochs = [again.take() for _ in range(3)]
    rows = [row for step in (*taken, *some, *epochs[0][0]) for row in step]
    assert sorted(rows) == list(range(40))
    for steps, ended in epochs[1:]:
        assert ended
        assert sorted(row for step in steps for row in step) == list(range(40))


@pytest.mark.parametrize("kind", ["shuffled", "in order", "distributed", "batches", "custom"])
def test_a_resumed_pass_pads_with_the_rows_of_an_uninterrupted_one(kind: str) -> None:
    for rows, ranks, size in ((10, 4, 1), (11, 3, 2), (3, 8, 1)):
        whole, _ = Ranks(ranks, loader(kind, rows, size)).take()
        for taken in range(len(whole)):
            first = Ranks(ranks, loader(kind, rows, size))
            begun, _ = first.take(taken)
            rest, _ = Ranks(ranks, loader(kind, rows, size), first.positions()).take()
            assert begun + rest == whole


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_does_not_continue_twice() -> None:
    """Else it would skip the rows before the checkpoint by the sampler, and as many more by its own state."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(rank: int, ranks: int) -> Any:
        return StatefulDataLoader(range(10), batch_size=2)

    first = Ranks(1, make)
    first.take(2)
    state = first.loaders[0].state_dict()  # type: ignore[attr-defined]
    resumed = Ranks(1, make, first.positions()).loaders[0]
    with pytest.raises(RuntimeError, match=r"it continues by itself where the checkpoint was; leave the call out"):
        resumed.load_state_dict(state)  # type: ignore[attr-defined]
    own = Ranks(1, make, first.positions(), resume=False)
    own.loaders[0].load_state_dict(state)  # type: ignore[attr-defined]
    assert own.take()[0] == [[4, 5], [6, 7], [8, 9]]


def test_set_epoch_and_a_look_at_a_batch() -> None:
    group = Ranks(1, loader("shuffled", 20, 4))
    group.loaders[0].sampler.set_epoch(5)
    taken, _ = group.take(2)
    start = group.positions()
    assert (start[0]["epoch"], start[0]["rows"]) == (5, 8)

    resumed = Ranks(1, loader("shuffled", 20, 4), start)
    assert resumed.loaders[0].sampler.epoch == 5
    look, _ = resumed.take(1)
    resumed.loaders[0].sampler.set_epoch(5)
    rest, _ = resumed.take()
    assert rest[0] == look[0], "a look loses nothing"
    assert sorted(row for step in (*taken, *rest) for row in step) == list(range(20))

    other = Ranks(1, loader("shuffled", 20, 4), start)
    other.loaders[0].sampler.set_epoch(6)
    assert len(other.take()[0]) == 5, "another epoch starts from its first row"


def test_a_checkpoint_after_the_last_batch_in_the_loop_keeps_loops_in_step(capfd: pytest.CaptureFixture[str]) -> None:
    group = Ranks(2, loader("shuffled", 20, 5))
    assert not group.take(2)[1]
    resumed = Ranks(2, loader("shuffled", 20, 5), group.positions())
    assert "loader 1 continues in epoch 0 after 20 of 20 rows; resume=False turns this off" in capfd.readouterr().err
    assert resumed.take() == ([], True)
    assert len(resumed.take()[0]) == 2


def test_a_resumed_run_keeps_the_seed() -> None:
    torch.manual_seed(1)
    whole, _ = Ranks(1, loader("shuffled", 20, 4)).take()
    group = Ranks(1, loader("shuffled", 20, 4))
    taken, _ = group.take(2)
    torch.manual_seed(2)
    rest, _ = Ranks(2, loader("shuffled", 20, 2), group.positions()).take()
    assert sorted(row for step in (*taken, *rest) for row in step) == [*range(20)]
    assert [*taken, *map(sorted, rest)] == [*whole[:2], *map(sorted, whole[2:])]


def test_other_data_is_refused() -> None:
    group = Ranks(1, loader("shuffled", 20, 4))
    group.take(2)
    with pytest.raises(
        DataError, match=r"loader 1 is not the one of the checkpoint: it was \{'length': 20.*resume=False"
    ):
        Ranks(1, loader("shuffled", 21, 4), group.positions())
    begun = Ranks(1, loader("shuffled", 21, 4), group.positions(), resume=False)
    assert len(begun.take()[0]) == 6
    assert begun.sessions[0].positions == {}


class Rows(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_with_states_is_asked_for_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(rank: int, ranks: int) -> Any:
        return StatefulDataLoader(Rows(), batch_size=3)

    group = Ranks(2, make)
    assert group.take(2) == ([[0, 1, 2] * 2, [3, 4, 5] * 2], False)
    before = Ranks(2, make, group.positions(merged=True)).take()
    assert before == ([[6, 7, 8] * 2, [9] * 2], True)
    next(group._loops[1])  # each rank has a state of its own
    resumed = Ranks(2, make, group.positions(merged=True))
    assert [next(iter(loader)).tolist() for loader in resumed.loaders] == [[6, 7, 8], [9]]
    resumed = Ranks(2, make, group.positions(merged=True))
    assert len(Ranks(2, make, resumed.positions(merged=True)).take(1)[0]) == 1, "a position that was not used is kept"
    with pytest.raises(DataError, match="has a state for each of 2 workers, and cannot continue with 1; resume=False"):
        Ranks(1, make, group.positions(merged=True))
    capfd.readouterr()
    of_one_rank = Ranks(2, make, {0: group.positions(merged=True)[0]})
    assert "starts its epoch again: report the checkpoint on every rank" in capfd.readouterr().err
    whole, has_ended = of_one_rank.take()
    assert len(whole) == 4
    assert has_ended
    assert len(Ranks(2, make, of_one_rank.positions(merged=True)).take()[0]) == 4, "the next epoch has all rows"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_epochs_after_a_resumed_one_of_hugging_face_are_whole(options: dict[str, Any]) -> None:
    """Its streams begin each pass at the state that they were given (huggingface/datasets#7447)."""
    import datasets
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(rank: int, ranks: int) -> Any:
        rows = datasets.Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset()
        return StatefulDataLoader(rows, batch_size=4, collate_fn=lambda rows: [row["x"] for row in rows], **options)

    whole, _ = Ranks(1, make).take()
    first = Ranks(1, make)
    assert first.take(2)[0] == whole[:2]
    resumed = Ranks(1, make, first.positions())
    assert resumed.take() == (whole[2:], True)
    assert resumed.take(3) == (whole[:3], False)
    again = Ranks(1, make, resumed.positions())
    assert [again.take()[0] for _ in range(3)] == [whole[3:], whole, whole]


def test_a_loader_that_is_prepared_in_each_epoch_cannot_resume_in_one(capfd: pytest.CaptureFixture[str]) -> None:
    with acting_as(0, 1):
        for _ in range(3):
            list(prepare_data_loader(DataLoader(range(10), 2)))
    assert capfd.readouterr().err.count("a loader was prepared again after its first epoch") == 1


@pytest.mark.parametrize("stopped", [False, True])
def test_a_loop_that_is_left_is_an_epoch_unless_the_run_is_stopped(stopped: bool) -> None:
    group = Ranks(1, loader("in order", 10, 2))
    for number, _ in enumerate(group.loaders[0]):
        group.sessions[0]._stop_at = 0 if stopped else math.inf
        if number == 1:
            break
    assert (group.positions()[0]["epoch"], group.positions()[0]["rows"]) == ((0, 4) if stopped else (1, 0))
