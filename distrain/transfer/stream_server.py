"""The program at the far end of a stream: it reads and writes files for the mover. Runs in: stream server.

The mover starts one on a host with each stream, over ssh. Requests come in on stdin, and are answered on stdout, see
:mod:`distrain.transfer.streams`. The program ends when stdin ends, whatever it does then: a thread of its own waits for
that. It deletes the temporary files first.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.system import process
from distrain.transfer.arrivals import ArrivingPart, receive_parts, temporary_name
from distrain.transfer.streams import (
    PartSender,
    Reader,
    RefusedError,
    StreamEndedError,
    check_name,
    send_header,
    write_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.transfer.peers import Peer, PeerConnections, PeerServer
    from distrain.transfer.streams import Item

_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600


def main(arguments: list[str]) -> None:
    """Serve until stdin ends. There are no ``arguments``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    read_fd, write_fd = process.private_stdio()
    temporary = TemporaryFiles()
    threading.Thread(target=_end_with, args=(read_fd, temporary), daemon=True).start()
    try:
        write_all(write_fd, wire.MAGIC)
        StreamServer(read_fd, write_fd, temporary).run()
    except StreamEndedError:
        pass
    temporary.end()


def _end_with(fd: int, temporary: TemporaryFiles) -> None:
    """Wait until nobody can write to a descriptor any more, then end the process."""
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0))  # a socket's end; that of a pipe is always reported
    poll.poll()
    temporary.end()


class TemporaryFiles:
    """The temporary files that this process has made for an order. No two orders have the same ``token``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token = ""
        self._paths: set[str] = set()

    def arriving(self, folder: str, token: str, item: Item, *, is_crc32: bool) -> ArrivingPart:
        """Open a part of a temporary file. Raise OSError."""
        name, start, _ = item
        path = os.path.join(folder, temporary_name(check_name(name), token))
        with self._lock:
            if token != self._token:  # the other order is over: its files have their final names, or were deleted
                self._token = token
                self._paths.clear()
            self._paths.add(path)
            make_folders(os.path.dirname(path))
            return ArrivingPart(path, start, is_crc32=is_crc32, mode=_PRIVATE_FILE)

    def end(self) -> None:
        """Delete the files, and end the process."""
        self._lock.acquire()  # for ever, so that no file is made any more
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        os._exit(0)


class StreamServer:
    """Carries out the requests that come in on a stream."""

    def __init__(self, read_fd: int, write_fd: int, temporary: TemporaryFiles) -> None:
        self._reader = Reader(read_fd)
        self._sender = PartSender(write_fd)
        self._fd = write_fd
        self._temporary = temporary
        self._peers: PeerConnections | None = None
        self._servers: list[PeerServer] = []

    def run(self) -> None:
        """Answer requests. Raise StreamEndedError when there are no more."""
        do: dict[str, Callable[..., dict[str, Any]]] = {
            "list": self._list,
            "sizes": self._sizes,
            "hash": self._hash,
            "write": self._write,
            "pull": self._pull,
            "finish": self._finish,
            "drop": self._drop,
            "serve": self._serve,
        }
        while True:
            request = self._reader.header()
            kind = request.pop("do", None)
            if kind == "read":
                self._read(**request)
            elif kind in do:
                send_header(self._fd, _answer(partial(do[kind], **request)))
            else:
                raise StreamEndedError(f"the request {kind!r} is none of distrain")

    # -- from this host -------------------------------------------------------------------------------------------

    def _list(self, folder: str, files: list[str]) -> dict[str, Any]:
        folders = [
            os.path.relpath(os.path.join(parent, name), folder)
            for parent, names, _ in os.walk(folder, followlinks=True)
            for name in names
        ]
        return {"sizes": [os.stat(os.path.join(folder, name)).st_size for name in files], "folders": folders}

    def _hash(self, folder: str, files: list[str]) -> dict[str, Any]:
        from distrain.storage.file_transfer import hash_files  # not on top, as each stream waits for the imports there

        return {"files": hash_files(Path(folder), files)}

    def _read(self, folder: str, items: list[Item]) -> None:
        for name, start, count in items:
            self._sender.send(os.path.join(folder, name), start, count)
        self._sender.flush()

    def _serve(self, folder: str, address: str) -> dict[str, Any]:
        from distrain.transfer.peers import PeerServer

        server = PeerServer(folder, address)
        self._servers.append(server)
        return {"port": server.port, "secret": server.secret}

    # -- to this host ---------------------------------------------------------------------------------------------

    def _sizes(self, folder: str, files: list[str]) -> dict[str, Any]:
        return {"sizes": [_size_of(os.path.join(folder, check_name(name))) for name in files]}

    def _write(self, folder: str, token: str, items: list[Item], kinds: list[bool]) -> dict[str, Any]:
        return self._receive(self._reader, folder, token, items, kinds)

    def _pull(self, folder: str, token: str, items: list[Item], kinds: list[bool], peer: Peer) -> dict[str, Any]:
        from distrain.transfer.peers import PeerConnections

        self._peers = self._peers or PeerConnections()
        try:
            reader = self._peers.request((peer[0], peer[1], peer[2]), token, items)
            return self._receive(reader, folder, token, items, kinds)
        except (StreamEndedError, OSError, RefusedError) as error:
            self._peers.close()  # there may be more in it
            if isinstance(error, OSError) and error.filename is not None:
                raise
            raise RefusedError(f"files cannot be copied from the host at {peer[0]}, port {peer[1]}: {error}") from None

    def _receive(self, reader: Reader, folder: str, token: str, items: list[Item], kinds: list[bool]) -> dict[str, Any]:
        """Write parts into temporary files."""

        def open_part(number: int) -> ArrivingPart:
            return self._temporary.arriving(folder, token, items[number], is_crc32=kinds[number])

        return {"digests": receive_parts(reader, items, open_part)}

    def _finish(self, folder: str, token: str, files: list[str], folders: list[str]) -> dict[str, Any]:
        for inner in ("", *folders):
            make_folders(os.path.join(folder, check_name(inner)) if inner else folder)
        for path in (os.path.join(folder, check_name(name)) for name in files):
            os.replace(temporary_name(path, token), path)
        return {}

    def _drop(self, folder: str, token: str, files: list[str]) -> dict[str, Any]:
        for name in files:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(os.path.join(folder, temporary_name(check_name(name), token)))
        return {}


def _answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except (OSError, RefusedError) as error:
        return {"failed": str(error)}


def _size_of(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def make_folders(folder: str) -> None:
    """Make a directory and its parents, which only this user may use. Raise OSError."""
    if not os.path.isdir(folder):
        make_folders(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, _PRIVATE_FOLDER)
