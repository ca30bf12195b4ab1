"""Environment variables that a script sets before it imports the libraries that read them. Runs in: coordinator.

A forkserver imports torch before it forks the workers, so that a variable that a script sets above its own ``import
torch`` would come too late. If the source shows that a script does so, nothing is imported before it.
"""

from __future__ import annotations

import ast
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_READ_AT_IMPORT = re.compile(
    r"(G?OMP|KMP|MKL|MKLDNN|ONEDNN|DNNL|KINETO|PYTORCH|GOTO|OPENBLAS|NPY|NUMPY)_\w+"
    r"|TORCH(?!_(HOME|EXTENSIONS_DIR|CUDA_ARCH_LIST|NCCL_))\w+"
)
"""The variables that torch, numpy, or a library that these load, reads once."""
_READERS = ("torch", "numpy")
"""The modules that workers of scripts would have imported before."""


def sets_early(path: str) -> bool:
    """Tell if a script sets such a variable above its first import of the package that reads it.

    The file is read and not run. Code that sets variables whose names it computes counts, too.
    """
    try:
        with open(path, "rb") as file:
            nodes = list(ast.walk(ast.parse(file.read())))
    except (OSError, SyntaxError, ValueError, RecursionError):  # running it will show the error
        return False
    first = min((line for node in nodes for line in _lines_of_imports(node)), default=sys.maxsize)
    names = (name for node in nodes if getattr(node, "lineno", first) < first for name in _names_set(node))
    return any(not name or _READ_AT_IMPORT.fullmatch(name) for name in names)


def _lines_of_imports(node: ast.AST) -> Iterator[int]:
    match node:
        case ast.Import(names=found):
            yield from (node.lineno for one in found if one.name.partition(".")[0] in _READERS)
        case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] in _READERS:
            yield node.lineno


def _names_set(node: ast.AST) -> list[str]:
    """Return the variables that a part of the source sets or removes, "" for one that it does not name."""
    match node:
        case ast.Subscript(value=home, slice=key, ctx=ast.Store() | ast.Del()) if _is_environ(home):
            return [_text(key)]
        case ast.AugAssign(target=home, value=value) if _is_environ(home):
            return _keys(value)
        case ast.Call(func=ast.Attribute(value=home, attr="setdefault" | "pop"), args=[key, *_]) if _is_environ(home):
            return [_text(key)]
        case ast.Call(func=ast.Attribute(value=home, attr="update")) if _is_environ(home):
            return [*(keyword.arg or "" for keyword in node.keywords), *(k for arg in node.args for k in _keys(arg))]
        case ast.Call(func=ast.Attribute(attr="putenv"), args=[key, *_]):
            return [_text(key)]
    return []


def _is_environ(node: ast.AST) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in ("os.environ", "environ")


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _keys(node: ast.AST) -> list[str]:
    return [_text(key) for key in node.keys] if isinstance(node, ast.Dict) else [""]
