"""``distrain explain``: what a pasted error means, by the page of troubleshooting. Runs in: coordinator.

An entry is known by its keys: texts of errors, with ``…`` for what varies. A key fits if most of its words, alone
and in pairs, are in three successive lines. So numbers, names, line breaks and the rest of a screen don't matter.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.cli.parsers import SITE, Add
from distrain.cli.text import echo, paint

if TYPE_CHECKING:
    import argparse

PAGE = Path(__file__).with_name("troubleshooting.md")
_FITS = 0.7
"""The part of a key's words and pairs of words that a text must have."""
_MOST_LINES = 2000
_MOST_ENTRIES = 3
_COLOUR = re.compile(r"\033\[[\d;]*m")


def entries() -> list[tuple[list[str], str]]:
    """Return the keys of each entry, the title first, and its text in Markdown."""
    found = []
    for part in re.split(r"^##+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        title, _, rest = part.partition("\n")
        text, _, also = rest.partition("\nAlso: ")
        keys = re.findall(r"(?s)`(.+?)`", title + also) + re.findall(r"(?m)^- `(.+?)`", text)
        found += [(keys, text.strip())] if keys else []
    return found


def explain(text: str) -> list[tuple[float, str, str]]:
    """Return how well each entry fits a text, from 0 to 1, with its title and text, the best first."""
    lines = text.splitlines()[-_MOST_LINES:]
    windows = [words for n in range(len(lines)) if (words := _words(" ".join(lines[n : n + 3])))]
    found = []
    for keys, entry in entries():
        wanted = [set().union(*map(_words, key.split("…"))) for key in keys]
        fits = [(len(key & words) / min(len(key), len(words)), len(key & words)) for key in wanted for words in windows]
        found.append((max(fits, default=(0.0, 0)), keys[0], entry))
    return [(fit, title, entry) for (fit, _), title, entry in sorted(found, reverse=True) if fit]


def _words(text: str) -> set[str | tuple[str, str]]:
    words = re.findall("[a-z]+", _COLOUR.sub("", text.lower()))
    return {*words, *pairwise(words)}


def add_explain_options(add: Add) -> None:
    """Add the options of ``distrain explain``."""
    add("text", nargs="*", metavar="TEXT", help="the error, or a part of it")


def run_explain(options: argparse.Namespace) -> int:
    """Print the entries that fit best."""
    if not options.text and sys.stdin.isatty():
        print("Paste the error, then press Ctrl-D on a line of its own.", file=sys.stderr)
    given = " ".join(options.text) or sys.stdin.buffer.read().decode(errors="replace")
    found = [(title, entry) for fit, title, entry in explain(given)[:_MOST_ENTRIES] if fit >= _FITS]
    for title, entry in found:
        text = re.sub(r"\[(.+?)\]\((\w+)\.md(.*?)\)", rf"\1: {SITE}/\2.html\3", entry)
        echo(f"{paint(title, '1')}\n\n{text}\n")
    if not found:
        echo(f"no entry fits; all of them: {SITE}/troubleshooting.html", sys.stderr)
    return 0 if found else 1
