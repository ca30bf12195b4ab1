"""The stand-in for Ray in the process of the tests: present during these tests, absent for all others."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import pytest

_find_spec = importlib.util.find_spec

from distrain.as_ray.importing import Finder, activate  # noqa: E402 - it replaces the function

if TYPE_CHECKING:
    from collections.abc import Iterator


def leave() -> None:
    sys.meta_path.remove(Finder)  # type: ignore[arg-type]
    importlib.util.find_spec = _find_spec
    os.environ.pop("DISTRAIN_AS_RAY", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        del sys.modules[name]


leave()


@pytest.fixture(autouse=True)
def _stand_in() -> Iterator[None]:
    activate()
    yield
    leave()
