"""The command line for coding agents, as a skill file, and for shells that complete it. Runs in: coordinator."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.drilling import drill_parser
from distrain.cli.main import COMMANDS, command_of
from distrain.cli.run.options import make_parser
from distrain.system import __version__
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Iterator

_RULES = Path(__file__).parent.parent / "skill.md"


def skill_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain skill``."""
    return parsers.make_parser("skill")


def run_skill(options: argparse.Namespace) -> int:
    """Print the file."""
    print(_RULES.read_text().replace("{version}", __version__), *map(_section, all_parsers()), sep="\n")
    return 0


def all_parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command. That of ``check`` is that of ``run``."""
    yield make_parser("distrain run")
    yield drill_parser()
    yield from (command_of(name)[0] for name in COMMANDS)


def _section(parser: argparse.ArgumentParser) -> str:
    usage = f"{parser.format_usage()}\n{parser.epilog or ''}".strip()
    return f"## {parser.prog}\n\n{parser.description}\n\n```text\n{usage}\n```\n"


def complete() -> None:
    """Tell the shell what may come next in the command line: argcomplete asks for it, and ends the process."""
    parser = argparse.ArgumentParser("distrain")
    parsers_of_commands = [*all_parsers(), make_parser("distrain check")]
    parser.add_subparsers().choices.update({one.prog.partition(" ")[2]: one for one in parsers_of_commands})
    require("argcomplete").autocomplete(parser)
