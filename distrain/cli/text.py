"""Times, metrics and tables as text for people, and facts for programs. Runs in: coordinator."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import IO, TYPE_CHECKING, Any

from distrain.storage.runs.listing import DAMAGED, FAILED, FINISHED, KILLED, RUNNING, STARTING, STOPPED
from distrain.system.text import flatten, number, printable, without_controls

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_UNITS = ((604800, "w"), (86400, "d"), (3600, "h"), (60, "m"))
_COLOURS = {
    RUNNING: "36", STARTING: "36", FINISHED: "32", FAILED: "31", KILLED: "31", STOPPED: "33", DAMAGED: "33",
}  # fmt: skip
_PAINT = re.compile(r"\033\[\d*m")


def age(seconds: float) -> str:
    """Return a duration with one unit.

    >>> [age(seconds) for seconds in (0.2, 59, 3599, 86400, 86400 * 13, 86400 * 100)]
    ['0s', '59s', '59m', '24h', '13d', '14w']
    """
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds // size:.0f}{unit}"
    return f"{seconds // 60:.0f}m" if seconds >= 60 else f"{max(seconds, 0):.0f}s"


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """Return metrics in one line.

    >>> metrics_line({"loss": 0.5, "eval": {"accuracy": 1}})
    'loss=0.5 eval/accuracy=1'
    """
    return " ".join(f"{printable(name)}={number(item)}" for name, item in flatten(metrics).items())


# -- for programs ----------------------------------------------------------------------------------------------------

_FORMAT = 1
"""The version of all objects. It is raised when a key changes its meaning or goes away."""


def write_json(kind: str, **facts: object) -> None:
    """Print the facts of a command as a JSON object, which docs/json.md describes."""
    text = json.dumps({"format": _FORMAT, "kind": kind, **facts}, default=_plain)
    print(json.dumps(json.loads(text, parse_constant=str), indent=1), flush=True)  # "NaN" is a string there


def _plain(item: object) -> dict[str, Any] | str:
    """Return the fields of a dataclass, or the text of another object."""
    fields = getattr(item, "__dataclass_fields__", None)
    return str(item) if fields is None else {name: getattr(item, name) for name in fields}


# -- the terminal ----------------------------------------------------------------------------------------------------


def echo(text: str, file: IO[str] | None = None) -> None:
    """Print a text that may quote files of a run, which may hold anything. Nothing in it acts on the terminal.

    file: a stream other than stdout. A character that its encoding lacks is replaced.
    """
    encoding = getattr(file or sys.stdout, "encoding", None) or "utf-8"
    print(without_controls(text).encode(encoding, "backslashreplace").decode(encoding), file=file, flush=True)


def screen() -> tuple[int, int] | None:
    """Return the columns and lines of the terminal that stdout is, or None if it is not one."""
    if not sys.stdout.isatty():
        return None
    found = os.get_terminal_size(sys.stdout.fileno())
    return found.columns or 80, found.lines or 24


def coloured(state: str) -> str:
    """Return a state in its colour, if stdout is a terminal that shows colours."""
    return paint(state, _COLOURS.get(state, "2"))


def paint(text: str, code: str) -> str:
    """Return the text with an attribute of ANSI terminals, if stdout is one; NO_COLOR and FORCE_COLOR overrule that."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    is_coloured = (is_terminal or os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")
    return f"\033[{code}m{text}\033[0m" if is_coloured else text


def table(rows: Sequence[Sequence[str]], columns: int | None = None, right: Collection[int] = ()) -> list[str]:
    """Return a line for each row, with aligned columns. The last one is cut at the edge of the screen.

    columns: those of the screen, None for no limit. right: the columns that are aligned at the right.
    (A table of rich takes five times as long for a thousand runs.)
    """
    widths = [max(map(width_of, cells)) for cells in zip(*rows, strict=True)]
    rest = None if columns is None else max(columns - sum(widths[:-1]) - 2 * len(widths[:-1]), 10)
    lines = []
    for row in rows:
        padding = [" " * (width - width_of(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            pad + cell if n in right else cell + pad for n, (cell, pad) in enumerate(zip(row, padding, strict=True))
        ]
        lines.append("  ".join([*cells[:-1], cut(cells[-1].rstrip(), rest)]).rstrip())
    return lines


def width_of(cell: str) -> int:
    """Return the characters of a cell that are seen."""
    return len(_PAINT.sub("", cell)) if "\033" in cell else len(cell)


def cut(text: str, width: int | None) -> str:
    """Return the text with an ellipsis where it exceeds the width; None for no limit."""
    return text if width is None or len(text) <= width else f"{text[: max(width - 1, 0)]}…"
