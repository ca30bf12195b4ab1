"""Names of Ray that are plain values here. Runs in: anywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

from distrain.api import config

__version__ = "2.60.0"
"""The version of Ray whose names and arguments these are."""

TRAIN_DATASET_KEY = "train"
ValidationFn = Callable[..., dict[str, Any]]


class WithoutEffect:
    """Options of Ray about what it does elsewhere, or in the background: they may be set, and have no effect."""

    execution_options = cached_property(lambda _: WithoutEffect())
    resource_limits = cached_property(lambda _: WithoutEffect())

    def __init__(self, *args: object, **options: object) -> None:
        vars(self).update(options)


class DataContext(WithoutEffect):
    """Settings of Ray Data. They may be set, and have no effect."""

    @staticmethod
    @cache
    def get_current() -> DataContext:
        """Return the settings of this process."""
        return DataContext()


class DataConfig(config.DataConfig):
    """``ray.train.DataConfig``."""

    default_ingest_options = WithoutEffect
