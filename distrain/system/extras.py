"""Packages that distrain can do without. Runs in: anywhere."""

from __future__ import annotations

import importlib
from typing import Any

_EXTRAS = {"numpy": "data", "pyarrow": "data", "matplotlib": "plot", "plotille": "plot"}
"""The extra of distrain that brings a package."""


def require(module: str) -> Any:
    """Import a module of a package that not everybody has. Raises ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        wanted = f"'distrain[{_EXTRAS[package]}]'" if package in _EXTRAS else package
        raise ImportError(f"{error}; install it with: pip install {wanted}", name=module) from error
