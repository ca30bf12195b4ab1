"""Metrics as users hand them in -> JSON, or an error that names the culprit. Runs in: worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["encode_metrics"]


def encode_metrics(metrics: Mapping[str, Any]) -> bytes:
    """Metrics as JSON. Raises TypeError or ValueError for what cannot be recorded."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"report() takes a dict of metrics, got {metrics!r:.80} ({type(metrics).__name__})")
    return json.dumps(_plain(metrics, "metrics")).encode()


def _plain(value: Any, path: str) -> Any:
    """``value`` as JSON knows it. ``path`` names it in errors."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {_key(key, path): _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (bool, int, float, str)):  # their subclasses: numpy.float64, IntEnum, ...
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if callable(getattr(value, "item", None)) and hasattr(value, "shape"):
        return _scalar(value, path)
    raise TypeError(
        f"report(): {path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be recorded; "
        "metrics are numbers, strings, booleans, None, and dicts and lists of them"
    )


def _scalar(value: Any, path: str) -> Any:
    count = 1
    for size in value.shape:
        count *= size
    if count != 1:
        raise ValueError(
            f"report(): {path} is a {type(value).__name__} of shape {tuple(value.shape)}; a metric is one number: "
            "reduce it first, for example with .mean(), or report .tolist()"
        )
    return _plain(value.item(), path)


def _key(key: Any, path: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, (int, float)):
        return str(key)
    raise TypeError(f"report(): {path} has the key {key!r} ({type(key).__name__}); keys of metrics are strings")
