"""The texts of distrain, read from its source; ``…`` stands for the parts of a text that vary."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import distrain

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(distrain.__file__).parent


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Return the name of a module and a string of it, for all strings but docstrings."""
    return tuple(
        (path.name, text) for path in sorted(SOURCE.rglob("*.py")) for text in _texts_in(ast.parse(path.read_text()))
    )


def covers(key: str, text: str) -> bool:
    """Tell if a text has all fixed parts of the key in their order."""
    position = 0
    for part in filter(None, map(str.strip, key.split("…"))):
        found = text.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return True


def _texts_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if found := _alternatives(node):
        yield from (re.sub(r"\{\w+\}|%[sd]|…+", "…", " ".join(text.split())) for text in found)
        return
    for child in ast.iter_child_nodes(node):
        yield from _texts_in(child)


def _alternatives(node: ast.AST) -> list[str]:
    """Return the texts that an expression may have; none if it has no fixed text."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return ["".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in values)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _alternatives(left), _alternatives(right)
            return [a + b for a in first or ["…"] for b in second or ["…"]] if first or second else []
        case ast.IfExp(body=body, orelse=orelse):
            return _alternatives(body) + _alternatives(orelse)
    return []
