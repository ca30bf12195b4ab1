"""The process that carries files between this machine and one host that does not share them.

The coordinator starts one for each such host, at the latest with the first order for it. Orders come in on stdin:
fetch files of a checkpoint (:class:`~distrain.wire.Upload`), bring files to the host (Deliver), or let the host serve
them to others (Serve). Answers go out on stdout, in the order of the orders. The process ends with its parent, and the
streams that it has opened end with it.

Files travel over streams (:mod:`distrain.transfer.streams.streams`), which are ssh connections of their own, so that
messages never wait for files. They stay open for later orders.

Runs in: mover.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import time
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.storage.flushing import flush_file
from distrain.system import process
from distrain.system.background import in_threads
from distrain.transfer.host_side.arrivals import crc32_of
from distrain.transfer.jobs import Fetch, Pull, Put, batches, combined_digests, parts_of
from distrain.transfer.streams.ciphers import with_fast_cipher
from distrain.transfer.streams.stream_pool import Ask, Job, Stream, StreamPool
from distrain.transfer.streams.streams import RefusedError, StreamEndedError, check_name
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_RETRIES_S = (0.2, 2.0)
"""Seconds before each further try of an order whose connection has broken: sshd may have been busy."""


def main(arguments: list[str]) -> None:
    """Run the mover. ``arguments``: the pid of the parent, and the command line that opens a stream, as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_with_parent(int(arguments[0]))
    channel, mover = Channel(*process.private_stdio()), Mover(with_fast_cipher(json.loads(arguments[1])))
    mover.connect()
    while not channel.at_end:
        for frame in channel.wait():
            channel.send(mover.do(frame.message()))


# -- orders ----------------------------------------------------------------------------------------------------------


