"""The lines ``name: text`` of docstrings become fields of the API pages.

A docstring describes each parameter, field or enum member in such a line; lines that continue it are indented.
"""

from __future__ import annotations

import enum
import inspect
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_ITEM = re.compile(r"(\w+(?:, \w+)*): (\S.*)")


def described_names(thing: Any) -> set[str]:
    """Return the names that the docstring of a class or function may describe."""
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        return set(thing.__members__)
    annotated = {name for kind in getattr(thing, "__mro__", ()) for name in vars(kind).get("__annotations__", {})}
    try:
        return annotated | set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return annotated


def as_fields(lines: list[str], names: set[str]) -> list[str]:
    """Return the lines of a docstring, with a field in place of each line that describes one of the names."""
    out: list[str] = []
    is_in_item = False
    for line in lines:
        item = _ITEM.fullmatch(line)
        if item and names.issuperset(item[1].split(", ")):
            out += [] if is_in_item else [""]
            *others, name = item[1].split(", ")
            out += [f":param {other}: see {name}" for other in others]  # a field has one name
            out.append(f":param {name}: {item[2]}")
            is_in_item = True
            continue
        if is_in_item and line and not line.startswith(" "):
            out.append("")
            is_in_item = False
        out.append(line)
    return out


def replace_lines(_app: Sphinx, _kind: str, _name: str, thing: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = as_fields(lines, described_names(thing))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", replace_lines)
    return {"parallel_read_safe": True}
