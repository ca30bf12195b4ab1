"""``distrain COMMAND``: the commands, their help, and the errors of all of them. Runs in: coordinator.

Each command is imported when it is used, so that the quick ones stay quick.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.system import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

LAUNCHING = ("run", "submit", "check", "drill")
TRIAL, JOB = "drill-trial", "job"
"""Started by ``distrain drill`` and ``submit``, not by users."""
_MODULES = {
    "listing": ("ls", "board"),
    "showing": ("show", "page", "compare"),
    "following": ("logs", "stacks", "stop", "profile"),
    "attaching": ("attach",),
    "continuing": ("resume", "note", "clean"),
    "debugging": ("debug",),
    "explaining": ("explain",),
    "queueing": ("queue", "gpus", "cancel"),
}
"""The modules of this package, and the commands in each."""
COMMANDS = {command: module for module, commands in _MODULES.items() for command in commands}

_MEANT = {"diff": "compare", "kill": "stop", "list": "ls", "plot": "board", "ps": "ls", "status": "show", "tag": "note"}
"""Words for what a command does, some of which resemble another one."""

_HELP = """\
usage: distrain COMMAND ...        (distrain COMMAND --help explains one)
{}

A RUN is a path, a URL, a name, the beginning of a name, or `last`, the newest.
Names are in --storage-path (DISTRAIN_STORAGE_PATH, else ~/distrain_results).

  distrain run --num-workers 4 train.py --epochs 3
  distrain submit --gpus 2 train.py
  distrain logs last -f

Documentation: https://distrain.github.io/distrain
"""


def _help() -> str:
    titles = re.findall(r"(?m)^#(#?) ([^:\n]+)(?:: )?(.*)", Path(__file__).with_name("help.md").read_text())
    return _HELP.format("\n".join(f"  {name:<11}{text}" if inner else f"\n{name}" for inner, name, text in titles))


def run_main(arguments: Sequence[str], user_path: Sequence[str]) -> int:
    """Run the command line and return its exit code. Raises SystemExit for a wrong command line.

    user_path: sys.path without the directory of the command.
    """
    command, rest = (arguments[0] if arguments else "--help"), list(arguments[1:])
    if command in ("--help", "-h", "help"):
        print(_help(), end="")
        return 0
    if command == "--version":
        print(f"distrain {__version__}")
        return 0
    if command in ("run", "check"):
        from distrain.cli.run.command import run_command

        return run_command(["--check", *rest] if command == "check" else rest, user_path, prog=f"distrain {command}")
    if command in ("submit", JOB):
        from distrain.cli.submitting import receive_job, run_job, run_submit

        if command == JOB and rest[0] != "-":
            return run_job(Path(rest[0]))
        return _run("submit", receive_job if command == JOB else partial(run_submit, rest, user_path))
    if command == "drill":
        from distrain.cli.drilling import run_drill

        return run_drill(rest)
    if command == TRIAL:
        from distrain.cli.drill_trial import run_trial

        return run_trial(rest[0], user_path)
    if command not in COMMANDS:
        from distrain.system.text import did_you_mean

        known = (*LAUNCHING, *COMMANDS)
        hint = did_you_mean(_MEANT.get(command, command), known) or "; `distrain --help` lists them"
        print(f"distrain: error: there is no command {command!r}{hint}", file=sys.stderr)
        return 2
    parser, function = command_of(command)
    warnings.simplefilter("ignore")  # of damaged files: what shows a run says so
    return _run(command, partial(function, parser.parse_args(rest)))


def command_of(name: str) -> tuple[argparse.ArgumentParser, Callable[[argparse.Namespace], int]]:
    """Return the parser and the function of one of the :data:`COMMANDS`."""
    from distrain.cli.parsers import parser_of

    module = import_module(f"distrain.cli.{COMMANDS[name]}")
    return parser_of(name, getattr(module, f"add_{name}_options", None)), getattr(module, f"run_{name}")


def _run(name: str, function: Callable[[], int]) -> int:
    try:
        code = function()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the terminal has shown ^C in this line
        return 130
    except Exception as error:
        from distrain.cli.text import echo
        from distrain.errors import DistrainError
        from distrain.storage.runs.listing import WrongArgument
        from distrain.system.text import without_errno

        if not isinstance(error, (DistrainError, WrongArgument, OSError, ImportError)):
            raise
        echo(f"distrain {name}: error: {without_errno(error)}", sys.stderr)
        return 2
    return code
