"""Scripts that call fit() themselves: they are not for the workers, but run once, as with plain ``python``.

Runs in: coordinator.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distrain.work.main_module import is_archive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TRAINERS = frozenset({"DataParallelTrainer", "TensorflowTrainer", "TorchTrainer"})


def calls_fit(path: str) -> bool:
    """Whether the script imports distrain, names a trainer, and calls a ``fit()``. It is read, not run; what it imports
    is not looked at.
    """
    try:
        tree = ast.parse(_source_of(path))
    except (OSError, SyntaxError, ValueError):  # running it tells
        return False
    nodes = list(ast.walk(tree))
    return all(any(map(seen, nodes)) for seen in (_imports_distrain, _names_a_trainer, _is_fit))


def _source_of(path: str) -> bytes:
    """Return what ``python path`` would run."""
    if not is_archive(path):
        return Path(path).read_bytes()
    if os.path.isdir(path):
        return Path(path, "__main__.py").read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read("__main__.py")


def _imports_distrain(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            modules = [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            modules = [module]
        case _:
            return False
    return any(module.partition(".")[0] == "distrain" for module in modules)


def _is_fit(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fit"


def _names_a_trainer(node: ast.AST) -> bool:
    match node:
        case ast.ImportFrom(names=names):
            return _imports_distrain(node) and any(alias.name in _TRAINERS for alias in names)
        case ast.Attribute(attr=attribute):  # distrain.torch.TorchTrainer
            return attribute in _TRAINERS
    return False


def names_in(path: str) -> frozenset[str] | None:
    """Return every name that the file defines, imports or assigns to anywhere; None if reading it cannot tell."""
    try:
        nodes = list(ast.walk(ast.parse(Path(path).read_bytes())))
    except (OSError, SyntaxError, ValueError):  # running it tells
        return None
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id="globals" | "exec" | "setattr") | ast.alias(name="*"):
                return None
            case ast.Call(func=ast.Name(id="vars" | "locals"), args=[]):
                return None
            case ast.FunctionDef(name="__getattr__"):
                return None
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=alias):
                names.add(alias or name.partition(".")[0])
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return frozenset(names)


def source_of_module(name: str, path: Sequence[str]) -> str | None:
    """Find the file that ``import name`` would run, without importing the packages that it is in; None if there is
    none of ours to read.
    """
    parts = name.split(".")
    for folder in path:
        for file in (Path(folder, *parts, "__init__.py"), Path(folder, *parts).with_suffix(".py")):
            if file.is_file():
                return str(file)
    return None


def file_of_module(name: str, path: Sequence[str]) -> str | None:
    """The file that ``python -m name`` would run, found without importing the packages that it is in."""
    parts = name.split(".")
    for folder in path:
        for file in (Path(folder, *parts).with_suffix(".py"), Path(folder, *parts, "__main__.py")):
            if file.is_file():
                return str(file)
    return None


def become(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by ``python arguments``."""
    sys.stdout.flush()
    sys.stderr.flush()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    os.execve(sys.executable, [sys.executable, *flags, *arguments], dict(environment))  # noqa: S606
