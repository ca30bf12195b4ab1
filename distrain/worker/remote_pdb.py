"""A pdb that reads lines from the coordinator, and sends it what it shows. Runs in: worker."""

from __future__ import annotations

import ctypes
import io
import pdb
import sys
import traceback
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.worker.places import outwards, place_of
from distrain.worker.user_code import OWN_FILES, run_rank

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from distrain.worker.session import Session


class _Terminal(io.TextIOBase):
    """The terminal of the person who debugs this rank, as a file."""

    encoding = "utf-8"

    def __init__(self, session: Session) -> None:
        self._session = session
        self._text = ""
        self.place = self.error = ""
        """The line at which the rank is stopped, and the exception that it has raised, if that is why."""

    def write(self, text: str) -> int:
        self._text += text
        return len(text)

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Ask for a line. The prompt is what was written after the last line end."""
        shown, newline, prompt = self._text.rpartition("\n")
        self.send(shown + newline, prompt=prompt, place=self.place, error=self.error)
        return self._session.wait_for_debugger_input()

    def close_debugger(self) -> None:
        """Tell that the rank continues without the debugger."""
        self.send(self._text, closed="")

    def send(self, shown: str, **fields: Any) -> None:
        self._text = ""
        self._session.send(wire.DebuggerSays, body=shown.encode(errors="replace"), **fields)


class RemotePdb(pdb.Pdb):
    """The debugger of this rank, until the rank continues without breakpoints. It steps over distrain's own code.

    on_closed: called with True if the user has closed it, with False if the rank continues without breakpoints.
    """

    def __init__(self, session: Session, on_closed: Callable[[bool], None]) -> None:
        console: Any = _Terminal(session)
        self._terminal: _Terminal = console
        super().__init__(stdin=console, stdout=console, skip=["distrain", "distrain.*"], nosigint=True)
        self._on_closed = on_closed
        self._is_open = True
        self.is_at_prompt = False
        """True while the user looks at a frame."""

    def stop_in(self, frame: FrameType) -> None:
        """Let the user look at the innermost frame of theirs. ``frame``: the innermost one of all."""
        self.stop_at(_users_frames(frame)[-1])

    def stop_at(self, frame: FrameType) -> None:
        """Let the user look at the frame now. Trace afterwards what the user has asked for.

        The main thread may be in this frame for long, such as in a sleep, so this does not wait for its next line.
        """
        sys.settrace(None)
        self.reset()
        self.botframe = _users_frames(frame)[0]
        self.set_step()
        self.interaction(frame, None)
        if sys.version_info < (3, 13):  # let the frame have the variables that the user has assigned; later: PEP 667
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        if self._is_open:
            for outer, _ in traceback.walk_stack(frame):
                outer.f_trace = self.trace_dispatch
            sys.settrace(self.trace_dispatch)

    def post_mortem(self, error: BaseException) -> None:
        """Let the user look at the frames of an exception."""
        sys.settrace(None)
        self.reset()
        for frame, _ in traceback.walk_tb(error.__traceback__):
            self._terminal.place = place_of(frame)
        self._terminal.error = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.interaction(None, error.__traceback__)
        self._close(by_user=False)

    def interaction(self, frame: FrameType | None, *args: Any) -> None:
        if frame is not None:
            self._terminal.place = place_of(frame)
        self.is_at_prompt = True
        try:
            super().interaction(frame, *args)
        finally:
            self.is_at_prompt = False

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self._close(by_user=False)

    def do_quit(self, arg: str) -> bool:
        """q(uit) | exit

        Close the debugger. The rank continues, and its breakpoints are ignored from now on.
        """
        self.clear_all_breaks()
        super().set_continue()
        self._close(by_user=True)
        return True

    do_q = do_exit = do_EOF = do_quit

    def do_interact(self, arg: str) -> None:
        """Say that there are no prompts within a prompt."""
        self.error("it works only in the pdb of a terminal; statements can be typed here, too")

    do_debug = do_interact

    def _close(self, *, by_user: bool) -> None:
        if self._is_open:
            self._is_open = False
            self._terminal.close_debugger()
            self._on_closed(by_user)


def _users_frames(frame: FrameType) -> list[FrameType]:
    """Return the frames from train_func inwards, up to the first call of distrain or to an import.

    The given frame is returned if none is the user's.
    """
    frames = list(takewhile(lambda one: one.f_code.co_name != run_rank.__name__, outwards(frame)))[::-1]
    return list(takewhile(_is_users, dropwhile(lambda one: not _is_users(one), frames))) or [frame]


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(OWN_FILES)
