"""The parsers of the commands that look at runs, and the run that the user means. Runs in: coordinator."""

from __future__ import annotations

import argparse
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from distrain.jobs.place import has_queue
from distrain.storage.runs.listing import LAST, NoSuchRun, Run, find_run, storage_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.system.remote_path import RemotePath

Add: TypeAlias = "Callable[..., object]"
"""The method ``add_argument`` of a parser."""
SITE = "https://distrain.github.io/distrain"
_DEFAULT = "(default: DISTRAIN_STORAGE_PATH, else ~/distrain_results)"
_OF_STORAGE = {"board": "the storage path, or a run", "clean": "the storage path", "ls": "the storage path, or a run"}
"""The commands for the runs of a storage path. Others are for one run."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_WITHOUT_RUN = ("cancel", "drill", "explain", "gpus", "queue")
_WITH_JSON = ("compare", "drill", "gpus", "ls", "queue", "show", "stacks", "stop")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; argparse would put the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def help_of(name: str) -> tuple[str, str]:
    """Return the description of a command, and the text at the end of its help, from help.md."""
    section = Path(__file__).with_name("help.md").read_text().partition(f"\n## {name}: ")[2].partition("\n#")[0]
    _, what, end = section.split("\n\n", 2)
    return textwrap.fill(what, 98, break_on_hyphens=False), textwrap.dedent(end)


def make_parser(name: str) -> Parser:
    """Make the parser of a command."""
    what, end = help_of(name)
    kind = argparse.RawDescriptionHelpFormatter
    return Parser(prog=f"distrain {name}", description=what, epilog=end, formatter_class=kind, allow_abbrev=False)


def number(text: str) -> int:
    """Return the number that an option is given."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Return the seconds of an age or a time that an option is given, such as ``12h``."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"must be such as 30m, 12h, 7d or 4w, got {text!r}")
    return float(number) * _UNITS[unit]


def port(text: str) -> int:
    """Return the port that an option is given."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, got {text!r}")
    return int(text)


def parser_of(command: str, add_options: Callable[[Add], None] | None) -> Parser:
    """Make the parser of a command: what it looks at, its own options, and --json."""
    parser = make_parser(command)
    if command in _OF_STORAGE:
        either = parser.add_mutually_exclusive_group().add_argument
        what = f"{_OF_STORAGE[command]} {_DEFAULT}"
        either("path", nargs="?", metavar="PATH_OR_URL", default=argparse.SUPPRESS, help=what)
        either("--storage-path", dest="path", metavar="DIR", help="the same")
    elif command not in _WITHOUT_RUN:
        parser.add_argument("run", metavar="RUN", help="path, URL, name, beginning of a name, or `last`")
        parser.add_argument("--storage-path", metavar="DIR", help=f"where the runs are {_DEFAULT}")
    if add_options is not None:
        add_options(parser.add_argument)
    if command in _WITH_JSON:
        parser.add_argument("--json", action="store_true", help=f"write a JSON object ({SITE}/json.html)")
    return parser


def storage_of(options: argparse.Namespace) -> Path | RemotePath:
    """Return the storage path of the options, or the default one. Raises OSError."""
    return storage_at(options.path if "path" in options else options.storage_path)


def run_of(options: argparse.Namespace, *, waits: bool = False) -> Run:
    """Return the run that the options name, or that of a job. Raises WrongArgument or OSError.

    The name of a job comes before the beginning of the name of a run. waits: for a job that has not begun.
    """
    try:
        run = find_run(options.run, storage_of(options))
    except NoSuchRun:
        if (job := _job_of(options, waits=waits)) is None:
            raise
        return job
    return run if options.run in (run.name, LAST) else _job_of(options, waits=waits) or run


def _job_of(options: argparse.Namespace, *, waits: bool) -> Run | None:
    if options.storage_path is not None or not has_queue():
        return None
    from distrain.cli.queueing import run_of_job
    from distrain.errors import DistrainError

    with suppress(DistrainError):  # a queue that cannot be read hides no run
        return run_of_job(options.run, waits=waits)
    return None
