"""A pdb that reads lines from the coordinator, and sends it what it shows. Runs in: worker."""

from __future__ import annotations

import ctypes
import io
import pdb
import sys
from typing import TYPE_CHECKING, Any, Protocol

from distrain import wire
from distrain.worker.frames import outermost_users_frame
from distrain.worker.vitals import place_of

if TYPE_CHECKING:
    from types import FrameType

    from distrain.worker.session import Session, WorkerChannel

_SENT_AT = 64 << 10
"""Characters of output that are not kept back until the next prompt."""


class Terminal(io.TextIOBase):
    """The terminal of the person who debugs this rank, as a file."""

    encoding = "utf-8"

    def __init__(self, session: Session, channel: WorkerChannel) -> None:
        self._session = session
        self._channel = channel
        self._attempt, self._rank = session.context.attempt, session.context.world_rank
        self._text = ""
        self.place = self.error = ""
        """The line at which the rank is stopped, and the exception that it has raised, if that is why."""

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._text += text
        if len(self._text) >= _SENT_AT:
            self._send_output(len(self._text))
        return len(text)

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Ask for a line. The prompt is what was written after the last line end."""
        self._send_output(self._text.rfind("\n") + 1)
        prompt, self._text = self._text, ""
        self._channel.send(
            wire.DebuggerPrompt(
                attempt=self._attempt, rank=self._rank, prompt=prompt, place=self.place, error=self.error
            )
        )
        return self._session.wait_for_debugger_input()

    def close_debugger(self) -> None:
        """Tell that the rank goes on without the debugger."""
        self._send_output(len(self._text))
        self._channel.send(wire.DebuggerClosed(attempt=self._attempt, rank=self._rank))

    def _send_output(self, length: int) -> None:
        body, self._text = self._text[:length].encode(errors="replace"), self._text[length:]
        if body:
            self._channel.send(wire.DebuggerOutput(attempt=self._attempt, rank=self._rank, body=body))


class OnClosed(Protocol):
    """Called when the debugger is closed: by ``quit``, or because the rank continues without breakpoints."""

    def __call__(self, *, by_user: bool) -> None: ...


class RemotePdb(pdb.Pdb):
    """The debugger of this rank, until the rank goes on without breakpoints. It steps over distrain's own code."""

    def __init__(self, terminal: Terminal, on_closed: OnClosed) -> None:
        console: Any = terminal
        super().__init__(stdin=console, stdout=console, skip=["distrain", "distrain.*"], nosigint=True)
        self._terminal = terminal
        self._on_closed = on_closed
        self._is_open = True
        self.is_at_prompt = False
        """True while the user looks at a frame."""

    def stop_at(self, frame: FrameType) -> None:
        """Let the user look at the frame now. Trace afterwards what the user has asked for.

        The main thread may be in this frame for long, such as in a sleep, so this does not wait for its next line.
        """
        sys.settrace(None)
        self.reset()
        self.botframe = outermost_users_frame(frame)
        self.set_step()
        self.interaction(frame, None)
        _keep_locals(frame)
        if self._is_open:
            outer: FrameType | None = frame
            while outer is not None:
                outer.f_trace = self.trace_dispatch
                outer = outer.f_back
            sys.settrace(self.trace_dispatch)

    def post_mortem(self, error: BaseException) -> None:
        """Let the user look at the frames of an exception."""
        sys.settrace(None)
        self.reset()
        innermost = error.__traceback__
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        if innermost is not None:
            self._terminal.place = place_of(innermost.tb_frame)
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

        Close the debugger. The rank goes on, and its breakpoints are ignored from now on.
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
            self._on_closed(by_user=by_user)


def _keep_locals(frame: FrameType) -> None:
    """Let the frame have the local variables that the user has assigned. A trace function does this by itself.

    From Python 3.13 on, assignments need no help (PEP 667).
    """
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
