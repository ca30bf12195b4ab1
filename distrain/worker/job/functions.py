"""The user's functions: which ones can run in a worker, and the call. Runs in: coordinator, worker."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NO_AWAIT = "make it a plain function that calls asyncio.run(...)"
_NO_YIELD = "make it a plain function, which may report() where it yields"
_NOT_PLAIN = (
    (inspect.iscoroutinefunction, "a coroutine", _NO_AWAIT),
    (inspect.isasyncgenfunction, "an asynchronous generator", _NO_AWAIT),
    (inspect.isgeneratorfunction, "a generator", _NO_YIELD),
)
"""Kinds of functions that a call does not run: a test for the function, a name for what it returns, and advice."""


def check_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function if a call with a config, or with nothing, runs it. Raises TypeError or ValueError."""
    if not callable(function):
        raise TypeError(
            f"train_loop_per_worker must be a function (f, not f()), got {function!r} ({type(function).__name__})"
        )
    check_plain("train_loop_per_worker", function)
    required = [p for p in _parameters(function) if p.default is p.empty and p.kind not in _VARIADIC]
    keywords = [p.name for p in required if p.kind is p.KEYWORD_ONLY]
    if len(required) > 1 or keywords:
        names = ", ".join(p.name for p in required)
        raise ValueError(
            f"train_loop_per_worker must take no argument or one (the config); {name_of(function)} requires: {names}. "
            "Put what it needs into train_loop_config, or bind it with functools.partial."
        )
    return function


def check_plain(label: str, function: Callable[..., Any]) -> None:
    """Raise TypeError for a function that a call does not run, also one in a functools.partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    for makes_one, kind, advice in _NOT_PLAIN:
        if makes_one(function) or makes_one(type(function).__call__):
            name = name_of(function)
            raise TypeError(f"{label} must be a plain function, but a call of {name} makes {kind}: {advice}")


def takes_config(function: Callable[..., Any]) -> bool:
    """Return True if the function takes an argument."""
    return any(p.kind is not p.KEYWORD_ONLY and p.kind is not p.VAR_KEYWORD for p in _parameters(function))


def call_with_config(function: Callable[..., Any], config: dict[str, Any]) -> Any:
    """Call the function with the config if it takes an argument, otherwise without. Return its result."""
    return function(config) if takes_config(function) else function()


def name_of(function: object) -> str:
    """Return a name of the function for error messages."""
    return getattr(function, "__qualname__", None) or repr(function)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return []
