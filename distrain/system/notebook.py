"""The notebook whose kernel this process is, and its cells. Runs in: coordinator.

It asks IPython, which a kernel has imported; distrain does not import it elsewhere.
"""

from __future__ import annotations

import re
import sys
import uuid
from types import TracebackType
from typing import Any

from distrain.system.text import OWN_FILES

_FILE_OF_FRAME = re.compile(r'(?<=File ")[^"\n]+(?=", line )')


def _shell() -> Any:
    """Return IPython's shell, or None outside of IPython."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if ask is None else ask()


def is_kernel() -> bool:
    """Tell if this process is the kernel of a notebook: of Jupyter, VS Code, Colab and others."""
    return getattr(_shell(), "kernel", None) is not None


# -- cells -----------------------------------------------------------------------------------------------------------


def cell_of(file: str) -> str | None:
    """Return the name of a cell, such as ``Cell In[3]``, by the file name of its code; None for other files."""
    name = getattr(getattr(_shell(), "compile", None), "format_code_name", None)
    parts = None if name is None else name(file)
    return None if parts is None else " ".join(parts)


def with_cells(text: str) -> str:
    """Return a traceback in which cells have their names."""
    return _FILE_OF_FRAME.sub(lambda found: cell_of(found[0]) or found[0], text)


# -- output ----------------------------------------------------------------------------------------------------------


class Block:
    """An output of the current cell that can be replaced."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._is_shown = False

    def show(self, text: str) -> None:
        """Show this in place of what the block has shown."""
        data = {"text/plain": text}
        _shell().display_pub.publish(data=data, transient={"display_id": self._id}, update=self._is_shown)
        self._is_shown = True


def hide_own_lines(error: BaseException) -> None:
    """Have IPython show an exception without the lines of distrain that it came through; elsewhere, do nothing."""
    show = getattr(getattr(_shell(), "InteractiveTB", None), "structured_traceback", None)
    if show is not None:
        error._render_traceback_ = lambda: show(type(error), error, _users_part(error.__traceback__))  # type: ignore[attr-defined]


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without frames of distrain."""
    if trace is None:
        return None
    rest, frame = _users_part(trace.tb_next), trace.tb_frame
    is_own = frame.f_code.co_filename.startswith(OWN_FILES)
    return rest if is_own else TracebackType(rest, frame, trace.tb_lasti, trace.tb_lineno)
