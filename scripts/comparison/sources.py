"""The sources of other people's packages: what they define, their defaults and their commands. Nothing is imported."""

from __future__ import annotations

import ast
import re
from configparser import ConfigParser
from email.parser import HeaderParser
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Sources:
    """Packages in one directory, as in site-packages. Every path is relative to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        about = [*folder.glob("*.dist-info/METADATA"), *folder.glob("*.egg-info/PKG-INFO")]
        found = [(path.parent, HeaderParser().parsestr(path.read_text())) for path in about]
        self._about = {str(headers["Name"]).lower(): path for path, headers in found}
        self.versions = {str(headers["Name"]).lower(): str(headers["Version"]).split("+")[0] for _, headers in found}

    def commands(self, package: str) -> set[str]:
        """Return the commands that a package installs."""
        parser = ConfigParser()
        parser.read(self._about[package] / "entry_points.txt")
        return set(parser["console_scripts"]) if "console_scripts" in parser else set()

    def description(self, package: str) -> str:
        """Return the headers and the text that a package describes itself with."""
        folder = self._about[package]
        return next(path for path in (folder / "METADATA", folder / "PKG-INFO") if path.exists()).read_text()

    def says(self, path: str, *phrases: str) -> bool:
        """Return whether a file has all these phrases."""
        text = self._text(path)
        return all(phrase in text for phrase in phrases)

    def lacks(self, path: str, pattern: str) -> bool:
        """Return whether no line of a file, or of a directory's Python files, matches the pattern."""
        root = self._folder / path
        if not root.exists():
            raise FileNotFoundError(path)
        files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
        return not any(re.search(pattern, file.read_text()) for file in files)

    def defines(self, path: str, name: str) -> bool:
        """Return whether a module defines or imports ``name``, or a class of it ``Class.name``."""
        owner, _, own = name.rpartition(".")
        body = self._node(path, owner).body if owner else self._tree(path).body
        return any(own in _names(node) for node in _flat(body))

    def default(self, path: str, name: str) -> Any:
        """Return the default of a field or constant ``[Class.]name``, or of a parameter ``[Class.]function(name)``.

        A call such as ``field(default=3)`` has the value of its ``default``.
        """
        if found := re.fullmatch(r"(.+)\((\w+)\)", name):
            function = self._node(path, found[1])
            assert isinstance(function, ast.FunctionDef)
            arguments = function.args
            names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
            values = dict(zip(names[::-1], arguments.defaults[::-1], strict=False))
            values |= {
                each.arg: value
                for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                if value
            }
            return ast.literal_eval(values[found[2]])
        owner, _, own = name.rpartition(".")
        body = self._node(path, owner).body if owner else self._tree(path).body
        for node in _flat(body):
            if own in _names(node) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                return ast.literal_eval(_default_of(node.value))
        raise KeyError(f"{path}: no {name} with a value")

    def option(self, path: str, name: str) -> dict[str, Any]:
        """Return the literal arguments of the ``add_argument()`` call for an option, such as ``{"default": "1:1"}``."""
        for node in ast.walk(self._tree(path)):
            if isinstance(node, ast.Call) and any(isinstance(a, ast.Constant) and a.value == name for a in node.args):
                return {
                    word.arg: word.value.value
                    for word in node.keywords
                    if word.arg and isinstance(word.value, ast.Constant)
                }
        raise KeyError(f"{path}: no option {name}")

    def _text(self, path: str) -> str:
        return (self._folder / path).read_text()

    def _tree(self, path: str) -> ast.Module:
        return ast.parse(self._text(path))

    def _node(self, path: str, name: str) -> ast.ClassDef | ast.FunctionDef:
        body: list[ast.stmt] = self._tree(path).body
        for part in name.split("."):
            found = [
                node for node in _flat(body) if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
            ]
            if not found:
                raise KeyError(f"{path}: no {name}")
            body = found[-1].body
        return found[-1]


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, also those below ``if`` and ``try``."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flat([*node.body, *node.orelse])


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _default_of(value: ast.expr) -> ast.expr:
    given = value.keywords if isinstance(value, ast.Call) else []
    return next((word.value for word in given if word.arg == "default"), value)
