"""The debugger of a rank: when pdb opens. Its terminal is a ``distrain debug``. Runs in: worker.

It opens in a signal handler, so it stops the main thread at any line of Python. While native code runs, the handler
waits until that returns. debugpy, for an editor, needs no signal: it runs in threads of its own. Both send and get
bytes over the channel of the worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.system.background import start_hidden_thread
from distrain.system.process import DEBUG_SIGNAL
from distrain.worker.user_code import OWN_FILES

if TYPE_CHECKING:
    from types import FrameType

    from distrain.worker.remote_pdb import RemotePdb
    from distrain.worker.session import Session

_READ_BYTES = 64 << 10
_POLL_S = 0.01
"""Seconds from one look for messages of an editor to the next."""
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
        self._editor: _Editor | None = None
        self._pid = os.getpid()
        self._main = threading.get_ident()

    @cached_property
    def _pdb(self) -> RemotePdb:
        from distrain.worker.remote_pdb import RemotePdb  # it takes some milliseconds

        return RemotePdb(self._session)

    @property
    def _is_for_this_rank(self) -> bool:
        return self._rank == self._session.context.world_rank and not self._pdb.was_quit

    @property
    def has_editor(self) -> bool:
        """True while an editor is attached. Its thread reads all messages: other threads may be stopped with a lock."""
        return self._editor is not None and self._editor.is_attached and os.getpid() == self._pid

    def install(self) -> None:
        """Set the hooks."""
        signal.signal(DEBUG_SIGNAL, self._on_signal)
        self._session.after_call = self._open_if_due
        self._session.on_debugger_input = self._on_input
        sys.breakpointhook = self._on_breakpoint
        if self._rank is not None:
            import pdb  # it takes some milliseconds

            pdb.set_trace = self._on_breakpoint

    def after_failure(self, error: BaseException | None) -> None:
        """Open the debugger where the exception was raised, if this rank is debugged."""
        if isinstance(error, Exception) and self._is_for_this_rank and not self.has_editor:
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

    def _on_input(self, message: wire.DebuggerInput) -> None:
        pdb, editor = self._pdb, self._editor
        if message.opens == "pdb":
            signal.pthread_kill(self._main, DEBUG_SIGNAL)  # it also ends a sleep
        elif message.opens:
            self._editor = _Editor(self._session)
        elif editor is not None and not pdb.is_open:
            editor.receive(message.body)
        else:
            pdb.receive(message.body)

    def _on_breakpoint(self, *args: Any, **options: Any) -> Any:
        if self.has_editor:
            import pydevd

            return pydevd.settrace(suspend=True, trace_only_current_thread=True, stop_at_frame=sys._getframe(1))
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*args, **options)
        if os.getpid() != self._pid and (self._rank is None or self._is_for_this_rank):
            raise RuntimeError(_IN_CHILD)
        if self._pdb.is_open or self._is_for_this_rank:
            self._pdb.stop_at(sys._getframe(1))
        elif self._rank is None:
            raise RuntimeError(_NO_DEBUGGER)
        return None


class _Editor:
    """The debugpy of this rank, and its connection to the editor, over the channel of the worker.

    debugpy is told a pair of sockets instead of an address, so that no port is opened.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._socket, self._debugpys = socket.socketpair()
        self._stopped = ""
        self.is_attached = False
        start_hidden_thread(self._run)

    def receive(self, data: bytes) -> None:
        """Pass on what the editor has sent; nothing if it is gone."""
        with contextlib.suppress(OSError):  # debugpy has ended
            if data:
                self._socket.sendall(data)
            else:
                self._socket.shutdown(socket.SHUT_RDWR)

    def before_send(self, message: dict[str, Any]) -> None:
        """Note whether the rank is stopped. debugpy calls this before it sends a message."""
        if message.get("event") in ("stopped", "continued"):
            self._stopped = "has stopped" if message["event"] == "stopped" else ""

    def after_receive(self, message: dict[str, Any]) -> None:
        """Do nothing. debugpy calls this with the messages of the editor."""

    def _run(self) -> None:
        thread: Any = threading.current_thread()
        thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # debugpy must not stop it
        try:
            pydevd = self._start()
        except (ImportError, RuntimeError) as error:
            self._session.send(wire.DebuggerSays, closed=str(error))
            return
        data = os.getcwd().encode()
        while data:
            self._session.send(wire.DebuggerSays, body=data, stopped=self._stopped)
            while not select.select([self._socket], [], [], _POLL_S)[0]:
                self._session.poll()
            data = self._socket.recv(_READ_BYTES)
        self.is_attached = False
        pydevd.stoptrace()
        self._socket.close()
        self._session.send(wire.DebuggerSays, closed="")

    def _start(self) -> Any:
        """Start debugpy, and return its engine. Raises ImportError or RuntimeError that says what to do."""
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # or else it warns of modules of Python itself
        hook = sys.breakpointhook
        try:
            import debugpy.server  # it lets pydevd be imported
            import pydevd
        except ImportError as error:
            where = f"on {socket.gethostname()}, the host of this rank"
            raise ImportError(f"debugpy is needed {where}: `pip install 'distrain[debug]'` there ({error})") from None
        finally:
            sys.breakpointhook = hook  # pydevd has replaced it
        if pydevd.get_global_debugger() is not None:
            raise RuntimeError("train_func has started debugpy itself; attach to that")
        pydevd.start_client = lambda host, port: self._debugpys
        pydevd.settrace(
            suspend=False,
            wait_for_ready_to_run=False,
            notify_stdin=False,
            protocol="dap",
            dont_trace_start_patterns=(OWN_FILES[0], os.path.dirname(debugpy.__file__)),
        )
        sys.modules["pydevd_tracing"].restore_sys_set_trace_func()  # or else it warns of each fork
        pydevd.add_dap_messages_listener(self)
        os.register_at_fork(after_in_child=_forget_debugpy)
        self.is_attached = True
        return pydevd


def _forget_debugpy() -> None:
    """Let a child process run past the breakpoints: its editor cannot be reached from there."""
    import pydevd

    pydevd.settrace_forked(setup_tracing=False)
    threading.settrace(None)
