"""HTML that is escaped by construction, and numbers as people read them. Pure. Runs in: anywhere."""

from __future__ import annotations

import math
import re
import time
from html import escape
from typing import TYPE_CHECKING

from distrain.system.text import without_controls

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CLOSED = {"meta", "rect", "line", "path"}
"""Elements that close themselves if they are empty."""
_COLOURS = re.compile(r"\x1b\[[0-?]*m")
_LONGEST_TEXT = 20_000
"""Characters of one piece of text; of a longer one, the end is shown."""


class Html(str):
    """Text that is HTML already. Everything else is escaped."""

    __slots__ = ()


def el(tag: str, *children: object, **attributes: object) -> Html:
    """Return an element. Children that are not :class:`Html` are text.

    attributes: ``class_`` stands for class, and other underscores for hyphens. None leaves an attribute out.

    >>> el("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    shown = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(plain(str(value)))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _CLOSED and not children:
        return Html(f"<{tag}{shown}/>")
    return Html(f"<{tag}{shown}>{join(children)}</{tag}>")


def join(parts: Iterable[object]) -> Html:
    """Return the parts, one after the other. Those that are not :class:`Html` are escaped, and None is left out."""
    return Html("".join(_html(part) for part in parts if part is not None))


def _html(part: object) -> str:
    return part if isinstance(part, Html) else escape(plain(str(part)), quote=False)


def plain(text: str) -> str:
    """Return a text without colours, control characters and unpaired surrogates, which no page can show."""
    if text.isascii() and text.isprintable():
        return text[-_LONGEST_TEXT:]
    cleaned = _COLOURS.sub("", without_controls(text[-_LONGEST_TEXT:]))
    return cleaned.encode("utf-8", "replace").decode()


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Iterable[int] = (),
    texts: Iterable[int] = (),
) -> Html:
    """Return a table that scrolls by itself on a narrow screen. The first cell of a row is its heading.

    numbers: the columns that are aligned to the right. texts: those of sentences, which are never narrow.
    """
    kinds = dict.fromkeys(numbers, "number") | dict.fromkeys(texts, "text")
    heads = (el("th", text, scope="col", class_=kinds.get(n)) for n, text in enumerate(head))
    body = (
        el(
            "tr",
            *(
                el("td", cell, class_=kinds.get(n)) if n else el("th", cell, scope="row", class_=kinds.get(n))
                for n, cell in enumerate(row)
            ),
        )
        for row in rows
    )
    inner = el("table", el("caption", caption), el("thead", el("tr", *heads)), el("tbody", *body))
    return el("div", inner, class_="scroll", role="region", aria_label=caption, tabindex="0")


def clip(text: str, length: int) -> str:
    """Return a text in one line, cut after ``length`` characters."""
    line = " ".join(plain(text).split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def moment(seconds: float) -> Html:
    """Return a time element: a time since 1970, in UTC."""
    try:
        parts = time.gmtime(seconds)
    except (OverflowError, ValueError, OSError):
        return join(["unknown"])
    machine, people = time.strftime("%Y-%m-%dT%H:%M:%SZ", parts), time.strftime("%Y-%m-%d %H:%M:%S", parts)
    return el("time", f"{people} UTC", datetime=machine)


def figure(value: float) -> str:
    """Return a metric with six significant digits."""
    if isinstance(value, int) and abs(value) < 1e15:
        return f"{value:,}"
    return f"{value:.6g}" if math.isfinite(value) else str(value)
