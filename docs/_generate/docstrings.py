"""Docstrings become API pages: the lines ``name: text`` become fields, and examples are shown as Python.

A docstring describes each parameter, field or enum member in such a line; lines that continue it are indented. One that
leaves parameters to another class ("See :class:`...` for the other parameters.") gets their lines from there.
"""

from __future__ import annotations

import enum
import inspect
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_ITEM = re.compile(r"(\w+(?:, \w+)*): (\S.*)")
_ELSEWHERE = re.compile(r"See :class:`\S+` for the other parameters\.")


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


def with_parameters_of_the_base(thing: Any, lines: list[str]) -> list[str]:
    """Return the lines of a class, with those of its base that describe parameters instead of "See ..."."""
    places = [number for number, line in enumerate(lines) if _ELSEWHERE.fullmatch(line)]
    if not places:
        return lines
    described, is_item = [], False
    for line in (inspect.getdoc(thing.__base__) or "").splitlines():
        item = _ITEM.fullmatch(line)
        is_item = item[1] in described_names(thing) if item else is_item and line.startswith(" ")
        described += [line] if is_item else []
    own = [number for number, line in enumerate(lines) if _ITEM.fullmatch(line)]
    begin = min(own, default=places[0])
    return [*lines[:begin], *described, *lines[begin : places[0]], *lines[places[0] + 1 :]]


def with_python(lines: list[str]) -> list[str]:
    """Return the lines, with blocks that are highlighted as Python where they are."""
    out: list[str] = []
    for line in lines:
        text, mark, _ = line.rpartition("::")
        if mark and line.endswith("::"):
            out += [f"{text}:", ""] if text.strip() else []
            out.append(f"{line[: -len(line.lstrip())]}.. code-block:: default")
        else:
            out.append(line)
    return out


def replace_lines(_app: Sphinx, _kind: str, _name: str, thing: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = with_python(as_fields(with_parameters_of_the_base(thing, lines), described_names(thing)))


def without_factories(*given: Any) -> tuple[str, str | None] | None:
    """Return a signature with ``...`` for defaults that a factory makes; Sphinx cannot parse ``<factory>``."""
    *_, signature, returned = given
    return (signature.replace("<factory>", "..."), returned) if signature else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", replace_lines)
    app.connect("autodoc-process-signature", without_factories)
    return {"parallel_read_safe": True}
