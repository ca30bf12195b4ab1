"""``distrain skill``: the command line as a skill file, from which a coding agent learns it. Runs in: coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.drilling import drill_parser
from distrain.cli.main import COMMANDS, command_of
from distrain.cli.run.options import make_parser
from distrain.system import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_RULES = Path(__file__).parent.parent / "skill.md"


def skill_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain skill``."""
    return parsers.make_parser("skill")


def run_skill(options: argparse.Namespace) -> int:
    """Print the file."""
    print(_RULES.read_text().format(version=__version__), *map(_section, all_parsers()), sep="\n")
    return 0


def all_parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command. That of ``check`` is that of ``run``."""
    yield make_parser("distrain run")
    yield drill_parser()
    yield from (command_of(name)[0] for name in COMMANDS)


def _section(parser: argparse.ArgumentParser) -> str:
    usage = f"{parser.format_usage()}\n{parser.epilog or ''}".strip()
    return f"## {parser.prog}\n\n{parser.description}\n\n```text\n{usage}\n```\n"
