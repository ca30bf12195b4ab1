"""``distrain debug``: pdb on one rank of a running run. Runs in: coordinator.

The process is also started by a run with ``debug_rank``, on the terminal of that run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import uuid
from typing import TYPE_CHECKING

from distrain import wire
from distrain.cli import parsers
from distrain.cli.requesting import paths_of, request
from distrain.cli.text import echo
from distrain.coordinator.requests import DEBUG, STACKS
from distrain.errors import DistrainError
from distrain.storage.runs.listing import NoSuchRun, find_run, storage_at
from distrain.system import process
from distrain.system.text import without_controls
from distrain.wire.channel import Channel
from distrain.wire.unix_sockets import listen_at

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from distrain.storage.runs.listing import Run

_NOTICE_S = 1.0
"""Seconds to wait for the rank before a line says where it is."""
_STOPPED = "rank {rank} is stopped. c: continue, q: close the debugger; Ctrl-C while it runs: stop it again"
_FAILED = "rank {rank} has raised {error}\nLook around; q lets it fail."


def debug_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain debug``."""
    parser = parsers.make_parser(
        "debug",
        "Open pdb on a rank of a running run, where that is now; or at breakpoint(), if it waits there. Other ranks go "
        "on until they need it. Run it on the machine of fit().",
        "  distrain debug last -r 3",
    )
    parsers.add_run(parser)
    parser.add_argument("-r", "--rank", type=parsers.number, default=0, metavar="N", help="the rank (default: 0)")
    return parser


def run_debug(options: argparse.Namespace) -> int:
    """Debug a rank until the debugger is closed."""
    run = parsers.run_of(options)
    channel = connect(run, options.rank)
    try:
        return _Session(run, channel, options.rank).serve()
    finally:
        channel.close()


def main(arguments: list[str]) -> None:
    """Debug a rank on the terminal of its run. ``arguments``: those of ``distrain debug``."""
    process.leave_group()
    process.take_terminal()
    options = debug_parser().parse_args(arguments)
    try:
        run = find_run(options.run, storage_at(None))
        _Session(run, connect(run, options.rank), options.rank).serve()
    except KeyboardInterrupt:
        pass
    except (DistrainError, NoSuchRun, OSError) as error:
        echo(f"distrain debug: error: {error}", sys.stderr)


def connect(run: Run, rank: int) -> Channel:
    """Return a connection to the debugger of a rank. Raises NoSuchRun."""
    token = uuid.uuid4().hex
    path = paths_of(run).debugger(token)
    path.parent.mkdir(exist_ok=True)
    with listen_at(path) as listener:
        try:
            if problem := request(run, DEBUG, f"{rank} {token}"):
                raise NoSuchRun(problem)
            fd = listener.accept()[0].detach()
        finally:
            path.unlink(missing_ok=True)
    return Channel(fd, fd)


class _NewsArrived(Exception):
    """The run has sent something while the user was typing."""


class _Session:
    """The conversation with the debugger of a rank."""

    def __init__(self, run: Run, channel: Channel, rank: int) -> None:
        self._run = run
        self._channel = channel
        self._rank = rank
        self._prompt: wire.DebuggerPrompt | None = None
        self._error = ""
        self._is_new = True
        self._is_asked_to_stop = True
        """True until the rank stops."""

    def serve(self) -> int:
        """Show what the debugger says, and send it what the user types. Return the exit code."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() uses it, for editing and the history
        frames = self._channel.wait(_NOTICE_S)
        if not frames and not self._channel.at_end:
            self._announce_wait()
        why = None
        while why is None and not self._channel.at_end:
            for frame in frames:
                why = self._handle(frame.message())
            frames = [] if why is not None else self._ask() if self._prompt else self._listen()
        echo(why or "the run has ended")
        return 0

    def _announce_wait(self) -> None:
        """Show where the rank is, which does not stop at once: native code cannot be interrupted."""
        where = request(self._run, STACKS)
        echo(
            f"rank {self._rank} stops when it is back from native code, or from a call of distrain; Ctrl-C ends the "
            f"wait\n{where}"
        )

    def _handle(self, message: wire.Message) -> str | None:
        """Show what the debugger says. Return why the conversation is over, if it is."""
        if isinstance(message, wire.DebuggerClosed):
            return message.why or f"rank {self._rank} {'fails now' if self._error else 'goes on'}"
        match message:
            case wire.DebuggerOutput(body=body):
                sys.stdout.write(without_controls(body.decode(errors="replace")))
                sys.stdout.flush()
            case wire.DebuggerPrompt(error=error):
                self._prompt, self._error, self._is_asked_to_stop = message, error, False
                self._greet(error)
        return None

    def _greet(self, error: str) -> None:
        if self._is_new:
            echo((_FAILED if error else _STOPPED).format(rank=self._rank, error=error))
            self._is_new = False

    def _listen(self) -> list[wire.Frame]:
        """Wait for the debugger. Ctrl-C stops the rank again; if that takes too long, a second one raises."""
        try:
            return self._channel.wait()
        except KeyboardInterrupt:
            if self._is_asked_to_stop:
                raise
            self._is_asked_to_stop = True
            self._channel.send(wire.BreakIn(attempt=0, rank=self._rank))
            return []

    def _ask(self) -> list[wire.Frame]:
        """Have the user answer the prompt. Return what has arrived instead: the rank may end meanwhile."""
        assert self._prompt is not None
        try:
            with _interrupted_by(self._channel.read_fd):
                line = input(self._prompt.prompt) + "\n"
        except _NewsArrived:
            print()
            return self._channel.receive()
        except KeyboardInterrupt:
            print()
            return []
        except EOFError:
            print()
            line = ""
        attempt, self._prompt = self._prompt.attempt, None
        self._channel.send(wire.DebuggerInput(attempt=attempt, rank=self._rank, line=line))
        return []


@contextlib.contextmanager
def _interrupted_by(fd: int) -> Iterator[None]:
    """Raise _NewsArrived within the block when the descriptor can be read."""

    def interrupt(number: int, frame: object) -> None:
        raise _NewsArrived

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    previous = signal.signal(signal.SIGIO, interrupt)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        if select.select([fd], [], [], 0)[0]:
            raise _NewsArrived
        yield
    finally:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, previous)
