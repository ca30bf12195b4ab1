"""Names of Ray that are plain values here. Runs in: anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distrain.system import __version__ as _own_version

__version__ = "2.60.0"
"""The version of Ray whose names and arguments these are."""
__distrain__ = _own_version
"""The version of distrain: the mark by which a program can tell the stand-in from Ray."""

TRAIN_DATASET_KEY = "train"
ValidationFn = Callable[..., dict[str, Any]]


class WithoutEffect:
    """Options of Ray about what it does elsewhere, or in the background: they may be set, and have no effect."""

    def __init__(self, *args: object, **options: object) -> None:
        vars(self).update(options)

    def __getattr__(self, name: str) -> WithoutEffect:
        if name not in ("execution_options", "resource_limits"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        vars(self)[name] = found = WithoutEffect()
        return found
