"""The stand-in for Ray is present during these tests, and absent for all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distrain.as_ray.importing import activate
from tests.stand_in import leave

if TYPE_CHECKING:
    from collections.abc import Iterator

leave()


@pytest.fixture(autouse=True)
def _stand_in() -> Iterator[None]:
    activate()
    yield
    leave()
