"""The process that carries files between this machine and one host that does not share them.

The coordinator starts one for each such host with the first order for it. Orders come in on stdin:
fetch files of a checkpoint (:class:`~distrain.wire.Upload`) or all others (:class:`~distrain.wire.BringBack`), or copy
files to the host (:class:`~distrain.wire.Deliver`). Answers go out on stdout, in the order of the orders. The process
ends with its parent, and its stream ends with it.

Files travel over a stream (:mod:`distrain.transfer.stream`), which is an ssh connection of its own, so that messages
never wait for files. It stays open for later orders.

Runs in: mover.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.errors import CheckpointError, WireError
from distrain.storage.checkpoint import MANIFEST_FILE, locked_for_reading
from distrain.storage.file_transfer import Files, flush, folders_below, make_folders
from distrain.storage.files import list_files
from distrain.storage.names import numbered
from distrain.storage.paths import RunPaths
from distrain.system.background import in_threads
from distrain.system.stacks import without_noise
from distrain.system.text import count, size
from distrain.transfer.stream import StreamEnd, StreamEndedError, checked_name
from distrain.wire.child_link import ChildLink, channel_to_parent
from distrain.wire.shipped_file import ShippedFile

if TYPE_CHECKING:
    from collections.abc import Sequence


_RETRIES_S = (0.2, 2.0)
"""Seconds before each further try of an order whose connection has broken: sshd may have been busy."""
_LAST_WORDS_S = 2.0


def main(arguments: list[str]) -> None:
    """Run the mover. ``arguments``: the pid of the parent, and the command line that opens a stream, as JSON."""
    channel, mover = channel_to_parent(arguments[0]), Mover(json.loads(arguments[1]))
    while not channel.at_end:
        for frame in channel.wait():
            channel.send(mover.do(frame.message()))


class Mover:
    """Carries out orders. It raises nothing: every order has an answer.

    argv: the command line that opens a stream.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._stream: Stream | None = None

    def do(self, order: wire.Message) -> wire.Message:
        """Carry out an order, and return the answer to it. A connection that breaks is opened again some times."""
        for pause_s in (*_RETRIES_S, None):
            try:
                return self._carry_out(order)
            except Exception as error:  # the coordinator waits for an answer, whatever happens
                if pause_s is None or not isinstance(error, StreamEndedError):
                    return wire.failed_answer(order, error)
                time.sleep(pause_s)
        raise AssertionError("the last try has returned")

    def _carry_out(self, order: wire.Message) -> wire.Message:
        work: Any = {wire.Upload: self._fetch, wire.BringBack: self._bring_back, wire.Deliver: self._deliver}
        stream, self._stream = self._stream or Stream(self._argv), None
        try:
            answer: wire.Message = work[type(order)](stream, order)
        except (StreamEndedError, WireError) as error:
            raise StreamEndedError(stream.end(str(error))) from None
        except BaseException:  # there may be more on its way
            stream.close()
            raise
        self._stream = stream
        return answer

    def _fetch(self, stream: Stream, order: wire.Upload) -> wire.Message:
        files, skipped = stream.get(order.source, order.directory, order.files, order.others, order.facts)
        return wire.files_copied(order, files=files, skipped=skipped)

    def _bring_back(self, stream: Stream, order: wire.BringBack) -> wire.Message:
        found = [ShippedFile(*fields) for fields in stream.ask(do="list", folder=order.folder).files]
        found.sort(key=lambda file: file.size)
        totals = itertools.accumulate(file.size for file in found)
        files = found[: sum(total <= order.limit_bytes for total in totals)]
        place, missing = _place_for(files, order)
        names, staging = [file.path for file in missing], RunPaths(Path(order.run)).staging / order.host
        stream.get(order.folder, str(staging), names)
        make_folders(place, map(os.path.dirname, names))
        for file in missing:
            os.utime(staging / file.path, ns=(file.mtime_ns, file.mtime_ns))
            os.replace(staging / file.path, place / file.path)
        shutil.rmtree(staging, ignore_errors=True)
        stream.ask(do="delete", folder=order.folder, names=[file.path for file in files])
        text = f"{_described(files)} came to {place}" if files else ""
        if left := found[len(files) :]:
            limit = f"{size(order.limit_bytes)} (--fetch-limit, ShippingConfig.fetch_limit_bytes)"
            return wire.OrderDone(failed=f"{_described(left)}, above the limit of {limit}", text=text)
        return wire.OrderDone(text=text)

    def _deliver(self, stream: Stream, order: wire.Deliver) -> wire.Message:
        root = Path(order.root)
        if not order.is_checkpoint:
            _put(stream, order, [ShippedFile(*fields) for fields in order.files], order.folders)
            return wire.OrderDone()
        try:
            with locked_for_reading(root):
                # Without a manifest that is about to replace the one there.
                paths = [root / name for name in list_files(root) if name != f"{MANIFEST_FILE}.new"]
                _put(stream, order, [ShippedFile.found(str(path), path.stat()) for path in paths], folders_below(root))
        except (OSError, CheckpointError) as error:
            raise OSError(f"the checkpoint {root} cannot be copied: {error}") from error
        return wire.OrderDone()


