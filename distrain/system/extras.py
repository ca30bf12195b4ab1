"""Packages that distrain can do without. Runs in: anywhere."""

from __future__ import annotations

import importlib
from typing import Any

_IN_DATA = ("numpy", "pyarrow")
"""What the extra ``data`` of distrain brings."""


def require(module: str) -> Any:
    """Import a module of a package that not everybody has. Raises ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        wanted = "'distrain[data]'" if package in _IN_DATA else package
        raise ImportError(f"{error}; install it with: pip install {wanted}", name=module) from error
