"""Unit tests start no workers: they do without the census of processes that all other tests end with."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def test_run_id() -> str:
    """Takes the place of the fixture in tests/conftest.py."""
    return "unit"
