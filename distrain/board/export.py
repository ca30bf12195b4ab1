"""The board as HTML, for the server or to keep. Runs in: the process of the board."""

from __future__ import annotations

import contextlib
import warnings
from html import escape
from typing import TYPE_CHECKING

from distrain.errors import StorageError
from distrain.page.writer import fill, write_page
from distrain.storage.files import write_atomically
from distrain.system import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from distrain.board.runs import Board

_POINTS, _MOST_POINTS = 400_000, 300
"""Points of all curves together, which bounds the size of the file, and of one."""


def board_document(board: Board, metrics: Sequence[str] | None, *, points: int, **more: str) -> str:
    """Return the HTML of the board, with the curves of these metrics, or (None) of all.

    more: ``token``: of the server that answers the page; without one, nothing in the page asks a server. ``pages``: if
    not empty, the pages of the runs are beside the document.
    """
    data = board.data(metrics=metrics, most=points)
    facts = {"storage": str(board.storage), "metric": board.metric(), "version_of_distrain": __version__}
    return fill("board", {**data, **facts, **more}, title=escape(board.storage.name))


def export(board: Board, target: Path) -> Path:
    """Write the board as HTML that needs no server, and return its path. Raise OSError.

    target: a file that ends with ``.html``, or a directory that gets the pages of the runs, too.
    """
    warnings.simplefilter("ignore")  # damaged lines of metrics
    board.look()
    while board.read(1.0):
        pass
    has_pages = target.suffix != ".html"
    path = target / "index.html" if has_pages else target
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = board.data(metrics=[])["rows"]
    if has_pages:
        (target / "runs").mkdir(exist_ok=True)
        for row in rows:
            with contextlib.suppress(StorageError):  # it has just been deleted
                write_page(board[row["name"]].path, target / "runs" / f"{row['name']}.html")
    curves = sum(len(row["metrics"]) for row in rows)
    points = max(16, min(_MOST_POINTS, _POINTS // max(1, curves)))
    text = board_document(board, None, points=points, pages="runs" if has_pages else "")
    write_atomically(path, text.encode("utf-8", "replace"), sync=False)
    return path
