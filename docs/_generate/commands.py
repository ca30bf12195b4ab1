"""The reference of the command line, made from the parsers of ``distrain``.

``<!-- the commands -->`` in a page stands for a section of each command.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from distrain.cli.drilling import add_drill_options
from distrain.cli.main import COMMANDS, command_of
from distrain.cli.parsers import parser_of
from distrain.cli.run.options import make_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx

UNSHOWN = (argparse._HelpAction, argparse._VersionAction)
_OPTION = re.compile(r"(?<![`\w-])--[a-z][\w-]*")
MARK = "<!-- the commands -->"


def invocation(action: argparse.Action) -> str:
    """Return how an option or argument is written: ``--hosts alpha:4``."""
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest)
    value = value if isinstance(value, str) else " ".join(value)
    if not action.option_strings:
        return f"`{value}`"
    suffix = "" if action.nargs == 0 else f" {value}"
    return ", ".join(f"`{option}{suffix}`" for option in action.option_strings)


def marked(text: str) -> str:
    """Mark options as code, lest their hyphens become a dash."""
    return _OPTION.sub(r"`\g<0>`", text)


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.help != argparse.SUPPRESS and not isinstance(action, UNSHOWN):
            values = {**vars(action), "prog": parser.prog}
            yield f"{invocation(action)}\n: {marked((action.help or '') % values)}\n"


def section(parser: argparse.ArgumentParser) -> str:
    """Return the section of one command, as Markdown."""
    parts = [f"## {parser.prog}", marked(parser.description or ""), *options_of(parser)]
    if parser.epilog:
        parts.append(f"```text\n{parser.epilog.strip()}\n```")
    return "\n\n".join(parts)


def all_parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command. That of ``check`` is that of ``run``."""
    yield make_parser("distrain run")
    yield parser_of("drill", add_drill_options)
    yield from (command_of(name)[0] for name in COMMANDS)


def insert_commands(_app: Sphinx, _page: str, source: list[str]) -> None:
    if MARK in source[0]:
        source[0] = source[0].replace(MARK, "\n\n".join(map(section, all_parsers())))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", insert_commands)
    return {"parallel_read_safe": True}
