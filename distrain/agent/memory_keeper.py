"""Checkpoints in the memory of this host: kept, copied from other hosts, and made ready to read. Runs in: agent.

The directory is :func:`~distrain.system.scratch.memory_directory`. It holds::

    rank_3/2-17/                     a part: what rank 3 has written for its checkpoint 17 in attempt 2
    rank_3/free-4/                   a part that nobody needs: the rank overwrites it, and so reuses its pages
    copies/checkpoint_000123/rank_5/ a copy of a part of another host
    gathered/checkpoint_000123-1/    a checkpoint for readers: the files that they have asked for

The files in ``gathered`` are hard links to those of the parts, and a rank never overwrites a file with two links: a
reader sees no byte change. A damaged file is deleted as soon as it is found, and replaced by the other copy.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distrain import wire
from distrain.agent.peers import FileServer, fetch
from distrain.hosts.network import address_toward
from distrain.storage.checkpoint import MANIFEST_FILE, METADATA_FILE, delete_unread
from distrain.storage.commit import MemoryRound
from distrain.storage.file_transfer import hash_files
from distrain.storage.files import write_atomically
from distrain.storage.records import complete_manifest, manifest_text
from distrain.system import scratch
from distrain.system.background import Background
from distrain.system.text import count
from distrain.transfer.stream import checked_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from distrain.system.loop import Loop

    _Peers = Mapping[str, tuple[str, int]]

_MOST_FREE = 2
"""Free directories of a rank: one for its next part, one for when a checkpoint was copied or stored."""


@dataclass(slots=True)
class _Gathered:
    """A checkpoint for readers. files: those that were compared in the latest attempt that has read it."""

    kept: MemoryRound
    folder: Path
    attempt: int = -1
    files: set[str] = field(default_factory=set)


class MemoryKeeper:
    """Carries out the coordinator's orders about checkpoints in memory. Slow work runs in threads.

    root: the directory of this host; None without one.
    """

    def __init__(self, loop: Loop, send: Callable[[wire.Message], None], root: Path | None) -> None:
        self._send = send
        self._root = root or Path(os.devnull)
        self._hasher, self._cleaner = Background(loop, "hasher"), Background(loop, "cleaner")
        self._copier, self._gatherer = Background(loop, "copier"), Background(loop, "gatherer")
        self._host = ""
        self._ranks: Collection[int] = ()
        self._rounds: dict[str, MemoryRound] = {}
        """Those that are kept, by name."""
        self._hashing: list[Path] = []
        self._token = ""
        self._server: FileServer | None = None
        """Once there may be other hosts."""
        self._gathered: dict[str, _Gathered] = {}
        """By name."""
        self._numbers = itertools.count()

    def handle(self, message: wire.ToMemory | wire.Upload) -> None:
        """Carry out an order of the coordinator."""
        match message:
            case wire.Upload():
                self._hash(message)
            case wire.KeepRound():
                self._keep(message)
            case wire.FetchRound():
                self._fetch(message)

    # -- the parts of this host -----------------------------------------------------------------------------------

    def start(self, attempt: int, ranks: Collection[int]) -> None:
        """Free what ranks of earlier attempts have left, before these ranks start."""
        self._ranks = ranks
        self._free((attempt, 0))

    def _hash(self, asked: wire.Upload) -> None:
        folder = Path(asked.source)
        self._hashing.append(folder)
        answer = partial(wire.files_copied, asked)

        def hashed() -> wire.FilesCopied:
            files = hash_files(folder, asked.files)
            for file, *found in files:
                if found != (written := asked.facts.get(file, found)):
                    raise OSError(f"{folder}: {_difference(file, self._host or 'of this rank', found, written)}")
            return answer(files=files)

        def end(message: wire.FilesCopied) -> None:
            self._hashing.remove(folder)
            self._send(message)

        self._hasher.do(hashed, end, lambda error: end(answer(failed=str(error))))

    def _keep(self, order: wire.KeepRound) -> None:
        self._host = order.host
        if order.body:
            new = MemoryRound.decoded(order.body)
            self._rounds[new.name] = new
        parts = [Path(part.folder) for kept in self._rounds.values() for part in kept.parts.values()]
        self._rounds = {name: kept for name, kept in self._rounds.items() if name in order.keep}
        self._gathered = {name: found for name, found in self._gathered.items() if name in order.keep}
        self._free(max(map(_order, parts), default=(0, 0)))
        unused = [folder for folder in self._root.glob("copies/*") if folder.name not in order.keep]
        unused += [
            folder for folder in self._root.glob("gathered/*") if folder.name.rpartition("-")[0] not in order.keep
        ]
        self._cleaner.do(partial(delete_unread, unused))
        if order.token:
            self._serve(order)

    def _free(self, last: tuple[int, int]) -> None:
        """Free the parts up to an attempt and ordinal that belong to no checkpoint that is kept."""
        used = {part.folder for kept in self._rounds.values() for part in kept.parts.values()}
        for home in self._root.glob("rank_*"):
            most = _MOST_FREE if int(home.name.removeprefix("rank_")) in self._ranks else 0
            with contextlib.suppress(OSError):  # the rank has just taken or deleted it
                for part in home.glob("*-*"):
                    if _order(part) <= last and str(part) not in used and part not in self._hashing:
                        part.rename(home / f"free-{next(self._numbers)}")
                for part in list(home.glob("free-*"))[most:]:
                    deleted = part.rename(self._root / f"deleted-{next(self._numbers)}")
                    self._cleaner.do(partial(delete_unread, [deleted]))
                if not most:
                    home.rmdir()  # fails if it has a part that is kept

    def end(self) -> None:
        """Delete all that the run had in memory, and answer nothing more."""
        for thread in (self._hasher, self._cleaner, self._copier, self._gatherer):
            thread.close()
        if self._server is not None:
            self._server.close()
        scratch.clear(str(self._root))

    # -- the parts of other hosts ---------------------------------------------------------------------------------

    def _home(self, kept: MemoryRound, rank: int) -> Path | None:
        """Return the directory for the files of a rank on this host, None if they belong on other hosts."""
        part = kept.parts[rank]
        if part.host == self._host:
            return Path(part.folder)
        return self._root / "copies" / kept.name / f"rank_{rank}" if part.copy == self._host else None

    def _serve(self, order: wire.KeepRound) -> None:
        """Let other hosts get the files that this one keeps, and tell where."""
        self._token, port, address = order.token, 0, ""
        with contextlib.suppress(OSError):  # then others cannot connect, and say so
            self._server = self._server or FileServer(order.token, self._find)
            port, address = self._server.port, address_toward(order.peer) if order.peer else ""
        self._send(wire.MemoryServed(attempt=order.attempt, port=port, address=address))

    def _find(self, name: str, rank: int, file: str) -> Path:
        """Return the path of a file that another host wants, in a thread. Raise OSError unless it is kept here."""
        kept = self._rounds.get(name)
        home = None if kept is None or rank not in kept.parts else self._home(kept, rank)
        if kept is None or home is None or checked_name(file) not in kept.files[rank]:
            raise OSError("it is not kept there")
        return home / file

    def _pull(self, kept: MemoryRound, rank: int, file: str, host: str, peers: _Peers, target: Path) -> None:
        """Get a file of a part from another host, in a thread, and compare its bytes. Raise OSError."""
        expected = kept.files[rank][file]
        folder = self._root / "incoming"
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            if host not in peers:
                raise OSError(f"{file} cannot be read on host {host} (host {host} is lost)")
            address, port = peers[host]
            wanted = {"name": kept.name, "rank": rank, "file": file}
            try:
                found = fetch(address, port, self._token, wanted, os.path.join(place, "file"), expected[0])
            except OSError as error:
                where = f"host {host}, at {address}, port {port}, for host {self._host}"
                raise OSError(f"{file} cannot be read on {where} ({error})") from error
            if found != expected:
                raise OSError(_difference(file, host, found, expected))
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(os.path.join(place, "file"), target)

    def _fetch(self, order: wire.FetchRound) -> None:
        notes: list[str] = []
        answer = partial(wire.RoundDone, attempt=order.attempt, name=order.name, is_copy=order.is_copy, notes=notes)

        def fetch() -> wire.RoundDone:
            kept = self._rounds.get(order.name)
            if kept is None:
                raise OSError(f"host {self._host} does not know it")
            return answer(folder=str(self._copy(kept, order) if order.is_copy else self._gather(kept, order, notes)))

        thread = self._copier if order.is_copy else self._gatherer
        thread.do(fetch, self._send, lambda error: self._send(answer(failed=str(error))))

    def _copy(self, kept: MemoryRound, order: wire.FetchRound) -> Path:
        folder = self._root / "copies" / kept.name
        for rank, part in kept.parts.items():
            if part.copy == self._host:
                home = folder / f"rank_{rank}"
                home.mkdir(parents=True, exist_ok=True)
                for file in kept.files[rank]:
                    self._pull(kept, rank, file, part.host, order.peers, home / file)
        return folder

    # -- checkpoints for readers ----------------------------------------------------------------------------------

    def _gather(self, kept: MemoryRound, order: wire.FetchRound, notes: list[str]) -> Path:
        new = _Gathered(kept, self._root / "gathered" / f"{kept.name}-{next(self._numbers)}")
        found = self._gathered.setdefault(kept.name, new)
        folder = found.folder
        if found.attempt != order.attempt:  # every byte is compared again
            found.files = set()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / METADATA_FILE).unlink(missing_ok=True)
            self._fill(found, {METADATA_FILE}, order.peers, notes)
            write = partial(write_atomically, folder / METADATA_FILE, sync=False)
            manifest, _ = complete_manifest(folder, kept.manifest, kept.metadata, kept.positions, write)
            (folder / MANIFEST_FILE).write_bytes(manifest_text(manifest))
            found.attempt = order.attempt
        wanted = {*(kept.manifest["files"] if order.files is None else order.files)}
        self._fill(found, wanted - found.files, order.peers, notes)
        return folder

    def _fill(self, found: _Gathered, wanted: Collection[str], peers: _Peers, notes: list[str]) -> None:
        """Add files to a directory for readers. Raise OSError if there is no intact copy of one."""
        for rank in found.kept.parts:
            self._fill_part(found, rank, wanted, peers, notes)

    def _fill_part(self, to: _Gathered, rank: int, wanted: Collection[str], peers: _Peers, notes: list[str]) -> None:
        """Link files of a part, verify them, and replace those that are damaged. Raise OSError without a copy."""
        kept, folder, part, home = to.kept, to.folder, to.kept.parts[rank], self._home(to.kept, rank)
        files = {file: expected for file, expected in kept.files[rank].items() if file in wanted}
        if home is not None:
            for file in files:
                _link(home / file, folder / file)
        linked = [file for file in files if (folder / file).exists()]
        found = {file: (size, crc) for file, size, crc in hash_files(folder, linked)}
        hosts = [host for host in (part.host, part.copy) if host not in ("", self._host)]
        missing = [file for file in files if file not in found and part.host == self._host]
        for file in [file for file, expected in files.items() if found.get(file) != expected]:
            problems = []
            if file in found and home is not None:
                problems.append(_difference(file, self._host, found[file], files[file]))
                for damaged in (folder / file, home / file):
                    damaged.unlink(missing_ok=True)
            elif file in missing[:1]:
                problems.append(f"host {self._host} lacks {file} and {count(len(missing) - 1, 'other file')}")
            for source in list(hosts):
                try:
                    self._pull(kept, rank, file, source, peers, folder / file)
                    break
                except OSError as error:
                    problems.append(str(error))
                    hosts.append(hosts.pop(0))  # for the next file, the other one is asked first
            else:
                reasons = " and ".join(problems) or f"{file} is on no host that is left"
                raise OSError(f"no intact copy of the files of rank {rank} is left: {reasons}")
            if problems:
                notes.append(f"rank {rank}: {' and '.join(problems)}; the copy on host {source} is used instead")
            if home is not None:
                _link(folder / file, home / file)
        to.files |= files.keys()


def _order(part: Path) -> tuple[int, int]:
    """Return attempt and ordinal of the directory of a part, very high numbers for any other."""
    numbers = part.name.split("-")
    return (int(numbers[0]), int(numbers[1])) if numbers[0].isdecimal() else (1 << 62, 0)


def _difference(file: str, host: str, found: Sequence[int], expected: Sequence[int]) -> str:
    (size, crc), (right_size, right_crc) = found, expected
    if size != right_size:
        return f"{file} on host {host} has {size} bytes instead of {right_size}"
    return f"{file} on host {host} has the checksum {crc:08x} instead of {right_crc:08x}"


def _link(source: Path, target: Path) -> None:
    """Make a hard link, and its directory, unless there is no such file, or the target exists."""
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, target)
