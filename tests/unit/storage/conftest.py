"""A run directory for the tests of its store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distrain.coordinator.store.local_store import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run"


@pytest.fixture
def store(root: Path) -> Iterator[LocalStore]:
    opened = LocalStore(root)
    yield opened
    opened.close()
