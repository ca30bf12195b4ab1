"""The program at the far end of a stream: it reads and writes files for the mover. Runs in: stream server.

The mover starts one on a host with each stream, over ssh. Requests come in on stdin, and are answered on stdout, see
:mod:`distrain.transfer.streams.streams`. The program ends when stdin ends, whatever it does then: a thread of its own
waits for that. Files that are not complete stay in a directory of the run, which the agent deletes.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.system import process
from distrain.transfer.host_side.arrivals import ArrivingPart, receive_parts
from distrain.transfer.streams.streams import (
    SIGN_OF_LIFE_S,
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

    from distrain.transfer.streams.peers import Peer, PeerConnections, PeerServer
    from distrain.transfer.streams.streams import Item

_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600


def main(arguments: list[str]) -> None:
    """Serve until stdin ends. There are no ``arguments``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    read_fd, write_fd = process.private_stdio()
    threading.Thread(target=_end_with, args=(read_fd,), daemon=True).start()
    with contextlib.suppress(StreamEndedError):
        write_all(write_fd, wire.MAGIC)
        StreamServer(read_fd, write_fd).run()
    os._exit(0)


def _end_with(fd: int) -> None:
    """Wait until nobody can write to a descriptor any more, then end the process."""
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0))  # a socket's end; that of a pipe is always reported
    poll.poll()
    os._exit(0)


class StreamServer:
    """Carries out the requests that come in on a stream."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._reader = Reader(read_fd)
        self._sender = PartSender(write_fd)
        self._fd = write_fd
        self._lock = threading.Lock()
        """Held to write, and to change the next attribute."""
        self._is_working = False
        """True while an answer is owed that is one header."""
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
        threading.Thread(target=self._show_signs_of_life, daemon=True).start()
        while True:
            request = self._reader.header()
            kind = request.pop("do", None)
            if kind == "read":
                self._read(**request)
            elif kind in do:
                with self._lock:
                    self._is_working = True
                answer = _answer(partial(do[kind], **request))
                with self._lock:
                    self._is_working = False
                    send_header(self._fd, answer)
            else:
                raise StreamEndedError(f"the request {kind!r} is none of distrain")

    def _show_signs_of_life(self) -> None:
        """Let the mover wait for what takes long: a part over a slow line, or a large file to hash."""
        with contextlib.suppress(StreamEndedError):
            while True:
                time.sleep(SIGN_OF_LIFE_S)
                with self._lock:
                    if self._is_working:
                        send_header(self._fd, {"working": True})

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
        from distrain.transfer.streams.peers import PeerServer

        server = PeerServer(folder, address)
        self._servers.append(server)
        return {"port": server.port, "secret": server.secret}

    # -- to this host ---------------------------------------------------------------------------------------------

    def _sizes(self, folder: str, files: list[str]) -> dict[str, Any]:
        return {"sizes": [_size_of(os.path.join(folder, check_name(name))) for name in files]}

    def _write(self, staging: str, items: list[Item], is_crc32: bool) -> dict[str, Any]:
        return _receive(self._reader, staging, items, is_crc32=is_crc32)

    def _pull(self, staging: str, items: list[Item], is_crc32: bool, peer: Peer) -> dict[str, Any]:
        from distrain.transfer.streams.peers import PeerConnections

        self._peers = self._peers or PeerConnections()
        try:
            reader = self._peers.request((peer[0], peer[1], peer[2]), staging, items)
            return _receive(reader, staging, items, is_crc32=is_crc32)
        except (StreamEndedError, OSError, RefusedError) as error:
            self._peers.close()  # there may be more in it
            if isinstance(error, OSError) and error.filename is not None:
                raise
            raise RefusedError(f"files cannot be copied from the host at {peer[0]}, port {peer[1]}: {error}") from None

    def _finish(self, folder: str, staging: str, files: list[str], folders: list[str]) -> dict[str, Any]:
        needed = {folder, *(os.path.join(folder, check_name(inner)) for inner in folders)}
        for inner in needed.union(os.path.dirname(os.path.join(folder, check_name(name))) for name in files):
            make_private_folders(inner)
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


def _receive(reader: Reader, staging: str, items: list[Item], *, is_crc32: bool) -> dict[str, Any]:
    def open_part(number: int) -> ArrivingPart:
        name, start, _ = items[number]
        path = os.path.join(staging, check_name(name))
        os.stat(os.path.dirname(staging))  # without the directory of the run, nobody would delete the files
        make_private_folders(os.path.dirname(path))
        return ArrivingPart(path, start, is_crc32=is_crc32, mode=_PRIVATE_FILE)

    return {"digests": receive_parts(reader, items, open_part)}


def _size_of(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def make_private_folders(folder: str) -> None:
    """Make a directory and its parents, which only this user may use. Raise OSError."""
    if not os.path.isdir(folder):
        make_private_folders(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, _PRIVATE_FOLDER)
