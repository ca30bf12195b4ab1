"""Unit tests start no workers: they do without the census of processes that all other tests end with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from distrain.coordinator.store.run_store import RunStore
    from distrain.storage.commit import Commit
    from distrain.storage.records import CommittedCheckpoint


@pytest.fixture(autouse=True)
def test_run_id() -> str:
    """Takes the place of the fixture in tests/conftest.py."""
    return "unit"


def commit_now(store: RunStore, commit: Commit, attempt: int = 0, **options: Any) -> CommittedCheckpoint:
    """Commit with a store that has no loop, which does it at once. Raises OSError if it fails."""
    committed: list[CommittedCheckpoint] = []

    def fail(why: str) -> None:
        raise OSError(why)

    store.on_failure = fail
    store.commit(attempt, commit, then=committed.append, **options)
    return committed[0]
