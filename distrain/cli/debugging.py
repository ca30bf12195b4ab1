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
from distrain.cli.requesting import request
from distrain.cli.text import echo
from distrain.coordinator.requests import DAP, DEBUG, STACKS
from distrain.storage.runs.listing import NoSuchRun
from distrain.system.text import without_controls
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    import argparse

    from distrain.storage.runs.listing import Run

_READ_BYTES = 64 << 10
_ESTABLISHED = "01"
"""A state of connections in /proc/net/tcp. In other states, a connection whose process has left belongs to root."""
_CONNECT_S = 10.0
"""Seconds within which a run that has answered connects."""
_NOTICE_S = 1.0
"""Seconds to wait for the rank before a line says where it is."""


def debug_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain debug``."""
    parser = parsers.make_run_parser(
        "debug",
        "Open pdb on a rank of a running run, at its current line, or at the breakpoint() where it waits. Other ranks "
        "keep running until they need it. Run it on the machine of fit().",
        "  distrain debug last -r 3\n  distrain debug last -r 3 --dap     for VS Code or PyCharm",
    )
    parser.add_argument("-r", "--rank", type=parsers.number, default=0, metavar="N", help="the rank (default: 0)")
    parser.add_argument("--dap", action="store_true", help="let an editor attach instead, with debugpy")
    parser.add_argument("--port", type=parsers.port, default=5678, help="the editor's port (default: 5678)")
    return parser


def run_debug(options: argparse.Namespace) -> int:
    """Debug a rank until the debugger is closed."""
    run = parsers.run_of(options)
    if options.dap:
        return _serve_editor(run, options.rank, options.port)
    with contextlib.closing(connect(run, options.rank)) as channel:
        return _Conversation(channel, options.rank).hold(run)


def connect(run: Run, rank: int, word: str = DEBUG) -> Channel:
    """Return a connection to the debugger of a rank. Raises NoSuchRun."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = os.path.join(folder, "debug.sock")
        listener.bind(path)
        listener.listen(1)
        listener.settimeout(_CONNECT_S)
        request(run, word, f"{rank} {path}")
        fd = listener.accept()[0].detach()
    return Channel(fd, fd)


def _said(frames: list[wire.Frame]) -> list[wire.DebuggerSays]:
    return [message for frame in frames if isinstance(message := frame.message(), wire.DebuggerSays)]


def _first_said(run: Run, channel: Channel, condition: str) -> list[wire.DebuggerSays]:
    """Wait for the rank. If it does not answer soon, tell the condition for that, and where all ranks are."""
    said = _said(channel.wait(_NOTICE_S))
    if not said and not channel.at_end:
        echo(f"{condition}; Ctrl-C ends the wait\n{request(run, STACKS)}")
    return said


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
        condition = f"rank {self._rank} stops when it is back from native code, or from a call of distrain"
        said, error = _first_said(run, self._channel, condition), ""
        while said or not self._channel.at_end:
            for message in said:
                sys.stdout.write(without_controls(message.body.decode(errors="replace")))
                if message.closed is not None:
                    echo(message.closed or f"rank {self._rank} {'fails now' if error else 'continues'}")
                    return 0
                if message.prompt is not None:
                    error = message.error
                    self._answer(message)
            said = self._listen()
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
                else f"rank {self._rank} is stopped. c: continue to the next breakpoint (Ctrl-C stops before it), or "
                "leave pdb if none is set; q: leave pdb"
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
        self._send("line", line.encode(errors="replace"))

    def _listen(self) -> list[wire.DebuggerSays]:
        """Wait for the debugger. Ctrl-C stops the rank again; if that takes too long, a second one raises."""
        try:
            return _said(self._channel.wait())
        except KeyboardInterrupt:
            if self._is_asked_to_stop:
                raise
            self._is_asked_to_stop = True
            self._send("stop")
            return []

    def _send(self, word: str, body: bytes = b"") -> None:
        with contextlib.suppress(ConnectionError):  # the run has ended, and its last words can still be read
            self._channel.send(wire.DebuggerInput(attempt=0, rank=self._rank, word=word, body=body))


# -- editors ---------------------------------------------------------------------------------------------------------


def _serve_editor(run: Run, rank: int, port: int) -> int:
    """Let an editor debug a rank, until one of them is gone. Return the exit code. Raises NoSuchRun."""
    try:
        listener = socket.create_server(("127.0.0.1", port), backlog=1)
    except OSError as error:
        raise NoSuchRun(f"port {port} cannot be used ({error}); choose another one with --port") from None
    with listener, contextlib.closing(connect(run, rank, DAP)) as channel:
        condition = f"rank {rank} answers when its native code lets other threads run"
        said = _first_said(run, channel, condition) or _said(channel.wait())
        if not said or said[0].closed is not None:
            raise NoSuchRun((said and said[0].closed) or "the run has ended")
        _show_configuration(rank, said[0].place, listener.getsockname()[1])
        echo(_relay(listener, channel, rank))
    return 0


def _show_configuration(rank: int, directory: str, port: int) -> None:
    configuration: dict[str, object] = {"name": f"rank {rank}", "type": "debugpy", "request": "attach"}
    configuration["connect"] = {"host": "127.0.0.1", "port": port}
    if not os.path.isdir(directory):  # the rank has a copy of the code
        configuration["pathMappings"] = [{"localRoot": "${workspaceFolder}", "remoteRoot": directory}]
    echo(
        f"rank {rank} waits for your editor at 127.0.0.1:{port}; Ctrl-C ends the wait\n"
        f'VS Code: add this to "configurations" in .vscode/launch.json, and press F5\n'
        f"{json.dumps(configuration, indent=4)}\n"
        f'PyCharm: run an "Attach to DAP" configuration for that address'
    )


def _relay(listener: socket.socket, channel: Channel, rank: int) -> str:
    """Relay the bytes of the first editor of this user that connects. Return why it ended."""
    editor, refused = None, set()
    while not channel.at_end:
        ready, _, _ = select.select([channel.read_fd, (editor or listener).fileno()], [], [])
        if channel.read_fd in ready:
            for message in _said(channel.receive()):
                if message.closed is not None:
                    return message.closed or f"rank {rank} continues"
                if editor is not None:
                    with contextlib.suppress(ConnectionError):  # it is gone, and the next recv() finds that
                        editor.sendall(message.body)
        elif editor is None:
            editor, _ = listener.accept()
            if (uid := _user_of_peer(editor)) in (os.geteuid(), 0):
                listener.close()  # nobody else can attach
                continue
            editor.close()
            editor = None
            if uid not in refused:
                echo(f"refused a connection from another user (uid {'unknown' if uid is None else uid})")
            refused.add(uid)
        else:
            data = b""
            with contextlib.suppress(ConnectionError):
                data = editor.recv(_READ_BYTES)
            channel.send(wire.DebuggerInput(attempt=0, rank=rank, word="editor", body=data))
            if not data:
                while (said := _said(channel.wait(_NOTICE_S))) and said[-1].closed is None:
                    pass  # until the rank has closed its debugger, and another editor can attach
                return f"the editor has detached; rank {rank} continues"
    return "the run has ended"


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
