"""The program at the far end of a stream: it reads and writes files for the mover. Runs in: stream server.

The mover starts one on a host, over ssh. Requests come in on stdin, and are answered on stdout, see
:mod:`distrain.transfer.stream`. The program ends when stdin ends, and deletes what is not complete. If it is killed,
that stays in a directory of the run, which the agent deletes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.storage.file_transfer import folders_below, hash_files, make_folders, unchanged
from distrain.system import process
from distrain.transfer.stream import (
    Reader,
    RefusedError,
    StreamEndedError,
    checked_name,
    receive_contents,
    send_contents,
    send_header,
    write_all,
)
from distrain.wire.shipped_file import ShippedFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def main(arguments: list[str]) -> None:
    """Serve until stdin ends. There are no ``arguments``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    read_fd, write_fd = process.private_stdio()
    with contextlib.suppress(StreamEndedError, OSError):  # such as ECONNRESET
        write_all(write_fd, wire.MAGIC)
        serve(read_fd, write_fd)


def serve(read_fd: int, write_fd: int) -> None:
    """Carry out the requests that come in on a stream. Raise StreamEndedError when there are no more."""
    reader = Reader(read_fd)
    while True:
        request = reader.header()
        try:
            match request["do"]:
                case "put":
                    _put(reader, write_fd, request)
                    send_header(write_fd, {})
                case "get":
                    _get(write_fd, **request)
                case "list":
                    send_header(write_fd, {"files": list(_list(request["folder"]))})
                case "delete":
                    _delete(request["folder"], request["files"])
                    send_header(write_fd, {})
        except (OSError, RefusedError) as error:
            send_header(write_fd, {"failed": str(error)})
            while True:  # the mover may still be sending contents
                reader.some(sys.maxsize)


def _put(reader: Reader, write_fd: int, request: dict[str, Any]) -> None:
    """Store files. Raise OSError, RefusedError or StreamEndedError."""
    folder, staging = request["folder"], request["staging"]
    files = [ShippedFile(*fields) for fields in request["files"]]
    try:
        os.mkdir(staging, 0o700)  # its parent is the directory of the run: without that, nobody would delete this
        make_folders(staging, [*request["folders"], *(os.path.dirname(file.path) for file in files)])
        send_header(write_fd, {})
        receive_contents(reader, staging, {file.path: file.size for file in files})
        for file in files:
            path = os.path.join(staging, file.path)
            os.chmod(path, file.mode | 0o600)
            os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
        if not os.path.isdir(folder):  # else another run has copied the same
            os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _get(fd: int, do: str, folder: str, files: list[str], others: list[str], facts: Mapping[str, list[int]]) -> None:
    """Send files. Raise OSError, RefusedError or StreamEndedError; end the program if the contents cannot be sent."""
    paths = [os.path.join(folder, checked_name(name)) for name in files]
    sizes = [os.stat(path).st_size for path in paths]
    send_header(fd, {"sizes": sizes, "folders": folders_below(folder)})
    try:
        crcs = send_contents(fd, list(zip(paths, sizes, strict=True)))
    except OSError as error:  # the mover waits for the rest of the contents
        sys.exit(str(error))
    with unchanged(Path(folder), facts):
        hashes = hash_files(Path(folder), others)
    send_header(fd, {"crcs": crcs, "others": hashes})


def _list(folder: str) -> Iterator[ShippedFile]:
    """Yield all files, and those that links lead to, with their paths below the directory."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            yield ShippedFile.found(str(path.relative_to(folder)), path.stat())


def _delete(folder: str, files: list[str]) -> None:
    """Delete files, and the directories that are empty then: what was written meanwhile stays. Raise OSError."""
    for name in files:
        os.unlink(os.path.join(folder, name))
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(path)
