"""The program at the far end of a stream: it reads and writes files for the mover. Runs in: stream server.

The mover starts one on a host, over ssh. It ends when stdin ends, and deletes what is not complete. If it is
killed, that stays in a directory of the run, which the agent deletes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

from distrain import wire
from distrain.storage.file_transfer import folders_below, hash_files, make_folders, unchanged
from distrain.system import process
from distrain.transfer.stream import StreamEnd, StreamEndedError, checked_name
from distrain.wire.channel import Channel
from distrain.wire.shipped_file import ShippedFile


def main(arguments: list[str]) -> None:
    """Serve until stdin ends. There are no ``arguments``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(*process.private_stdio())
    with contextlib.suppress(StreamEndedError, OSError):  # such as ECONNRESET
        channel.send(wire.MAGIC)
        serve(channel)


def serve(channel: Channel) -> None:
    """Carry out the requests that come in on a stream. Raise StreamEndedError when there are no more."""
    end = StreamEnd(channel)
    while True:
        asked = end.next()
        if isinstance(asked, wire.AskForFiles):  # else it is the rest of contents that could not be stored
            try:
                end.send(_WORK[asked.do](end, asked))
            except OSError as error:
                end.send(wire.FileData(failed=str(error)))


def _put(end: StreamEnd, asked: wire.AskForFiles) -> wire.FileData:
    """Store files. Raise OSError or StreamEndedError."""
    files = [ShippedFile(*fields) for fields in asked.files]
    try:
        os.mkdir(asked.staging, 0o700)  # its parent is the directory of the run: else nobody would delete this
        make_folders(asked.staging, [*asked.folders, *(os.path.dirname(file.path) for file in files)])
        end.send(wire.FileData())
        end.receive_contents(asked.staging, {file.path: file.size for file in files})
        for file in files:
            path = os.path.join(asked.staging, file.path)
            os.chmod(path, file.mode | 0o600)
            os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
        if not os.path.isdir(asked.folder):  # else another run has copied the same
            os.rename(asked.staging, asked.folder)
    finally:
        shutil.rmtree(asked.staging, ignore_errors=True)
    return wire.FileData()


def _get(end: StreamEnd, asked: wire.AskForFiles) -> wire.FileData:
    """Send files. Raise OSError or StreamEndedError."""
    paths = [os.path.join(asked.folder, checked_name(name)) for name in asked.names]
    sizes = [os.stat(path).st_size for path in paths]
    end.send(wire.FileData(sizes=sizes, folders=folders_below(asked.folder)))
    crcs = end.send_contents(zip(paths, sizes, strict=True))
    with unchanged(Path(asked.folder), asked.facts):
        return wire.FileData(crcs=crcs, others=hash_files(Path(asked.folder), asked.others))


def _list(_end: StreamEnd, asked: wire.AskForFiles) -> wire.FileData:
    """Find all files, and those that links lead to, with their paths below the directory."""
    found = [path for path in Path(asked.folder).rglob("*") if path.is_file()]
    return wire.FileData(files=[ShippedFile.found(str(path.relative_to(asked.folder)), path.stat()) for path in found])


def _delete(_end: StreamEnd, asked: wire.AskForFiles) -> wire.FileData:
    """Delete files, and the directories that are empty then: what was written meanwhile stays. Raise OSError."""
    for name in asked.names:
        os.unlink(os.path.join(asked.folder, name))
    for path, _, _ in os.walk(asked.folder, topdown=False):
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(path)
    return wire.FileData()


_WORK = {"put": _put, "get": _get, "list": _list, "delete": _delete}
