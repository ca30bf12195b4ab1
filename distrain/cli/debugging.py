"""``distrain debug``: pdb on one rank of a running run, or an editor. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from distrain import wire
from distrain.cli import parsers
from distrain.cli.requesting import listener_at, request
from distrain.cli.text import echo
from distrain.coordinator.requests import DEBUG, STACKS
from distrain.storage.runs.listing import NoSuchRun
from distrain.system.text import without_controls
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    import argparse

    from distrain.storage.runs.listing import Run

_READ_BYTES = 64 << 10
_ESTABLISHED = "01"
"""A state of connections in /proc/net/tcp. In other states, a connection whose process has left belongs to root."""
_NOTICE_S = 1.0
"""Seconds to wait for the rank before a line says where it is."""


def add_debug_options(add: parsers.Add) -> None:
    """Add the options of ``distrain debug``."""
    add("-r", "--rank", type=parsers.number, default=0, metavar="N", help="the rank (default: 0)")
    add("--dap", action="store_true", help="let an editor attach instead, with debugpy")
    add("--port", type=parsers.port, default=5678, help="the editor's port (default: 5678)")


def run_debug(options: argparse.Namespace) -> int:
    """Debug a rank until the debugger is closed. Raises NoSuchRun."""
    run, rank = parsers.run_of(options), options.rank
    user = _Editor(rank, options.port) if options.dap else _Terminal(rank)
    with contextlib.closing(connect(run, rank, user.debugger)) as user.channel:
        said = user.hear(_NOTICE_S)
        if not said and not user.channel.at_end:
            echo(f"rank {rank} answers when native code, or a call of distrain, returns; Ctrl-C ends the wait")
            echo(request(run, STACKS))
            said = user.hear()
        if not said or said[0].closed is not None:
            raise NoSuchRun(said[0].closed or f"rank {rank} continues" if said else "the run has ended")
        relay(user, said)
    return 0


def connect(run: Run, rank: int, debugger: str) -> Channel:
    """Return a connection to the debugger of a rank: pdb or debugpy. Raises NoSuchRun."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = os.path.join(folder, "debug.sock")
        listener.bind(path)
        listener.listen(1)
        request(run, DEBUG, f"{rank} {debugger} {path}")  # it connects before it answers
        fd = listener.accept()[0].detach()
    return Channel(fd, fd)


def relay(user: _Terminal | _Editor, said: list[wire.DebuggerSays]) -> None:
    """Relay what the debugger and its user send each other, until one of them is gone. ``said``: its first messages."""
    user.begin(said[0])
    while said or not user.channel.at_end:
        for message in said:
            user.show(message)
            if message.closed is not None:
                echo(message.closed or f"rank {user.rank} continues")
                return
        said = user.listen()
    echo(f"the connection to rank {user.rank} has ended; `distrain ls` says whether its run has")


class _User:
    """One who uses the debugger of a rank."""

    channel: Channel

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def hear(self, timeout_s: float | None = None) -> list[wire.DebuggerSays]:
        """Wait for the debugger."""
        frames = self.channel.wait(timeout_s)
        return [message for frame in frames if isinstance(message := frame.message(), wire.DebuggerSays)]

    def send(self, body: bytes = b"", opens: str = "") -> None:
        with contextlib.suppress(ConnectionError):  # the run has ended, and its last words can still be read
            self.channel.send(wire.DebuggerInput(attempt=0, rank=self.rank, body=body, opens=opens))


