"""The parsers of the commands that look at runs, and the run that the user means. Runs in: coordinator."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, NoReturn

from distrain.storage.runs.listing import find_run, storage_at

if TYPE_CHECKING:
    from distrain.storage.runs.listing import Run


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; argparse would put the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser(name: str, what: str, examples: str) -> Parser:
    """Make the parser of a command. ``examples``: command lines that the help ends with."""
    return Parser(
        prog=f"distrain {name}",
        description=textwrap.fill(what, 98, break_on_hyphens=False),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def number(text: str) -> int:
    """Return the number that an option is given."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return int(text)


def make_run_parser(name: str, what: str, examples: str) -> Parser:
    """Make the parser of a command for one run, with the argument that names it and the option where to look."""
    parser = make_parser(name, what, examples)
    parser.add_argument("run", metavar="RUN", help="path, URL, name, beginning of a name, or `last`")
    parser.add_argument("--storage-path", metavar="DIR", help="where the runs are (default: ~/distrain_results)")
    return parser


def add_storage(parser: argparse.ArgumentParser, help_text: str = "the storage path") -> None:
    """Add the argument that names a storage path, and the option of the other commands that does so, too."""
    either = parser.add_mutually_exclusive_group().add_argument
    default = "(default: ~/distrain_results)"
    either("path", nargs="?", metavar="PATH_OR_URL", default=argparse.SUPPRESS, help=f"{help_text} {default}")
    either("--storage-path", dest="path", metavar="DIR", help="the same")


def run_of(options: argparse.Namespace) -> Run:
    """Return the run that the options name. Raises NoSuchRun or OSError."""
    return find_run(options.run, storage_at(options.storage_path))