def _put(stream: Stream, order: wire.Deliver, files: Sequence[ShippedFile], folders: Sequence[str]) -> None:
    listed = [(os.path.relpath(file.path, order.root), *file[1:]) for file in files]
    new = f"{order.staging}/.new-{secrets.token_hex(8)}"
    stream.ask(do="put", folder=order.folder, staging=new, folders=folders, files=listed)
    crcs = stream.send_contents((file.path, file.size) for file in files)
    for file in files:  # the manifest of a checkpoint may be replaced at any time
        if not file.is_in_place and os.path.basename(file.path) != MANIFEST_FILE:
            raise OSError(f"{file.path} has changed while it was copied")
    stream.send(wire.FileData(crcs=crcs))
    stream.answer()


def _place_for(files: Sequence[ShippedFile], order: wire.BringBack) -> tuple[Path, list[ShippedFile]]:
    """Return the first directory in which no name is taken, and the files that are not there from an earlier try."""
    run = Path(order.run)
    taken = RunPaths(run).end_files()
    for name in itertools.chain([""], numbered(order.host)):
        places = {file: run / name / checked_name(file.path) for file in files}
        missing = [file for file, place in places.items() if not file._replace(path=str(place)).is_in_place]
        if not any(os.path.lexists(places[file]) or places[file] in taken for file in missing):
            return run / name, missing
    raise AssertionError("there is always another name")


def _described(files: Sequence[ShippedFile]) -> str:
    return f"{count(len(files), 'file')} ({size(sum(file.size for file in files))})"


class Stream(StreamEnd):
    """The near end of a stream: a process, such as ssh, with a stream server at its far end. Raises OSError."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._link = ChildLink(argv, greeting=True)
        super().__init__(self._link.channel)

    def ask(self, **fields: Any) -> wire.FileData:
        """Send a request, and return its answer. Raise RefusedError or StreamEndedError."""
        self.send(wire.AskForFiles(**fields))
        return self.answer()

    def get(
        self, folder: str, directory: str, names: Sequence[str], others: Sequence[str] = (), facts: Any = None
    ) -> tuple[Files, Files]:
        """Copy files of the host to a directory. Return their hashes, and those of the others on the host.

        Raise OSError or StreamEndedError.
        """
        listing = self.ask(do="get", folder=folder, names=names, others=others, facts=facts or {})
        make_folders(directory, map(checked_name, filter(None, [*listing.folders, *map(os.path.dirname, names)])))
        sizes = dict(zip(names, listing.sizes, strict=True))
        end = self.receive_contents(directory, sizes)
        in_threads(flush, [os.path.join(directory, name) for name in names])
        files = [(name, size, crc) for (name, size), crc in zip(sizes.items(), end.crcs, strict=True)]
        return files, [(name, size, crc) for name, size, crc in end.others]

    def end(self, found: str) -> str:
        """Close the stream, and return why it has ended, as far as that is known: its last words, or ``found``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._link.process.wait(_LAST_WORDS_S)
        self.channel.drain()
        said = self._link.stray() or self.channel.decoder.chatter
        text = "\n".join(without_noise(said.decode(errors="replace").strip().splitlines()))
        return f"the connection for files has ended (exit code {self._link.kill()}): {text or found}"

    def close(self) -> None:
        """End the process, and close the stream."""
        self._link.kill()