class _Terminal(_User):
    """A person at a terminal, who uses pdb."""

    debugger = "pdb"

    def begin(self, first: wire.DebuggerSays) -> None:
        """Say how to use pdb."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() uses it, for editing and the history
        echo(
            f"rank {self.rank} {first.stopped}. c: continue to the next breakpoint (Ctrl-C stops before it), or leave "
            "pdb if none is set; q: leave pdb"
        )

    def show(self, message: wire.DebuggerSays) -> None:
        """Show what pdb says, and have the user answer its prompt."""
        text = without_controls(message.body.decode(errors="replace"))
        lines, newline, prompt = text.rpartition("\n")
        sys.stdout.write(lines + newline)
        if message.stopped:
            self.send(_answer(prompt))

    def listen(self) -> list[wire.DebuggerSays]:
        """Wait for pdb. Ctrl-C stops the rank again; if that takes too long, a second one raises."""
        try:
            return self.hear()
        except KeyboardInterrupt:
            self.send(opens="pdb")
            return self.hear()


def _answer(prompt: str) -> bytes:
    """Return a line of the user, nothing after Ctrl-D. Ctrl-C drops what they have typed."""
    while True:
        try:
            return f"{input(prompt)}\n".encode(errors="replace")
        except (KeyboardInterrupt, EOFError, RuntimeError) as end:  # RuntimeError: stdin is closed
            print()
            if not isinstance(end, KeyboardInterrupt):
                return b""


class _Editor(_User):
    """The first editor of this user that connects. It uses debugpy."""

    debugger = "debugpy"

    def __init__(self, rank: int, port: int) -> None:
        super().__init__(rank)
        self._listener = listener_at(port)
        self._editor: socket.socket | None = None
        self._refused: set[int | None] = set()

    def begin(self, first: wire.DebuggerSays) -> None:
        """Say how to attach. ``first`` has the directory of the rank."""
        directory, port = first.body.decode(), self._listener.getsockname()[1]
        configuration: dict[str, object] = {"name": f"rank {self.rank}", "type": "debugpy", "request": "attach"}
        configuration["connect"] = {"host": "127.0.0.1", "port": port}
        if not os.path.isdir(directory):  # the rank has a copy of the code
            configuration["pathMappings"] = [{"localRoot": "${workspaceFolder}", "remoteRoot": directory}]
        echo(
            f"rank {self.rank} waits for your editor at 127.0.0.1:{port}; Ctrl-C ends the wait\n"
            f'VS Code: add this to "configurations" in .vscode/launch.json, and press F5\n'
            f"{json.dumps(configuration, indent=4)}\n"
            f'PyCharm: run an "Attach to DAP" configuration for that address'
        )

    def show(self, message: wire.DebuggerSays) -> None:
        """Pass on what debugpy says."""
        if self._editor is not None:
            with contextlib.suppress(ConnectionError):  # it is gone, and the next recv() finds that
                self._editor.sendall(message.body)

    def listen(self) -> list[wire.DebuggerSays]:
        """Wait for debugpy, and for the editor meanwhile."""
        source = (self._editor or self._listener).fileno()
        if source not in select.select([self.channel.read_fd, source], [], [])[0]:
            return self.hear(0.0)
        if self._editor is None:
            self._accept()
            return []
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self._editor.recv(_READ_BYTES)
        self.send(data)
        return [] if data else self.hear()  # that the rank has closed its debugger, so that another editor can attach

    def _accept(self) -> None:
        editor, _ = self._listener.accept()
        uid = _user_of_peer(editor)
        if uid in (os.geteuid(), 0):
            self._listener.close()  # nobody else can attach
            self._editor = editor
            return
        editor.close()
        if uid not in self._refused:
            echo(f"refused a connection from another user (uid {'unknown' if uid is None else uid})")
        self._refused.add(uid)


def _user_of_peer(connection: socket.socket) -> int | None:
    """Return the uid of the process at the other end of a connection within this machine, None if it has left."""
    try:
        ends = [
            f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
            for host, port in (connection.getpeername(), connection.getsockname())
        ]
        tables = [table.read_text() for table in Path("/proc/net").glob("tcp*")]  # Java connects with IPv6 sockets
    except OSError:
        return None
    for fields in map(str.split, "".join(tables).splitlines()):
        if fields[3] == _ESTABLISHED and all(map(str.endswith, fields[1:3], ends)):
            return int(fields[7])
    return None
