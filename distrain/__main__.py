"""The entry point of ``distrain`` and ``python -m distrain``; see :mod:`distrain.cli.main`. Runs in: coordinator."""

from __future__ import annotations

import sys
from typing import NoReturn

from distrain.launch import clean_path

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    clean_path(sys.argv[0])
    user_path = list(sys.path)
    from distrain.cli.main import run_main

    sys.exit(run_main(sys.argv[1:], user_path))


if __name__ == "__main__":
    main()
