"""``distrain debug``: pdb on one rank of a running run. Runs in: coordinator.

The process is also started by a run with ``debug_rank``, on the terminal of that run.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from typing import TYPE_CHECKING

from distrain import wire
from distrain.cli import parsers
from distrain.cli.requesting import paths_of, request
from distrain.coordinator.requests import DEBUG, STACKS
from distrain.runs.listing import NoSuchRun, find_run, storage_at
from distrain.system import process
from distrain.system.unix_sockets import listen_at
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    import argparse

    from distrain.runs.listing import Run

_NOTICE_S = 1.0
"""Seconds to wait for the rank before a line says where it is."""
_BANNER = "rank {rank} is stopped. c: continue, q: close the debugger, Ctrl-C: stop it again while it runs"


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
    channel = _connect(run, options.rank)
    try:
        return _Session(run, channel, options.rank).serve()
    finally:
        channel.close()


def main(arguments: list[str]) -> None:
    """Debug a rank on the terminal of its run. ``arguments``: those of ``distrain debug``."""
    process.take_terminal()
    options = debug_parser().parse_args(arguments)
    run = find_run(options.run, storage_at(None))
    with contextlib.suppress(KeyboardInterrupt):
        _Session(run, _connect(run, options.rank), options.rank).serve()


def _connect(run: Run, rank: int) -> Channel:
    """Return a connection to the debugger of a rank. Raises NoSuchRun."""
    token = uuid.uuid4().hex
    path = paths_of(run).debugger(token)
    path.parent.mkdir(exist_ok=True)
    with listen_at(path) as listener:
        try:
            if problem := request(run, DEBUG, str(rank), token):
                raise NoSuchRun(problem)
            fd = listener.accept()[0].detach()
        finally:
            path.unlink(missing_ok=True)
    return Channel(fd, fd)


class _Session:
    """The conversation with the debugger of a rank."""

    def __init__(self, run: Run, channel: Channel, rank: int) -> None:
        self._run = run
        self._channel = channel
        self._rank = rank
        self._attempt = 0
        self._is_new = True

    def serve(self) -> int:
        """Show what the debugger says, and send it what the user types. Return the exit code."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() uses it, for editing and the history
        self._announce_wait()
        while not self._channel.at_end:
            try:
                frames = self._channel.wait()
            except KeyboardInterrupt:
                self._channel.send(wire.BreakIn(attempt=self._attempt, rank=self._rank))
                continue
            for frame in frames:
                message = frame.message()
                if isinstance(message, wire.DebuggerClosed):
                    print(message.why or f"rank {self._rank} goes on", flush=True)
                    return 0
                self._handle(message)
        print("the run has ended", flush=True)
        return 0

    def _announce_wait(self) -> None:
        """Show where the rank is if it does not stop at once: native code cannot be interrupted."""
        frames = self._channel.wait(_NOTICE_S)
        for frame in frames:
            self._handle(frame.message())
        if not frames:
            where = request(self._run, STACKS)
            print(f"rank {self._rank} stops when it is back from native code, or from a call of distrain:\n{where}")

    def _handle(self, message: wire.Message) -> None:
        match message:
            case wire.DebuggerOutput(body=body):
                self._greet()
                sys.stdout.write(body.decode(errors="replace"))
                sys.stdout.flush()
            case wire.DebuggerPrompt(prompt=prompt, attempt=attempt):
                self._greet()
                self._attempt = attempt
                line = _input(prompt)
                self._channel.send(wire.DebuggerInput(attempt=attempt, rank=self._rank, line=line))

    def _greet(self) -> None:
        if self._is_new:
            print(_BANNER.format(rank=self._rank))
            self._is_new = False


def _input(prompt: str) -> str:
    """Return a line with its end, or nothing at the end of the input."""
    while True:
        try:
            return input(prompt) + "\n"
        except EOFError:
            print()
            return ""
        except KeyboardInterrupt:
            print()
