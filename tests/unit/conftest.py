"""Unit tests start no workers: they do without the census of processes that all other tests end with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from distrain import CheckpointConfig
from distrain.decisions.checkpoints.actions import Publish
from distrain.decisions.hearing import handlers_of
from distrain.storage.commit import CommittedCheckpoint, committed, new_manifest

if TYPE_CHECKING:
    from distrain.coordinator.store.run_store import RunStore
    from distrain.storage.commit import Commit


@pytest.fixture(autouse=True)
def test_run_id() -> str:
    """Takes the place of the fixture in tests/conftest.py."""
    return "unit"


def commit_now(store: RunStore, commit: Commit, attempt: int = 0, **options: Any) -> CommittedCheckpoint:
    """Commit with a store that has no loop, which does it at once. Raises OSError if it fails."""
    ledger, saved = store.ledger, list[CommittedCheckpoint]()
    folder, positions = options.pop("folder", None), options.pop("positions", {})
    facts = {"name": None, "step": 0, "progress": None, **options}
    manifest = new_manifest(commit, index=ledger.take_index(), attempt=attempt, time=time.time(), **facts)

    def fail(why: object) -> None:
        raise OSError(why)

    def done(path: Any) -> None:
        saved.append(committed(path, manifest))

    store.publish(Publish(f"{attempt}-{commit.ordinal}", folder, manifest, positions, done, fail))
    ledger.add(*saved)
    return saved[0]


def perform(store: RunStore) -> None:
    """Have the store of a run without a loop do at once what follows from changes of its checkpoints."""

    def do(action: Any) -> None:
        handlers_of(store)[type(action)]("", action)

    store.ledger.emit = do


def delete_oldest(store: RunStore) -> None:
    """Delete the oldest checkpoint, as it is surplus."""
    perform(store)
    newest = store.ledger.all[1:]
    store.ledger.delete_surplus(CheckpointConfig(num_to_keep=1), newest.__contains__)
