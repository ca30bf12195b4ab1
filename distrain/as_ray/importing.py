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
from distrain.as_ray.table import NAMES, PARTS


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


def _without_ray(find_spec: Any) -> Any:
    """Return a find_spec() that finds no Ray.

    Libraries such as transformers ask it if Ray is installed, which it is not, and would then use Ray's other parts.
    An ``import`` does not ask it.
    """

    @functools.wraps(find_spec)
    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] == "ray" else find_spec(name, package)

    return find


# -- names -----------------------------------------------------------------------------------------------------------


def is_module(name: str) -> bool:
    """Tell if the stand-in has a module: one of the table, one above these, or a part of one."""
    above, _, last = name.rpartition(".")
    return any(f"{listed}.".startswith(f"{name}.") for listed in NAMES) or (last in PARTS.split() and is_module(above))


@functools.cache
def homes_of(module: str) -> dict[str, tuple[str, str]]:
    """Return where each name of a module of Ray comes from: a module, and the name there."""
    words = module.split(".")
    above = [".".join(words[:count]) for count in range(2, len(words) + 1)]
    others = ["ray.train"] if {*words} & {"air", "tune"} else []
    found: dict[str, tuple[str, str]] = {}
    for home, names in (pair for name in [*others, *(above or ["ray"])] for pair in NAMES.get(name, {}).items()):
        origin, _, own = home.partition(":")
        listed = import_module(origin).__all__ if names == "*" else names.split()
        found |= {name: (origin, own or name) for name in listed}
    return found


class StandIn(ModuleType):
    """A module of Ray, whose names are looked up when they are first used."""

    def __getattr__(self, name: str) -> Any:
        """Return what a name of Ray stands for. Raises AttributeError that says what to do instead."""
        module, homes = self.__name__, homes_of(self.__name__)
        if name in homes:
            home, own = homes[name]
            found: Any = getattr(import_module(home), own)
        elif is_module(f"{module}.{name}"):
            found = import_module(f"{module}.{name}")
        else:
            raise AttributeError(
                f"module {module!r} has no attribute {name!r}" if name.startswith("__") else why(module, name)
            )
        setattr(self, name, found)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return [*vars(self), *homes_of(self.__name__)]


class Finder:
    """The first finder of ``sys.meta_path``: it finds the modules of the stand-in, and is their loader."""

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of Ray, None for others. Raises ModuleNotFoundError that says what to do."""
        if fullname.partition(".")[0] != "ray":
            return None
        if not is_module(fullname):
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
