"""The entry point of ``python -m distrain.launch``; see :mod:`distrain.cli.run.command`. Runs in: coordinator."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code.

    ``python -m`` puts the working directory first on sys.path, where a user's ``queue.py`` would shadow the standard
    library's. It is removed before any other import. The workers get it back.
    """
    user_path = list(sys.path)
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        sys.exit("distrain: error: the working directory was deleted: change to another one with cd")
    if sys.path[:1] in ([""], [directory]):
        del sys.path[0]
    from distrain.cli.run.command import run_command

    sys.exit(run_command(arguments, user_path))


if __name__ == "__main__":
    main()
