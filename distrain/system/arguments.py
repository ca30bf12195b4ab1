"""Checks of the arguments that users give. Runs in: anywhere.

Each check raises TypeError or ValueError. The text names the argument, what it must be, and what was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NAMES_OF_TYPES = {bool: "True or False", dict: "a dict", Mapping: "a dict", str: "a str", Callable: "a function"}


def check_fields(config: object, check: Callable[..., None], *names: str, **options: Any) -> None:
    """Apply a check to attributes of a config, labelled ``ClassName.attribute``."""
    for name in names:
        check(f"{type(config).__name__}.{name}", getattr(config, name), **options)


def check_type(label: str, value: object, kind: Any, allowed: str = "", *, optional: bool = False) -> None:
    """Raise TypeError unless the value is an instance of ``kind``.

    allowed: what the text calls ``kind``; by default it follows from its name.
    optional: None is allowed, too.
    """
    if not (isinstance(value, kind) or (optional and value is None)):
        allowed = allowed or _NAMES_OF_TYPES.get(kind) or _public_name(kind)
        raise TypeError(_text(label, allowed, value, optional=optional))


def _public_name(kind: type) -> str:
    """Return the name under which users import a class: Ray has classes of the same names."""
    package = kind.__module__.rpartition(".")[0]
    return f"a {package}.{kind.__name__}" if package.startswith("distrain") else f"a {kind.__name__}"


def check_int(label: str, value: object, *, minimum: int, optional: bool = False) -> None:
    """Raise TypeError or ValueError unless the value is an int of at least ``minimum``."""
    if optional and value is None:
        return
    allowed = f"an int of at least {minimum}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(_text(label, allowed, value, optional=optional))
    if value < minimum:
        raise ValueError(_text(label, allowed, value, optional=optional))


def check_seconds(
    label: str, value: object, *, minimum: float = 0.0, above_zero: bool = False, optional: bool = False
) -> None:
    """Raise TypeError or ValueError unless the value is a number of seconds.

    above_zero: neither zero nor infinity is allowed.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(_text(label, "a number of seconds", value, optional=optional))
    if above_zero and not 0 < value < math.inf:
        raise ValueError(_text(label, "finite and more than 0 seconds", value, optional=optional))
    if not value >= minimum:
        raise ValueError(_text(label, f"{minimum:g} or more seconds", value, optional=optional))


def check_choice(label: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless the value is one of ``choices``."""
    if value not in choices:
        raise ValueError(_text(label, f"one of {', '.join(map(repr, choices))}", value))


def check_ranks(label: str, value: object) -> None:
    """Raise TypeError or ValueError unless the value is a sequence of ranks, and not empty."""
    allowed = 'ranks, such as [0], "all"'
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(_text(label, allowed, value, optional=True))
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in value):
        raise TypeError(_text(label, allowed, value, optional=True))
    if not value or min(value) < 0:
        raise ValueError(_text(label, allowed, value, optional=True))


def _text(label: str, allowed: str, value: object, *, optional: bool = False) -> str:
    return f"{label} must be {allowed}{' or None' * optional}, got {value!r:.80} ({type(value).__name__})"