class Mover:
    """Carries out orders. It raises nothing: every order has an answer.

    argv: the command line that opens a stream.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._pool = StreamPool(argv)
        self._listening: Stream | None = None
        """A stream of its own, which lives as long as this process: other hosts read from its server."""
        self._abandoned: list[str] = []
        """Staging directories that broken connections have left on the host."""

    def connect(self) -> None:
        """Begin to open a connection, which the first order needs."""
        self._pool.open()

    def do(self, order: wire.Message) -> wire.Message:
        """Carry out an order, and return the answer to it. A connection that breaks is opened again some times."""
        kept = ""
        if isinstance(order, wire.Upload) and order.source:
            kept = f"; what could not be stored is in {order.source} on that host"
        for pause_s in (*_RETRIES_S, None):
            try:
                return self._carry_out(order)
            except StreamEndedError as error:
                if pause_s is None:
                    return wire.failed_answer(order, f"{error}{kept}")
                time.sleep(pause_s)
            except Exception as error:  # the coordinator waits for an answer, whatever happens
                return wire.failed_answer(order, _reason(order, error) + kept)
        raise AssertionError("the last try has returned")

    def _carry_out(self, order: wire.Message) -> wire.Message:
        match order:
            case wire.Upload():
                return self._fetch(order)
            case wire.Deliver():
                self._deliver(order)
                return wire.Delivered()
            case wire.Serve():
                return self._serve(order)
        raise AssertionError(f"not an order: {order!r:.200}")

    def _ask(self, do: str, **fields: Any) -> dict[str, Any]:
        job = Ask({"do": do, **fields})
        self._pool.do([job])
        return job.answer

    # -- from the host --------------------------------------------------------------------------------------------

    def _fetch(self, order: wire.Upload) -> wire.Message:
        if not order.source:
            raise RefusedError("files that ranks have written into the run directory cannot come from another machine")
        listing = self._ask("list", folder=order.source, files=order.files)
        sizes = dict(zip(map(check_name, order.files), listing["sizes"], strict=True))
        make_folders(order.directory, [*listing["folders"], *map(os.path.dirname, order.files)])
        fetches = [Fetch(order.source, order.directory, batch, sizes) for batch in batches(parts_of(sizes))]
        hashing = [Ask({"do": "hash", "folder": order.source, "files": order.others})] if order.others else []
        self._pool.do([*fetches, *hashing], sum(sizes.values()))
        in_threads(flush_file, [os.path.join(order.directory, name) for name in sizes])
        digests = combined_digests(fetches)
        return wire.FilesCopied(
            attempt=order.attempt,
            rank=order.rank,
            ordinal=order.ordinal,
            files=[(name, size, crc32_of(digests[name]) or 0) for name, size in sizes.items()],
            skipped=[(name, size, crc) for job in hashing for name, size, crc in job.answer["files"]],
        )

    def _serve(self, order: wire.Serve) -> wire.Serving:
        if self._listening is not None and self._listening.has_ended:
            self._listening.close()
            self._listening = None
        self._listening = self._listening or Stream(self._argv)
        job = Ask({"do": "serve", "folder": order.folder, "address": order.address})
        try:
            job.send(self._listening, lambda: True)
            job.receive(self._listening.reader, lambda _: None)
        except StreamEndedError as error:
            raise StreamEndedError(self._listening.end(str(error))) from None
        return wire.Serving(port=job.answer["port"], secret=job.answer["secret"])

    # -- to the host ----------------------------------------------------------------------------------------------

    def _deliver(self, order: wire.Deliver) -> None:
        files = {check_name(name): (path, size, digest) for path, name, size, digest in order.files}
        check_sizes(order)
        there = self._ask("sizes", folder=order.folder, files=list(files))["sizes"]
        for (name, (_, size, digest)), found in zip(list(files.items()), there, strict=True):
            if size == found and crc32_of(digest) is None:  # its name is its digest
                del files[name]
        while self._abandoned:
            self._ask("drop", staging=self._abandoned[-1])
            self._abandoned.pop()
        staging = f"{order.staging}/.new-{secrets.token_hex(8)}"
        try:
            self._put(order, files, staging)
            self._ask("finish", folder=order.folder, staging=staging, files=list(files), folders=order.folders)
        except StreamEndedError:
            self._pool.close()  # no stream of this order goes on
            self._abandoned.append(staging)
            raise
        except Exception:
            with contextlib.suppress(OSError, RefusedError, StreamEndedError):
                self._ask("drop", staging=staging)
            raise

    def _put(self, order: wire.Deliver, files: dict[str, tuple[str, int, str]], staging: str) -> None:
        """Bring the files to the host, and check what has arrived."""
        jobs: list[Job] = []
        is_crc32 = all(crc32_of(digest) is not None for _, _, digest in files.values())
        for batch in batches(parts_of({name: size for name, (_, size, _) in files.items()}, whole=not is_crc32)):
            fields = {"staging": staging, "items": batch, "is_crc32": is_crc32}
            if order.peer is None:
                jobs.append(Put(fields, batch, [files[name][0] for name, _, _ in batch]))
            else:
                jobs.append(Pull(fields, batch, order.peer))
        try:
            self._pool.do(jobs, sum(size for _, size, _ in files.values()))
        except RefusedError:
            check_sizes(order)  # a file may have become shorter
            raise
        found = combined_digests(jobs)
        for name, (path, _, digest) in files.items():
            if found[name] != digest:
                changed = f"{path} has changed while it was shipped"
                raise RefusedError(changed if order.peer is None else f"{name} from {order.peer[0]} has other contents")


def _reason(order: wire.Message, error: Exception) -> str:
    if isinstance(error, (OSError, RefusedError)):
        return str(error)
    return f"{type(order).__name__}: {type(error).__name__}: {error}"


def check_sizes(order: wire.Deliver) -> None:
    """Raise RefusedError if a file that comes from this machine has not its announced size, OSError if it is gone."""
    for path, _, size, _ in order.files if order.peer is None else ():
        if os.stat(path).st_size != size:
            raise RefusedError(f"{path} has changed while it was shipped")


def make_folders(target: str, names: Iterable[str]) -> None:
    """Make directories below ``target``, and that itself. Raise OSError."""
    os.makedirs(target, exist_ok=True)
    for name in set(filter(None, names)):
        with contextlib.suppress(FileExistsError, NotADirectoryError):  # another rank has a file of that name
            os.makedirs(os.path.join(target, check_name(name)), exist_ok=True)
