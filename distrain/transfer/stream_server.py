"""The program at the far end of a stream: it reads and writes files for the mover. Runs in: stream server.

The mover starts one on a host with each stream, over ssh. Requests come in on stdin, and are answered on stdout, see
:mod:`distrain.transfer.streams`. The program ends when stdin ends, whatever it does then: a thread of its own waits for
that. It deletes files that are not complete first.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.system import process
from distrain.transfer.arrivals import ArrivingPart, receive_parts
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
    staging = Staging()
    threading.Thread(target=_end_with, args=(read_fd, staging), daemon=True).start()
    try:
        write_all(write_fd, wire.MAGIC)
        StreamServer(read_fd, write_fd, staging).run()
    except StreamEndedError:
        pass
    staging.end()


def _end_with(fd: int, staging: Staging) -> None:
    """Wait until nobody can write to a descriptor any more, then end the process."""
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0))  # a socket's end; that of a pipe is always reported
    poll.poll()
    staging.end()


class Staging:
    """The directory for the files of the latest order. After an earlier order, nothing is left in its directory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder = ""

    def open_part(self, folder: str, item: Item, *, is_crc32: bool) -> ArrivingPart:
        """Open a part of a file in the directory ``folder``. Raise OSError."""
        name, start, _ = item
        path = os.path.join(folder, check_name(name))
        with self._lock:
            self._folder = folder
            make_folders(os.path.dirname(path))
            os.utime(folder)  # it is in use, which the cache may not see by the files in it
            return ArrivingPart(path, start, is_crc32=is_crc32, mode=_PRIVATE_FILE)

    def end(self) -> None:
        """Delete the files that are not complete, and end the process."""
        self._lock.acquire()  # for ever, so that no file is made any more
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


class StreamServer:
    """Carries out the requests that come in on a stream."""

    def __init__(self, read_fd: int, write_fd: int, staging: Staging) -> None:
        self._reader = Reader(read_fd)
        self._sender = PartSender(write_fd)
        self._fd = write_fd
        self._staging = staging
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

    def _write(self, staging: str, items: list[Item], kinds: list[bool]) -> dict[str, Any]:
        return self._receive(self._reader, staging, items, kinds)

    def _pull(self, staging: str, items: list[Item], kinds: list[bool], peer: Peer) -> dict[str, Any]:
        from distrain.transfer.peers import PeerConnections

        self._peers = self._peers or PeerConnections()
        try:
            reader = self._peers.request((peer[0], peer[1], peer[2]), staging, items)
            return self._receive(reader, staging, items, kinds)
        except (StreamEndedError, OSError, RefusedError) as error:
            self._peers.close()  # there may be more in it
            if isinstance(error, OSError) and error.filename is not None:
                raise
            raise RefusedError(f"files cannot be copied from the host at {peer[0]}, port {peer[1]}: {error}") from None

    def _receive(self, reader: Reader, staging: str, items: list[Item], kinds: list[bool]) -> dict[str, Any]:
        def open_part(number: int) -> ArrivingPart:
            return self._staging.open_part(staging, items[number], is_crc32=kinds[number])

        return {"digests": receive_parts(reader, items, open_part)}

    def _finish(self, folder: str, staging: str, files: list[str], folders: list[str]) -> dict[str, Any]:
        needed = {folder, *(os.path.join(folder, check_name(inner)) for inner in folders)}
        for inner in needed.union(os.path.dirname(os.path.join(folder, check_name(name))) for name in files):
            make_folders(inner)
        for name in files:
            os.replace(os.path.join(staging, name), os.path.join(folder, name))
        return self._drop(staging)

    def _drop(self, staging: str) -> dict[str, Any]:
        shutil.rmtree(staging, ignore_errors=True)
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
