"""The search for the part of a value that cannot be pickled. Runs in: coordinator, worker."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator, Mapping
from functools import partial

from distrain.system.pickling import pickled

_DEEPEST_SEARCH = 6
_MOST_ITEMS = 100
"""Largest collection whose items are searched one by one."""

NamedValue = tuple[str, object]
"""A value and the path to it, for error messages."""


def describe_unpicklable(*values: NamedValue) -> str:
    """Return the path to the innermost part of these values that cannot be pickled, and its type. Raises nothing."""
    culprit, parts = values[0], list(values)
    with contextlib.suppress(Exception):  # all can be pickled; or a __repr__ or a property of the user's fails
        for _ in range(_DEEPEST_SEARCH):
            culprit = next(part for part in parts if not _can_pickle(part[1]))
            parts = list(_parts(*culprit))
    path, value = culprit
    return f"{path} ({type(value).__module__}.{type(value).__qualname__})"


def _can_pickle(value: object) -> bool:
    try:
        pickled(value)
    except Exception:
        return False
    return True


def _parts(path: str, value: object) -> Iterator[NamedValue]:
    """Yield the values that ``value`` holds, each with the path to it."""
    if isinstance(value, types.FunctionType):
        used = inspect.getclosurevars(value)
        yield from ((f"{path} -> variable {name!r}", one) for name, one in {**used.globals, **used.nonlocals}.items())
    elif isinstance(value, types.MethodType):
        yield f"{path} -> its object", value.__self__
    elif isinstance(value, partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, Mapping) and len(value) <= _MOST_ITEMS:
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)) and len(value) <= _MOST_ITEMS:
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    else:
        yield from ((f"{path}.{name}", item) for name, item in vars(value).items())
