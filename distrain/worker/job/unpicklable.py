"""The search for the part of a value that cannot be pickled. Runs in: coordinator, worker."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Mapping

from distrain.system.pickling import pickled

_DEEPEST_SEARCH = 6
_MOST_ITEMS = 100
"""Largest collection whose items are searched one by one."""

NamedValue = tuple[str, object]
"""A value and the path to it, for error messages."""


def can_pickle(value: object) -> bool:
    """Tell if :func:`pickled` works for the value."""
    try:
        pickled(value)
    except Exception:
        return False
    return True


def find_unpicklable(parts: Iterable[NamedValue]) -> NamedValue | None:
    """Return the innermost value that cannot be pickled, with the path to it; None if all parts can be pickled."""
    found: NamedValue | None = None
    for _ in range(_DEEPEST_SEARCH):
        culprit = next((part for part in parts if not can_pickle(part[1])), None)
        if culprit is None:
            break
        found = culprit
        parts = parts_of(*culprit)
    return found


def describe_unpicklable(name: str, value: object) -> str:
    """Return the path to the innermost part that cannot be pickled, and its type. Raises nothing."""
    path, culprit = name, value
    with contextlib.suppress(Exception):  # a __repr__ or a property of the user's
        path, culprit = find_unpicklable([(name, value)]) or (name, value)
    return f"{path} ({type(culprit).__module__}.{type(culprit).__qualname__})"


def parts_of(path: str, value: object) -> Iterator[NamedValue]:
    """Yield the values that ``value`` holds, each with its path below ``path``."""
    return ((f"{path}{suffix}", part) for suffix, part in _parts(value))


def _parts(value: object) -> Iterator[NamedValue]:
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield " -> its object", value.__self__
    elif isinstance(value, (Mapping, list, tuple, set, frozenset)) and len(value) > _MOST_ITEMS:
        return
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, type):
        yield from ((f".{name}", item) for name, item in vars(value).items())
    else:
        yield from _parts_of_object(value)


def _parts_of_function(function: types.FunctionType) -> Iterator[NamedValue]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f" -> variable {name!r}", _cell_contents(cell)
    for name in sorted(global_names(function.__code__)):
        if name in function.__globals__:
            yield f" -> global {name!r}", function.__globals__[name]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from ((f" -> default {default!r:.40}", default) for default in defaults)


def _parts_of_object(value: object) -> Iterator[NamedValue]:
    if type(value).__name__ == "partial":
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name))
    names = dict.fromkeys((*getattr(value, "__dict__", {}), *slots))
    yield from ((f".{name}", getattr(value, name, None)) for name in names)


def _cell_contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def global_names(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in a function, and in the functions within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return names
