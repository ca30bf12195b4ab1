"""The debugger of a rank: when pdb opens. Its terminal is a ``distrain debug``. Runs in: worker.

It opens in a signal handler, so it stops the main thread at any line of Python. While native code runs, the handler
waits until that returns.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distrain.system.process import DEBUG_SIGNAL

if TYPE_CHECKING:
    from types import FrameType

    from distrain.worker.remote_pdb import RemotePdb
    from distrain.worker.session import Session

_IN_CHILD = (
    "breakpoint() in a child process of the worker, such as one of a DataLoader, has no debugger; try it with "
    "num_workers=0 of the DataLoader"
)
_NO_DEBUGGER = (
    "breakpoint() in a worker needs a debugger: name a rank with RunConfig(debug_rank=0) or --debug-rank 0, or stop "
    "a rank of the running run with `distrain debug RUN -r 0`"
)


class Debugger:
    """Open pdb where this rank is, at breakpoint(), or where its code has failed.

    rank: the rank on which breakpoint() and failures open it. On other ranks breakpoint() does nothing; if there is no
    such rank, it raises RuntimeError.
    """

    def __init__(self, session: Session, rank: int | None) -> None:
        self._session = session
        self._rank = rank
        self._is_due = False
        """True if a call of distrain has to end before pdb can open."""
        self._pid = os.getpid()
        self._main = threading.get_ident()

    @cached_property
    def _pdb(self) -> RemotePdb:
        from distrain.worker.remote_pdb import RemotePdb  # it takes some milliseconds

        return RemotePdb(self._session)

    @property
    def _is_for_this_rank(self) -> bool:
        return self._rank == self._session.context.world_rank and not self._pdb.was_quit

    def install(self) -> None:
        """Set the hooks."""
        signal.signal(DEBUG_SIGNAL, self._on_signal)
        self._session.after_call = self._open_if_due
        self._session.hooks["debug"] = lambda _: signal.pthread_kill(self._main, DEBUG_SIGNAL)  # it also ends a sleep
        self._session.hooks["typed"] = lambda typed: self._pdb.receive(typed.body)
        sys.breakpointhook = self._on_breakpoint
        if self._rank is not None:
            import pdb  # it takes some milliseconds

            pdb.set_trace = self._on_breakpoint

    def after_failure(self, error: BaseException | None) -> None:
        """Open the debugger where the exception was raised, if this rank is debugged."""
        if isinstance(error, Exception) and self._is_for_this_rank:
            self._pdb.post_mortem(error)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pdb.is_at_prompt:
            if not self._session.is_in_call:  # it evaluates what the user has typed
                raise KeyboardInterrupt
        elif self._session.is_in_call:
            self._is_due = True
        elif frame is not None:
            self._pdb.stop_in(frame)

    def _open_if_due(self) -> None:
        if self._is_due and not self._session.is_in_call and threading.current_thread() is threading.main_thread():
            self._is_due = False
            self._pdb.stop_in(sys._getframe())

    def _on_breakpoint(self, *args: Any, **options: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*args, **options)
        if os.getpid() != self._pid and (self._rank is None or self._is_for_this_rank):
            raise RuntimeError(_IN_CHILD)
        if self._pdb.is_open or self._is_for_this_rank:
            self._pdb.stop_at(sys._getframe(1))
        elif self._rank is None:
            raise RuntimeError(_NO_DEBUGGER)
        return None
