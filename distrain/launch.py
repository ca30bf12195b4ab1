"""The entry point of ``python -m distrain.launch``; see :mod:`distrain.cli.run.command`. Runs in: coordinator."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    clean_path()
    user_path = list(sys.path)
    from distrain.cli.run.command import run_command

    sys.exit(run_command(arguments, user_path))


def clean_path(program: str | None = None) -> None:
    """Remove the working directory, or that of a program, from the beginning of sys.path, before further imports.

    Python puts it there, where a user's ``queue.py`` would shadow the standard library's. The workers get it back.
    """
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        sys.exit("distrain: error: the working directory was deleted: change to another one with cd")
    own = None if program is None else os.path.dirname(os.path.realpath(program))
    if sys.path[:1] and sys.path[0] in ("", directory, own):
        del sys.path[0]


if __name__ == "__main__":
    main()
