"""``distrain debug``: pdb on one rank of a running run. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from distrain import wire
from distrain.cli import parsers
from distrain.cli.requesting import connect, request
from distrain.cli.text import echo
from distrain.coordinator.requests import DEBUG, STACKS, TYPED
from distrain.storage.runs.listing import NoSuchRun
from distrain.system.text import without_controls

if TYPE_CHECKING:
    import argparse

    from distrain.wire.channel import Channel

_NOTICE_S = 1.0
"""Seconds to wait for the rank before a line says where it is."""


def add_debug_options(add: parsers.Add) -> None:
    """Add the options of ``distrain debug``."""
    add("-r", "--rank", type=parsers.number, default=0, metavar="N", help="the rank (default: 0)")


def run_debug(options: argparse.Namespace) -> int:
    """Debug a rank until pdb is closed. Raises NoSuchRun."""
    run, rank = parsers.run_of(options), options.rank
    with contextlib.closing(connect(run)) as channel:
        terminal = Terminal(channel, rank)
        terminal.send(DEBUG)
        said = terminal.hear(_NOTICE_S)
        if not said and not channel.at_end:
            echo(f"rank {rank} answers when native code, or a call of distrain, returns; Ctrl-C ends the wait")
            echo(request(run, STACKS))
            said = terminal.hear()
        if not said or said[0].closed is not None:
            raise NoSuchRun(said[0].closed or f"rank {rank} continues" if said else "the run has ended")
        terminal.relay(said)
    return 0


class Terminal:
    """A person at a terminal, who uses the pdb of a rank."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel = channel
        self._rank = rank

    def relay(self, said: list[wire.DebuggerSays]) -> None:
        """Relay what pdb and the person tell each other, until one of them is gone. ``said``: its first messages."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() uses it, for editing and the history
        echo(
            f"rank {self._rank} {said[0].stopped}. c: continue to the next breakpoint (Ctrl-C stops before it), or "
            "leave pdb if none is set; q: leave pdb"
        )
        while said or not self._channel.at_end:
            for message in said:
                self._show(message)
                if message.closed is not None:
                    echo(message.closed or f"rank {self._rank} continues")
                    return
            said = self._listen()
        echo(f"the connection to rank {self._rank} has ended; `distrain ls` says whether its run has")

    def hear(self, timeout_s: float | None = None) -> list[wire.DebuggerSays]:
        """Wait for pdb. Raise NoSuchRun if the run has none for this person."""
        messages = [frame.message() for frame in self._channel.wait(timeout_s)]
        for message in messages:
            if isinstance(message, wire.OrderDone):
                raise NoSuchRun(message.failed)
        return [message for message in messages if isinstance(message, wire.DebuggerSays)]

    def _listen(self) -> list[wire.DebuggerSays]:
        """Wait for pdb. Ctrl-C stops the rank again; if that takes too long, a second one raises."""
        try:
            return self.hear()
        except KeyboardInterrupt:
            self.send(DEBUG)
            return self.hear()

    def send(self, what: str, body: bytes = b"") -> None:
        """Have the rank open pdb, or tell pdb what the person has typed."""
        with contextlib.suppress(ConnectionError):  # the run has ended, and its last words can still be read
            self._channel.send(wire.Ask(attempt=0, rank=self._rank, what=what, body=body))

    def _show(self, message: wire.DebuggerSays) -> None:
        """Show what pdb says, and have the person answer its prompt."""
        text = without_controls(message.body.decode(errors="replace"))
        lines, newline, prompt = text.rpartition("\n")
        sys.stdout.write(lines + newline)
        if message.stopped:
            self.send(TYPED, _answer(prompt))


def _answer(prompt: str) -> bytes:
    """Return a line of the user, nothing after Ctrl-D. Ctrl-C drops what they have typed."""
    while True:
        try:
            return f"{input(prompt)}\n".encode(errors="replace")
        except (KeyboardInterrupt, EOFError, RuntimeError) as end:  # RuntimeError: stdin is closed
            print()
            if not isinstance(end, KeyboardInterrupt):
                return b""
