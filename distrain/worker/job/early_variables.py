"""Environment variables that libraries read when they are imported. Runs in: coordinator, worker.

A forkserver imports torch before it forks the workers, so that a variable that a script sets above its own ``import
torch`` would come too late. If the source shows that a script does so, nothing is imported before it; see
:func:`sets_early`. What the source does not show is noticed when it happens; see :func:`watch`.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

_READ_AT_IMPORT = {
    "torch": re.compile(
        r"(G?OMP|KMP|MKL|MKLDNN|ONEDNN|DNNL|KINETO|PYTORCH)_\w+|TORCH(?!_(HOME|EXTENSIONS_DIR|CUDA_ARCH_LIST|NCCL_))\w+"
    ),
    "numpy": re.compile(r"(OMP|GOTO|OPENBLAS|NPY|NUMPY)_\w+"),
    "huggingface_hub": re.compile(r"(HF|HUGGINGFACE)_(?!\w*TOKEN)\w+"),
    "transformers": re.compile(r"TRANSFORMERS_\w+|USE_(TF|TORCH|FLAX)"),
    "jax": re.compile(r"(JAX|XLA)_\w+"),
    "matplotlib": re.compile(r"MPL\w+"),
}
"""The variables that a package, or a library that it loads, reads once."""
_OF_SCRIPTS = ("torch", "numpy")
"""The modules that workers of scripts would have imported before."""


def _reader_of(name: str, packages: Iterable[str]) -> str | None:
    return next((package for package in packages if _READ_AT_IMPORT[package].fullmatch(name)), None)


# -- in the source ---------------------------------------------------------------------------------------------------


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
    return any(not name or _reader_of(name, _OF_SCRIPTS) for name in names)


def _lines_of_imports(node: ast.AST) -> Iterator[int]:
    match node:
        case ast.Import(names=found):
            yield from (node.lineno for one in found if one.name.partition(".")[0] in _OF_SCRIPTS)
        case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] in _OF_SCRIPTS:
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


# -- while it runs ---------------------------------------------------------------------------------------------------


def watch() -> None:
    """Have this process say on stderr if a variable is set that a package has read before the user's code began."""
    loaded = [package for package in _READ_AT_IMPORT if package in sys.modules]
    plain, pid, said = os.putenv, os.getpid(), set[str]()

    def putenv(name: Any, value: Any) -> None:
        plain(name, value)
        text = os.fsdecode(name)
        reader = _reader_of(text, loaded)
        if reader is None or text in said or os.getpid() != pid or os.environ.get(text) == os.fsdecode(value):
            return
        said.add(text)
        if place := _place_above_import(sys._getframe(1), reader):
            print(
                f"distrain: {text}, which {place} sets, has no effect on {reader}: it was imported before. Set it with "
                f"--env {text}={os.fsdecode(value)}, or RunConfig(worker_runtime_env=...)",
                file=sys.stderr,
            )

    os.putenv = putenv  # os.environ calls it, too


def _place_above_import(frame: FrameType | None, package: str) -> str | None:
    """Return where the user's code is; None if any of it has imported the package, which it then expects to be late."""
    place = None
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("distrain."):
        if any(_is_of(value, package) for names in (frame.f_globals, frame.f_locals) for value in list(names.values())):
            return None
        if frame.f_globals.get("__name__") != "os":
            place = place or f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return place


def _is_of(value: object, package: str) -> bool:
    """Tell if a value is a part of a package, without running any code of it."""
    if not isinstance(value, (ModuleType, FunctionType, BuiltinFunctionType, type)):
        return False
    home = vars(value).get("__name__") if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(home).partition(".")[0] == package
