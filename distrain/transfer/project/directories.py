"""Lists of the files in a directory: those that git knows of, or those that can be imported. Runs in: coordinator."""

from __future__ import annotations

import os
import re
import tempfile
from enum import Enum
from typing import TYPE_CHECKING, NoReturn

from distrain.errors import LaunchError
from distrain.system.process import output_of
from distrain.transfer.project.left_out import CODE, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_SKIPPED_IN_PATH = re.compile(rf"(?:^|/)(?:{'|'.join(sorted(_SKIPPED))})/")
_ENVIRONMENT = "pyvenv.cfg"
"""File that makes a directory a virtual environment."""

_GIT = ("git", "ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard")
_UNTRACKED = "?"
"""Git's mark of a file that is neither tracked nor ignored."""


class Wanted(Enum):
    """The files to take of a directory that git does not list: code, also small files, or all."""

    CODE = 1
    SMALL = 2
    ALL = 3


def is_below(path: str, folder: str) -> bool:
    """Tell if a path is that of a directory, or of anything in it."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def holds_more_than_a_project(folder: str) -> bool:
    """Tell if a directory is that of temporary files, the user's home, or above it."""
    real = os.path.realpath(folder)
    return is_below(os.path.realpath(os.path.expanduser("~")), real) or real == os.path.realpath(tempfile.gettempdir())


# -- with git --------------------------------------------------------------------------------------------------------


def repository_of(folder: str) -> str | None:
    """Return the top directory of the repository that a directory is in; None if that holds more than a project."""
    top = _work_tree_of(folder)
    return None if top is None or holds_more_than_a_project(top) else top


def listed_by_git(folder: str) -> list[str] | None:
    """Return the paths of files, links and nested repositories that are not ignored.

    There are none if the directory is in no repository. Return None if git cannot tell.
    """
    if _work_tree_of(os.path.realpath(folder)) is None:  # this costs less than to start git
        return []
    output = output_of(_GIT, folder)
    if output is None:
        return None
    lines = os.fsdecode(output).split("\0")
    # A submodule that is not there is listed as "./" if this is its directory.
    entries = [(line[2:], line[0] != _UNTRACKED) for line in lines if line and line[1:] != " ./"]
    # Not everybody ignores the packages of a virtual environment.
    paths = [path for path, tracked in entries if tracked or not _SKIPPED_IN_PATH.search(path)]
    return [f"{folder}/{path.rstrip('/')}" for path in paths]


def _work_tree_of(folder: str) -> str | None:
    """Return the top directory of what seems to be the work tree of git that a directory is in."""
    while not os.path.lexists(os.path.join(folder, ".git")):
        folder, last = os.path.dirname(folder), folder
        if folder == last:
            return None
    return folder


# -- without git -----------------------------------------------------------------------------------------------------


def files_below(folder: str, wanted: Wanted) -> Iterator[str]:
    """Yield the paths of files and links below a directory.

    Raise LaunchError if all files are wanted, and a directory cannot be read.
    """
    for parent, folders, names in os.walk(folder, onerror=_refuse if wanted is Wanted.ALL else None):
        if wanted is not Wanted.ALL:
            folders[:] = [name for name in folders if _may_hold_code(parent, name, wanted)]
        yield from (f"{parent}/{name}" for name in names if wanted is not Wanted.CODE or name.endswith(CODE))
        yield from (path for name in folders if os.path.islink(path := f"{parent}/{name}"))


def _refuse(error: OSError) -> NoReturn:
    raise LaunchError(f"{shown(error.filename)} cannot be shipped: {error.strerror}. Make it readable")


def _may_hold_code(parent: str, name: str, wanted: Wanted) -> bool:
    if name in _SKIPPED or name.startswith(".") or os.path.lexists(f"{parent}/{name}/{_ENVIRONMENT}"):
        return False
    return wanted is Wanted.SMALL or name.isidentifier()
