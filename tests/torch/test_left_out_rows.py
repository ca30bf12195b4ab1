"""Rows that rollbacks leave out: exactly the bad ones, wherever they are. The attempts run in this process."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

import distrain
from distrain import Rollback
from distrain.api.backend import BackendConfig
from distrain.data.constructors import run_datasets
from distrain.storage.checkpoint import POSITIONS
from distrain.storage.commit import merged_positions
from distrain.torch import prepare_data_loader
from distrain.worker.job.job import Work
from tests.torch.ranks import acting_as

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distrain.worker.session import Session

BATCHES, SIZE = 6, 2
ROWS = [{"id": row} for row in range(BATCHES * SIZE)]
SOURCES: dict[str, Any] = {
    "table": lambda: distrain.data.from_items(ROWS).random_shuffle(seed=3),
    "stream": lambda: lambda: iter(ROWS),
}


class Run:
    """A run of one rank that saves a checkpoint at each step, as its coordinator knows it."""

    def __init__(self, kind: str) -> None:
        self.saved: Any = None
        self.positions: dict[str, Any] = {}
        self.skip_to: dict[str, Any] = {}
        self._kind = kind

    def attempt(self, train: Callable[[Session, Iterable[Any]], None]) -> bool:
        """Run train_func from the last checkpoint. Return whether it has come to its end."""
        with acting_as(0, 1) as session:
            session.started_from = SimpleNamespace(get_metadata=lambda: {POSITIONS: self.positions}, path="")  # type: ignore[assignment]
            session._skip_to = json.loads(json.dumps(self.skip_to))
            if self._kind == "loader":
                batches: Iterable[Any] = prepare_data_loader(DataLoader(range(len(ROWS)), SIZE, shuffle=True))
            else:
                rows = run_datasets({"train": SOURCES[self._kind]()}, "all", on_change="error", resume=True)
                session.work = Work(backend=BackendConfig(), run_datasets=rows)
                batches = session.dataset_shard("train").iter_batches(batch_size=SIZE, prefetch_batches=2)
            try:
                train(session, batches)
            except Rollback:
                self.skip_to |= session.positions_to_skip_to()
                return False
            return True

    def save(self, session: Session, state: Any) -> None:
        self.positions = json.loads(json.dumps(merged_positions({0: session._positions_now()})))
        self.saved, self.skip_to = state, {}


def ids_of(batch: Any) -> list[int]:
    return [int(row) for row in (batch["id"] if isinstance(batch, dict) else batch)]


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("kind", ["loader", *SOURCES])
def test_exactly_the_bad_batches_are_left_out(kind: str, seed: int) -> None:
    dice = random.Random(seed)
    epochs = dice.randint(1, 3)
    places = [(epoch, batch) for epoch in range(epochs) for batch in range(BATCHES)]
    start = dice.randrange(len(places))
    bad = {*places[start : start + dice.randint(1, 3)], *dice.sample(places, dice.randint(0, 3))}
    looks, kept_open = dice.random() < 0.3, dice.random() < 0.3
    run = Run(kind)
    whole: dict[int, list[list[int]]] = {epoch: [] for epoch in range(epochs)}
    Run(kind).attempt(lambda _, batches: [whole[epoch].extend(map(ids_of, batches)) for epoch in whole] and None)

    def train(session: Session, batches: Iterable[Any]) -> None:
        first, seen = run.saved or (0, [])
        for epoch in range(first, epochs):
            if looks and not (seen or run.skip_to):
                next(iter(batches))
            loop = iter(batches)
            for batch in loop:
                if (epoch, whole[epoch].index(ids_of(batch))) in bad:
                    if not kept_open:
                        del loop
                    raise Rollback(skip_batch=True)
                seen = [*seen, (epoch, ids_of(batch))]
                run.save(session, (epoch, seen))

    attempts = 0
    while not run.attempt(train):
        attempts += 1
        assert attempts <= len(bad), "a bad batch has come again"
    used = [(epoch, whole[epoch][batch]) for epoch, batch in places if (epoch, batch) not in bad]
    assert (run.saved or (0, []))[1] == used


def test_without_an_open_loop_all_rows_since_the_checkpoint_are_left_out() -> None:
    """As when on_nan looks at the loss of an epoch, after its loops."""
    with acting_as(0, 1) as session:
        for loader in (prepare_data_loader(DataLoader(range(4))), prepare_data_loader(DataLoader(range(2)))):
            list(loader)
        skip_to = session.positions_to_skip_to()
    assert [(position["epoch"], position["rows"]) for position in skip_to.values()] == [(1, 0), (1, 0)]
