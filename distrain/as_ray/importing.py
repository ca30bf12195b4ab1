"""Make the modules of the stand-in, by the table: what ``import ray`` does. Runs in: anywhere."""

from __future__ import annotations

import builtins
import functools
import importlib.util
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from distrain.api.ray_names import AS_RAY
from distrain.as_ray.sentences import why
from distrain.as_ray.table import MODULES


def activate() -> None:
    """Let this process, and those that it starts, import the stand-in. Raises ImportError if Ray is imported."""
    loaded = sys.modules.get("ray")
    if loaded is not None and not isinstance(loaded, StandIn):
        raise ImportError(
            "Ray itself is already imported, and a process can have Ray or distrain's stand-in, not both: import "
            f"distrain.as_ray before ray, or leave it out (and {AS_RAY} unset) to keep Ray"
        )
    os.environ[AS_RAY] = "1"
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
        importlib.util.find_spec = _without_ray(importlib.util.find_spec)
        builtins.ray = StandIn("ray")  # type: ignore[attr-defined] # for Ray's guides, some of which lack the import


def is_of_ray(name: str) -> bool:
    """Tell the name of Ray, and of a module in it, from other modules'."""
    return name.partition(".")[0] == "ray"


def _without_ray(find_spec: Any) -> Any:
    """Return a find_spec() that finds no Ray.

    Libraries such as transformers ask it if Ray is installed, which it is not, and would then use Ray's other parts.
    An ``import`` does not ask it.
    """

    @functools.wraps(find_spec)
    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if is_of_ray(name) else find_spec(name, package)

    return find


# -- names -----------------------------------------------------------------------------------------------------------


@functools.cache
def module_names() -> frozenset[str]:
    """Return the names of all modules of the stand-in: those of the table, and their packages."""
    parts = [name.split(".") for name in MODULES]
    return frozenset(".".join(words[:count]) for words in parts for count in range(1, len(words) + 1))


@functools.cache
def homes_of(module: str) -> dict[str, tuple[str, str]]:
    """Return where each name of a module of Ray comes from: a module, and the name there."""
    entry = MODULES.get(module, {})
    if isinstance(entry, str):
        home = import_module(entry)
        return {name: (entry, name) for name in getattr(home, "__all__", dir(home)) if not name.startswith("__")}
    return {
        name: (home, own or name)
        for home, names in entry.items()
        for name, _, own in (text.partition("=") for text in names.split())
    }


class StandIn(ModuleType):
    """A module of Ray, whose names are looked up when they are first used."""

    def __getattr__(self, name: str) -> Any:
        value = _value(self.__name__, name)
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.__name__,)

    @property
    def __all__(self) -> list[str]:
        return sorted(name for name in homes_of(self.__name__) if not name.startswith("_"))

    def __dir__(self) -> list[str]:
        modules = (name.rpartition(".") for name in module_names())
        below = {name for above, _, name in modules if above == self.__name__}
        return sorted({*vars(self), *homes_of(self.__name__), *below})


def _value(module: str, name: str) -> Any:
    """Return what a name of Ray stands for. Raises AttributeError that says what to do instead."""
    if name in homes_of(module):
        home, own = homes_of(module)[name]
        return getattr(import_module(home), own)
    if f"{module}.{name}" in module_names():
        return import_module(f"{module}.{name}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}" if name.startswith("__") else why(module, name))


class Finder:
    """The first finder of ``sys.meta_path``: it finds the modules of the stand-in, and is their loader."""

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of Ray, None for others. Raises ModuleNotFoundError that says what to do."""
        if not is_of_ray(fullname):
            return None
        if fullname not in module_names():
            module, _, name = fullname.rpartition(".")
            raise ModuleNotFoundError(why(module, name))
        return ModuleSpec(fullname, cls, origin="distrain", is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> StandIn:
        """Make a module, empty as yet."""
        return StandIn(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Leave the names to their first use."""
