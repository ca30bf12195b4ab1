"""The packages that the user's code imports, found in its text. Runs in: coordinator."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distrain.shipping.shipped_file import ShippedFile

_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+([\w., \t]+)|from[ \t]+(\w+)[\w.]*[ \t]+import\b)", re.MULTILINE)
_MOST_BYTES = 1_000_000
"""Larger files are data."""


def third_party_imports(files: Iterable[ShippedFile]) -> list[str]:
    """Return the top-level modules that Python files import, without the standard library's and those files themselves.

    The files are not parsed: an import in a comment of several lines counts, too.
    """
    sources = [file for file in files if file.path.endswith(".py") and file.size <= _MOST_BYTES]
    own = {name for file in sources for name in (Path(file.path).stem, *Path(file.path).parent.parts)}
    found = dict.fromkeys(name for file in sources for name in _imports_in(Path(file.path)))
    return [name for name in found if name not in own and name not in sys.stdlib_module_names and name != "distrain"]


def _imports_in(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(errors="replace")
    except OSError:  # deleted since it was found
        return
    for plain, origin in _IMPORT.findall(text):
        for name in [origin] if origin else plain.split(","):
            if top := name.strip().split()[:1]:
                yield top[0].partition(".")[0]
