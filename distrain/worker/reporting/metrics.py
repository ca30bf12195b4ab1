"""Conversion of the metrics of report() to JSON, with errors that name the metric. Runs in: worker."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_DEEPEST = 100
"""Levels of dicts and lists in metrics; more are taken for a metric that contains itself."""


def encode_metrics(metrics: Mapping[str, Any]) -> bytes:
    """Return metrics as JSON. Raises TypeError or ValueError for a value that cannot be recorded."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"report() takes a dict of metrics, such as {{'loss': 0.5}}, got {metrics!r:.80} ({type(metrics).__name__})"
        )
    return json.dumps(_plain(metrics, "metrics", 0)).encode()


def _plain(value: Any, path: str, depth: int) -> Any:
    """Convert ``value`` to the types of JSON.

    path: names it in errors. depth: the number of collections around it.
    """
    if value is None or type(value) in (bool, float, int):
        return value
    if type(value) is str:
        return _text(value)
    if isinstance(value, (Mapping, list, tuple)):
        if depth == _DEEPEST:
            raise ValueError(f"report(): {path:.80} ... is {_DEEPEST} levels deep; does a metric contain itself?")
        if isinstance(value, Mapping):
            return {_key(key, path): _plain(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
        return [_plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, (bool, int, float, str)):  # their subclasses: numpy.float64, IntEnum, ...
        return _plain(next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), path, depth)
    if callable(getattr(value, "item", None)) and hasattr(value, "shape"):
        return _scalar(value, path, depth)
    if callable(getattr(value, "numpy", None)) and hasattr(value, "shape"):  # TensorFlow's tensors and variables
        return _plain(value.numpy(), path, depth)
    raise TypeError(
        f"report(): {path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be recorded; "
        "metrics are numbers, strings, booleans, None, and dicts and lists of them"
    )


def _scalar(value: Any, path: str, depth: int) -> Any:
    if math.prod(value.shape) != 1:
        raise ValueError(
            f"report(): {path} is a {type(value).__name__} of shape {tuple(value.shape)}; a metric is one number: "
            "reduce it first, for example with .mean(), or report .tolist()"
        )
    item = value.item()
    return _plain(float(item) if type(item) is type(value) else item, path, depth)  # numpy.longdouble gives itself


def _text(text: str) -> str:
    """Return a text that UTF-8 can encode: names of files that are not UTF-8 have lone surrogates (PEP 383)."""
    return text.encode(errors="backslashreplace").decode() if not text.isascii() else text


def _key(key: Any, path: str) -> str:
    if isinstance(key, str):
        return _text(key)
    if isinstance(key, (int, float)):
        return str(key)
    raise TypeError(f"report(): {path} has the key {key!r} ({type(key).__name__}); keys of metrics are strings")
