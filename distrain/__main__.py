"""The entry point of ``distrain`` and ``python -m distrain``; see :mod:`distrain.cli.main`. Runs in: coordinator."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line and exit with its code.

    Python puts the working directory or that of the command first on sys.path, where a user's ``queue.py`` would shadow
    the standard library's. It is removed before any other import.
    """
    user_path = list(sys.path)
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        sys.exit("distrain: error: the working directory was deleted: change to another one with cd")
    if sys.path[:1] in ([""], [directory], [os.path.dirname(os.path.realpath(sys.argv[0]))]):
        del sys.path[0]
        user_path = list(sys.path)
    from distrain.cli.main import run_main

    sys.exit(run_main(sys.argv[1:], user_path))


if __name__ == "__main__":
    main()
