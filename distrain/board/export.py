"""The board as HTML, for the server or to keep. Runs in: the process of the board."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from distrain.errors import StorageError
from distrain.page.writer import fill, write_page
from distrain.storage.files import write_output
from distrain.storage.retention import LOWEST_IS_BEST

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from distrain.board.runs import Board

_POINTS, _MOST_POINTS = 400_000, 300
"""Points of all curves together, which bounds the size of the file, and of one."""


def board_document(board: Board, data: Mapping[str, Any], *, is_live: bool = False, pages: str = "") -> str:
    """Return the HTML of the board.

    data: of the board. is_live: whether a server answers what the page asks; otherwise it asks nothing.
    pages: the folder beside the document that has the pages of the runs, if there is one.
    """
    facts = {"storage": str(board.storage), "isLive": is_live, "pages": pages, "lowestIsBest": LOWEST_IS_BEST.pattern}
    return fill("board", {**data, **facts})


def export(board: Board, target: Path) -> Path:
    """Write the board as HTML that needs no server, and return its path. Raise OSError.

    target: a file that ends with ``.html``, or a directory that gets the pages of the runs, too.
    """
    board.look()
    while board.read(1.0):
        pass
    rows = board.data(0, [])["rows"]
    pages, path = "", target
    if target.suffix != ".html":
        pages, path = "runs", target / "index.html"
        (target / pages).mkdir(parents=True, exist_ok=True)
        for row in rows:
            with contextlib.suppress(StorageError):  # it has just been deleted
                write_page(board[row["name"]].path, target / pages / f"{row['name']}.html")
    points = max(16, min(_MOST_POINTS, _POINTS // max(1, sum(len(row["metrics"]) for row in rows))))
    text = board_document(board, board.data(0, None, [row["name"] for row in rows], points), pages=pages)
    write_output(path, text.encode("utf-8", "replace"))
    return path
