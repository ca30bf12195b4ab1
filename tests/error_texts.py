"""The texts of distrain's errors, read from the source, and the entries of docs/troubleshooting.md.

A text is a string of the source; ``…`` stands for its parts that vary. A key is a text, or a part of one, in the page:
it covers a text, or a message on the screen, that has all its fixed parts in their order.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import distrain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SOURCE = Path(distrain.__file__).parent
ROOT = SOURCE.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
MESSAGES = ROOT / "docs" / "messages.md"

ARGUMENTS = frozenset({
    "ValueError", "TypeError", "ArgumentTypeError", "WrongArgument", "NoSuchRun", "AttributeError", "KeyError",
    "ImportError", "ModuleNotFoundError", "usage",
})  # fmt: skip
"""Errors about an argument, an option or a name. Their texts say all; docs/messages.md lists them. ``usage``: those of
argparse."""
INTERNAL = frozenset(["AssertionError", "NotImplementedError", "StreamEndedError"])
_NOT_SHOWN = frozenset({
    "add_argument", "add_argument_group", "ArgumentParser", "compile", "fullmatch", "match", "search", "sub",
})  # fmt: skip
"""Calls whose arguments are help texts and patterns."""


@dataclass(frozen=True)
class Text:
    """A text of the source. ``kind``: the class of the exception that has it, or empty."""

    place: str
    text: str
    kind: str

    @property
    def is_about_an_argument(self) -> bool:
        """True if docs/messages.md lists it."""
        return self.kind in ARGUMENTS and self._words >= 2 and " " in self.text

    @property
    def needs_entry(self) -> bool:
        """True if docs/troubleshooting.md must have it: the text of an exception, if it is more than a name."""
        return bool(self.kind) and self.kind not in ARGUMENTS | INTERNAL and self._words >= 3

    @property
    def beginning(self) -> str:
        """The text, or enough of it to find it."""
        return self.text[:100].strip()

    @property
    def _words(self) -> int:
        return len(re.findall(r"[A-Za-z_]{2,}", self.text))


# -- texts of the source ---------------------------------------------------------------------------------------------


@cache
def texts() -> tuple[Text, ...]:
    """Return the texts of all modules."""
    return tuple(
        text
        for path in sorted(SOURCE.rglob("*.py"))
        for text in texts_of(path.read_text(), path.relative_to(SOURCE).as_posix())
    )


@cache
def errors() -> tuple[Text, ...]:
    """Return the texts of all modules that need an entry."""
    return tuple(text for text in texts() if text.needs_entry)


def texts_of(source: str, name: str = "module.py") -> list[Text]:
    """Return the texts of a module."""
    return list(_walk(ast.parse(source), "", name))


def _walk(node: ast.AST, kind: str, name: str) -> Iterator[Text]:
    if isinstance(node, ast.Compare) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return  # the latter is a docstring
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        kind = _name_of(node.exc.func)
    elif isinstance(node, ast.Call):
        called = _name_of(node.func)
        if called in _NOT_SHOWN:
            return
        if _is_exception(called):
            kind = called
        elif called == "error":
            kind = "usage"
    if found := _alternatives(node):
        for text in found:
            yield Text(f"{name}:{getattr(node, 'lineno', 0)}", _plain(re.sub(r"\{\w+\}|%[sd]", "…", text)), kind)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, kind, name)


def _name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_exception(name: str) -> bool:
    return name[:1].isupper() and (name.endswith("Error") or name in ARGUMENTS)


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


def _plain(text: str) -> str:
    return re.sub(r"…+", "…", " ".join(text.split()))


# -- entries of the page ---------------------------------------------------------------------------------------------


def keys_of(page: str) -> list[str]:
    """Return the keys of the page: code in a heading of the third level, or in a paragraph that begins with "Also:"."""
    places = re.findall(r"^### .+|^Also: (?:.+\n?)+", page, flags=re.MULTILINE)
    return [key for place in places for key in re.findall(r"`([^`]+)`", _plain(place))]


def entries_of(page: str) -> dict[str, str]:
    """Return the entries of the page by their headings."""
    parts = re.split(r"^(?=##)", page, flags=re.MULTILINE)
    return {part.splitlines()[0]: part for part in parts if part.startswith("### ")}


def covers(key: str, message: str) -> bool:
    """Tell if a text, or a message on the screen, has all fixed parts of the key in their order."""
    position = 0
    for part in fixed_parts(key):
        found = message.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return True


def headings_for(message: str) -> list[str]:
    """Return the headings of the entries whose keys are in a line of a message on the screen."""
    lines = message.splitlines()
    entries = entries_of(PAGE.read_text()).items()
    return [title for title, entry in entries if any(covers(key, line) for key in keys_of(entry) for line in lines)]


@cache
def fixed_parts(key: str) -> tuple[str, ...]:
    """Return what of a key does not vary."""
    return tuple(part for part in map(str.strip, _plain(key).split("…")) if part)


def missing(keys: Iterable[str], found: Iterable[Text]) -> list[Text]:
    """Return the texts that need an entry and have none."""
    known = tuple(keys)
    return [text for text in found if text.needs_entry and not any(covers(key, text.text) for key in known)]


# -- the page of messages --------------------------------------------------------------------------------------------

_AREAS = {
    "Configs and trainers": ("config", "trainer", "backend", "work", "system"),
    "Hosts and hostfiles": ("hosts", "connection", "agent", "shipping"),
    "`distrain run`": ("launching",),
    "The other commands": ("cli", "runs"),
    "Functions of train_func": ("worker", "session", "collective", "inprocess"),
    "Checkpoints and results": ("checkpoint", "result", "storage"),
    "Datasets": ("data",),
    "Trackers": ("trackers",),
}
"""By heading of docs/messages.md: the packages and modules whose errors stand there. Others have a heading each."""
_BEGINNING = """\
# Messages about arguments

`scripts/list_messages` writes this page from the source.

These errors say that an argument, an option, a name or a line of a hostfile is wrong, and what it must be. Nothing has
been started when you see them, except those of functions that you call in `train_func`. `…` stands for the parts that
vary. Errors of another kind are in [Troubleshooting](troubleshooting.md).

Many begin with the class and the argument: `ScalingConfig.num_workers must be an int of at least 0, got 'a' (str)`.
"""


def messages_page() -> str:
    """Return the text of docs/messages.md: errors about arguments by area."""
    rows: dict[str, set[str]] = {area: set() for area in _AREAS}
    for text in texts():
        if text.is_about_an_argument:
            rows.setdefault(_area(text.place), set()).add(f"- {_code(text.text)} ({text.kind})")
    return "\n".join(
        [_BEGINNING, *(f"## {area}\n\n" + "\n".join(sorted(found)) + "\n" for area, found in rows.items())]
    )


def _area(place: str) -> str:
    top = re.split(r"[/.]", place)[0]
    return next((area for area, names in _AREAS.items() if top in names), f"`distrain.{top}`")


def _code(text: str) -> str:
    """Return text as code of Markdown, also if it has backticks."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"
