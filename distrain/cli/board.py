"""``distrain board``: all runs of a storage path in the browser. Runs in: coordinator."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.requesting import HOST, listener_at, request
from distrain.cli.text import echo
from distrain.storage.runs.listing import WrongArgument

if TYPE_CHECKING:
    import argparse


def add_board_options(add: parsers.Add) -> None:
    """Add the options of ``distrain board``."""
    add("--port", type=parsers.port, default=0, metavar="N", help="the port (default: a free one)")


def run_board(options: argparse.Namespace) -> int:
    """Serve the board."""
    from distrain.board.runs import Board
    from distrain.system.imports import require

    storage = parsers.storage_of(options)
    if not isinstance(storage, Path):
        raise WrongArgument(f"the board shows local runs only; `distrain ls {storage}` lists those there")
    if options.path is None:
        storage.mkdir(parents=True, exist_ok=True)  # the first run has not made it yet
    board = Board(storage)
    board.look()
    server = require("distrain.board.server")
    listener = listener_at(options.port)
    token = secrets.token_urlsafe(24)
    echo(f"distrain board of {storage}: Ctrl-C ends it\n")
    echo(f"    http://{HOST}:{listener.getsockname()[1]}/{token}/\n")
    server.serve(board, listener, token, request)
    return 0
