"""A checkpoint that the agents store from memory after they have lost their coordinator. Runs in: agent, coordinator.

They write into one hidden directory, ``.memory-checkpoint_000123`` in the run directory, without talking to each
other. The first one describes the checkpoint there, because others may not have heard that it was committed. Each holds
a shared lock on the directory while it writes or waits. The manifest is written once all files are there. An agent, or
the next coordinator of the run, then gets the lock alone: if there is a manifest, it renames the directory, which makes
it a checkpoint; otherwise it deletes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING

from distrain.errors import StorageError
from distrain.storage.checkpoint import MANIFEST_FILE, METADATA_FILE
from distrain.storage.commit import MemoryRound
from distrain.storage.file_transfer import flush, store_files
from distrain.storage.files import sync_directories, write_file
from distrain.storage.paths import RunPaths
from distrain.storage.records import committed_at, complete_manifest, manifest_text
from distrain.system.locks import is_locked, lock_alone, locked_directory
from distrain.system.log import warn

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Mapping
    from pathlib import Path

_PREFIX = ".memory-"
_ROUND_FILE = ".round.json"
"""The file that describes a checkpoint to agents that have not heard that it was committed."""
_QUIET_S = 5.0
"""Seconds without a new byte of other hosts after which their files are taken from copies."""
_PATIENCE_S = 60.0
"""Seconds that the next coordinator waits for agents."""
_POLL_S = 0.1


def is_newer(run: Path, index: int) -> bool:
    """Return whether the run directory has no checkpoint with this number or a higher one."""
    for path in RunPaths(run).checkpoints():
        with contextlib.suppress(StorageError):  # a damaged one does not count
            if committed_at(path).index >= index:
                return False
    return True


def store_alone(
    run: Path,
    kept: MemoryRound,
    host: str,
    homes: Mapping[int, Path],
    may_write: threading.Event,
    deadline: float,
    tried: set[int],
) -> bool:
    """Store a checkpoint together with the agents of other hosts. Raise OSError.

    Return False if files are missing, or if other agents try a newer checkpoint that this host has not tried.

    host: this one. homes: by rank, the directories of its parts and of the copies. may_write: set when writing may
    begin. tried: the indices of checkpoints that lack files; this one is added if it does.
    """
    own = {rank: folder for rank, folder in homes.items() if kept.parts[rank].host == host}
    hidden = run / f"{_PREFIX}{kept.name}"
    with locked_directory(hidden) as lock:
        staging = hidden / f".new-{uuid.uuid4().hex}"
        is_newest = True
        try:
            _put(staging, _ROUND_FILE, kept.encoded())
            may_write.wait()
            _write(kept, own, staging)
            quiet_at, seen = time.monotonic(), -1
            while _lacks_files(kept, hidden) and time.monotonic() < min(quiet_at + _QUIET_S, deadline) and is_newest:
                if (size := sum(_size_of(path) or 0 for path in run.glob(f"{_PREFIX}*/**/*"))) != seen:
                    quiet_at, seen = time.monotonic(), size
                time.sleep(_POLL_S)
                is_newest = all(other.index <= kept.index or other.index in tried for other in described(run))
            if is_newest:
                _write(kept, homes, staging)
            if not _lacks_files(kept, hidden):
                _describe(kept, hidden, staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if is_newest:
            tried.add(kept.index)
        try:
            lock_alone(lock, deadline if is_newest else 0.0)
        except BlockingIOError:
            if is_newest:
                raise
            return False
        if not hidden.exists():
            return (run / kept.name).exists()
        if is_locked(RunPaths(run).lock) and (hidden / MANIFEST_FILE).exists():
            return True  # perhaps the coordinator was only out of reach: it decides when it opens the run again
        return _publish_or_delete(hidden)


def take_over(run: Path, unwanted: Collection[int] = (), patience_s: float = _PATIENCE_S) -> list[Path]:
    """Finish or delete what agents began to store, before the run continues. Return new checkpoints. Raise OSError.

    unwanted: the indices of checkpoints that are deleted, even if they are complete.
    """
    deadline = time.monotonic() + patience_s
    found: list[Path] = []
    seen: set[Path] = set()  # one that cannot be deleted stays
    while hidden := next((path for path in run.glob(f"{_PREFIX}*") if path not in seen), None):
        seen.add(hidden)  # agents may begin with another one meanwhile
        with locked_directory(hidden) as lock:
            try:
                lock_alone(lock, 0.0)
            except BlockingIOError:
                if not patience_s:
                    continue
                name = hidden.name.removeprefix(_PREFIX)
                warn(f"waiting up to {patience_s:g} s for the hosts that are still storing {name} from memory")
                with contextlib.suppress(BlockingIOError):
                    lock_alone(lock, deadline)
            if hidden.exists() and _publish_or_delete(hidden, unwanted):
                found.append(run / hidden.name.removeprefix(_PREFIX))
    return [path for path in found if path.exists()]


def described(run: Path) -> list[MemoryRound]:
    """Return the checkpoints that agents try to store."""
    found = []
    for path in run.glob(f"{_PREFIX}*/{_ROUND_FILE}"):
        with contextlib.suppress(OSError):  # it was renamed or deleted just now
            if not (path.parent / MANIFEST_FILE).exists():
                found.append(MemoryRound.decoded(path.read_bytes()))
    return found


def _publish_or_delete(hidden: Path, unwanted: Collection[int] = ()) -> bool:
    """Rename a directory that is complete to the checkpoint's name, and delete any other. Return whether it was.

    Raise OSError if a complete one cannot be renamed. It stays for the next coordinator.
    """
    run, final = hidden.parent, hidden.parent / hidden.name.removeprefix(_PREFIX)
    try:
        index = committed_at(hidden).index
    except StorageError:
        shutil.rmtree(hidden, ignore_errors=True)
        return False
    if index not in unwanted and is_newer(run, index) and not final.exists():
        for staging in hidden.glob(".new-*"):
            shutil.rmtree(staging)
        (hidden / _ROUND_FILE).unlink(missing_ok=True)
        sync_directories(hidden, [str(path.relative_to(hidden)) for path in hidden.rglob("*")])
        hidden.rename(final)
        flush(run)
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def _write(kept: MemoryRound, parts: Mapping[int, Path], staging: Path) -> None:
    """Write the files that are not there yet, flushed to disk, and leave out those that differ from their checksum."""
    for rank, folder in parts.items():
        files = kept.files[rank]
        sizes = {name: size for name, (size, _) in files.items() if not (staging.parent / name).exists()}
        names = [name for name, size in sizes.items() if _size_of(folder / name) == size]
        for name, size, crc in store_files(folder, staging, names):
            if files[name] == (size, crc):
                (staging.parent / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(staging / name, staging.parent / name)


def _describe(kept: MemoryRound, hidden: Path, staging: Path) -> None:
    """Write the metadata and the manifest. Another agent may do the same now."""
    write = partial(_put, staging, METADATA_FILE)
    manifest, _ = complete_manifest(hidden, kept.manifest, kept.metadata, kept.positions, write)
    _put(staging, MANIFEST_FILE, manifest_text(manifest))


def _put(staging: Path, name: str, data: bytes) -> None:
    """Write a file next to the directory ``staging``, so that no reader sees a part of it."""
    staging.mkdir(exist_ok=True)
    write_file(staging / name, data)
    os.replace(staging / name, staging.parent / name)


def _lacks_files(kept: MemoryRound, hidden: Path) -> bool:
    """Return whether a file is missing. The metadata may have been changed by another agent already."""
    return any(
        (found := _size_of(hidden / name)) is None or (found != fact["size"] and name != METADATA_FILE)
        for name, fact in kept.manifest["files"].items()
    )


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
