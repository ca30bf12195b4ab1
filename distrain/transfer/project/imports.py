"""The packages that the user's code imports, found in its text. Runs in: coordinator."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distrain.transfer.project.project import Project

_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+([\w., \t]+)|from[ \t]+(\w+)[\w.]*[ \t]+import\b)", re.MULTILINE)
_MOST_BYTES = 1_000_000
"""Larger files are data."""


def third_party_imports(project: Project) -> list[str]:
    """Return the top-level modules that Python files import, without the standard library's and those files themselves.

    The files are not parsed: an import in a comment of several lines counts, too.
    """
    sources = [Path(file.path) for file in project.files if file.path.endswith(".py") and file.size <= _MOST_BYTES]
    own = {name for path in sources for name in _module_names(path, project.folders)}
    found = dict.fromkeys(name for path in sources for name in _imports_in(path))
    return [name for name in found if name not in own and name not in sys.stdlib_module_names and name != "distrain"]


def _module_names(path: Path, folders: Iterable[str]) -> tuple[str, ...]:
    """Return all parts of the name that a file may have as a module: those below one of the project's directories."""
    below = [path.relative_to(folder) for folder in folders if path.is_relative_to(folder)]
    longest = max(below, key=lambda found: len(found.parts), default=Path(path.parent.name, path.name))
    return longest.with_suffix("").parts


def _imports_in(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(errors="replace")
    except OSError:  # deleted since it was found
        return
    for plain, origin in _IMPORT.findall(text):
        for name in [origin] if origin else plain.split(","):
            if top := name.strip().split()[:1]:
                yield top[0].partition(".")[0]
