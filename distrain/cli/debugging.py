"""``distrain debug``: pdb on one rank of a running run. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from typing import TYPE_CHECKING

from distrain import wire
from distrain.cli import parsers
from distrain.cli.requesting import request
from distrain.cli.text import echo
from distrain.coordinator.requests import DEBUG, STACKS
from distrain.system.text import without_controls
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    import argparse

    from distrain.storage.runs.listing import Run

_NOTICE_S = 1.0
"""Seconds to wait for the rank before a line says where it is."""


def debug_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain debug``."""
    parser = parsers.make_run_parser(
        "debug",
        "Open pdb on a rank of a running run, at its current line, or at the breakpoint() where it waits. Other ranks "
        "keep running until they need it. Run it on the machine of fit().",
        "  distrain debug last -r 3",
    )
    parser.add_argument("-r", "--rank", type=parsers.number, default=0, metavar="N", help="the rank (default: 0)")
    return parser


def run_debug(options: argparse.Namespace) -> int:
    """Debug a rank until the debugger is closed."""
    run = parsers.run_of(options)
    channel = connect(run, options.rank)
    try:
        return _Conversation(channel, options.rank).hold(run)
    finally:
        channel.close()


def connect(run: Run, rank: int) -> Channel:
    """Return a connection to the debugger of a rank. Raises NoSuchRun."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = os.path.join(folder, "debug.sock")
        listener.bind(path)
        listener.listen(1)
        request(run, DEBUG, f"{rank} {path}")
        fd = listener.accept()[0].detach()
    return Channel(fd, fd)


class _Conversation:
    """The conversation with the debugger of a rank."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._is_new = True
        self._is_asked_to_stop = True
        """True until the rank stops."""

    def hold(self, run: Run) -> int:
        """Show what the debugger says, and send it what the user types. Return the exit code."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() uses it, for editing and the history
        frames = self._channel.wait(_NOTICE_S)
        if not frames and not self._channel.at_end:
            echo(
                f"rank {self._rank} stops when it is back from native code, or from a call of distrain; Ctrl-C ends "
                f"the wait\n{request(run, STACKS)}"
            )
        error = ""
        while frames or not self._channel.at_end:
            for frame in frames:
                message = frame.message()
                assert isinstance(message, wire.DebuggerSays)
                sys.stdout.write(without_controls(message.body.decode(errors="replace")))
                if message.closed is not None:
                    echo(message.closed or f"rank {self._rank} {'fails now' if error else 'continues'}")
                    return 0
                if message.prompt is not None:
                    error = message.error
                    self._answer(message)
            frames = self._listen()
        echo("the run has ended")
        return 0

    def _answer(self, message: wire.DebuggerSays) -> None:
        """Have the user answer the prompt. Ctrl-C drops what they have typed."""
        self._is_asked_to_stop = False
        if self._is_new:
            self._is_new = False
            echo(
                f"rank {self._rank} has raised {message.error}\nLook around; q lets it fail."
                if message.error
                else f"rank {self._rank} is stopped. c: continue, q: close the debugger; Ctrl-C while it runs: stop it "
                "again"
            )
        line = None
        while line is None:
            try:
                line = input(message.prompt) + "\n"
            except KeyboardInterrupt:
                print()
            except EOFError:
                print()
                line = ""
        self._send(line)

    def _listen(self) -> list[wire.Frame]:
        """Wait for the debugger. Ctrl-C stops the rank again; if that takes too long, a second one raises."""
        try:
            return self._channel.wait()
        except KeyboardInterrupt:
            if self._is_asked_to_stop:
                raise
            self._is_asked_to_stop = True
            self._send(None)
            return []

    def _send(self, line: str | None) -> None:
        with contextlib.suppress(ConnectionError):  # the run has ended, and its last words can still be read
            self._channel.send(wire.DebuggerInput(attempt=0, rank=self._rank, line=line))
