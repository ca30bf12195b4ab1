"""The origins of modules: this interpreter, editable installations, and other files. Runs in: coordinator."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from functools import cache
from importlib.machinery import all_suffixes
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the directories that pip and Debian install packages in."""


# -- the interpreter -------------------------------------------------------------------------------------------------


def is_library(path: str) -> bool:
    """Tell if a file or an entry of sys.path is of the standard library, or of packages that were installed.

    Another interpreter has its own in place of these.
    """
    path = os.path.normpath(path)
    is_zipped = re.fullmatch(r"python\d+\.zip", os.path.basename(path)) is not None  # the standard library as one file
    return is_zipped or f"{path}/".startswith(_library_places()) or not _INSTALLED.isdisjoint(path.split("/"))


def belongs_to_interpreter(path: str) -> bool:
    """Tell if a file or an entry of sys.path isn't the user's: a library, a program, or the place of IPython."""
    return is_library(path) or f"{path}/".startswith(_program_places()) or os.path.basename(path) == ".ipython"


@cache
def _library_places() -> tuple[str, ...]:
    return _places(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


@cache
def _program_places() -> tuple[str, ...]:
    """Return the directories of the interpreter and of programs that come with packages.

    Such a program has its directory first on sys.path.
    """
    user = sysconfig.get_preferred_scheme("user")
    return _places(os.path.dirname(sys.executable), sysconfig.get_path("scripts"), sysconfig.get_path("scripts", user))


def _places(*folders: str) -> tuple[str, ...]:
    """Return directories and what links in their paths lead to, each with a slash at its end."""
    return tuple({f"{place}/" for folder in folders if folder for place in (folder, os.path.realpath(folder))})


# -- imported modules ------------------------------------------------------------------------------------------------


def files_of(modules: Mapping[str, ModuleType]) -> Iterator[str]:
    """Yield the files that modules come from."""
    for _, contents in _contents_of(modules):
        file = contents.get("__file__")
        if isinstance(file, str) and os.path.isabs(file):
            yield os.path.normpath(file)


def editable_installs(modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, str]]:
    """Yield what setuptools has installed to be imported from the user's directories. Its finders are modules.

    Yield the path of each package or module, and the directory to import it from.
    """
    for finder, contents in _contents_of(modules):
        if not (finder.startswith("__editable___") and finder.endswith("_finder")):
            continue
        mapping = contents.get("MAPPING")
        for name, path in mapping.items() if isinstance(mapping, dict) else ():
            parts = "/" + name.replace(".", "/")  # several in a namespace package
            folder = path.removesuffix(parts) if path.endswith(parts) else os.path.dirname(path)
            places = [path] if os.path.isdir(path) else [os.path.splitext(path)[0] + end for end in all_suffixes()]
            yield from ((place, folder) for place in places if os.path.exists(place))


def _contents_of(modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, dict[str, object]]]:
    for name, module in modules.items():
        if isinstance(module, ModuleType):
            # Anything else would make importlib's LazyLoader import the module.
            yield name, object.__getattribute__(module, "__dict__")
