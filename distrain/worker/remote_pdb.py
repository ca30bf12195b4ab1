"""A pdb whose terminal is the ``distrain debug`` of a person. Runs in: worker."""

from __future__ import annotations

import ctypes
import pdb
import sys
import traceback
from collections import deque
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.worker.places import outwards, place_of
from distrain.worker.user_code import RUNNER_FILES, run_rank

if TYPE_CHECKING:
    from types import FrameType

    from distrain.worker.session import Session


class RemotePdb(pdb.Pdb):
    """The pdb of this rank. It steps over distrain's own code. It is the file that pdb reads from, and writes to."""

    def __init__(self, session: Session) -> None:
        itself: Any = self
        super().__init__(stdin=itself, stdout=itself, skip=["distrain", "distrain.*"], nosigint=True)
        self._session = session
        self._error = ""
        """The exception that the rank has raised, if that is why it is stopped."""
        self._shown = ""
        self._typed: deque[bytes] = deque()
        self.is_open = False
        """True until the rank continues without breakpoints."""
        self.is_at_prompt = False
        """True while the user looks at a frame."""
        self.was_quit = False
        """True once the user has quit: further breakpoint() are passed."""

    # -- the terminal ---------------------------------------------------------------------------------------------

    def write(self, text: str) -> None:
        self._shown += text

    def flush(self) -> None:
        """Do nothing: the user sees all at the next prompt."""

    def readline(self) -> str:
        """Wait for a line, or for an empty string when the user is gone. The prompt has been written."""
        what = f"has raised {self._error}" if self._error else "has stopped"
        place = place_of(self.curframe) if self.curframe else ""
        self._say(stopped=f"{what} in {place}" if place else what)
        self._session.wait_until(lambda: self._typed)
        return self._typed.popleft().decode(errors="replace")

    def receive(self, line: bytes) -> None:
        """Take what the user has typed, nothing if they are gone."""
        self._typed.append(line)

    def _say(self, **fields: str) -> None:
        shown, self._shown = self._shown.encode(errors="replace"), ""
        self._session.send(wire.DebuggerSays, body=shown, **fields)

    # -- the debugger ---------------------------------------------------------------------------------------------

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
        if self.is_open:
            for outer, _ in traceback.walk_stack(frame):
                outer.f_trace = self.trace_dispatch
            sys.settrace(self.trace_dispatch)

    def post_mortem(self, error: BaseException) -> None:
        """Let the user look at the frames of an exception."""
        sys.settrace(None)
        self.reset()
        self._error = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.interaction(None, error.__traceback__)
        self._close()

    def interaction(self, frame: FrameType | None, *args: Any) -> None:
        self._typed.clear()  # what has come too late for an earlier prompt, such as of a user who was gone
        self.is_open = self.is_at_prompt = True
        try:
            super().interaction(frame, *args)
        finally:
            self.is_at_prompt = False

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self._close()

    def do_quit(self, arg: str) -> bool | None:
        """q(uit) | exit

        Close the debugger. The rank continues, and its breakpoints are ignored from now on.
        """
        self.was_quit = True
        self.clear_all_breaks()
        return self.do_continue(arg)

    do_q = do_exit = do_EOF = do_quit

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._say(closed=f"rank {self._session.context.world_rank} fails now" if self._error else "")


def _users_frames(frame: FrameType) -> list[FrameType]:
    """Return the frames from train_func inwards, up to the first call of distrain or to an import.

    The given frame is returned if none is the user's.
    """
    frames = list(takewhile(lambda one: one.f_code.co_name != run_rank.__name__, outwards(frame)))[::-1]
    return list(takewhile(_is_users, dropwhile(lambda one: not _is_users(one), frames))) or [frame]


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(RUNNER_FILES)
