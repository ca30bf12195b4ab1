"""The run directory: every file name in it, and the only code that commits a checkpoint. Runs in: coordinator, worker.

::

    {storage_path}/{name}/
        run.json                    what ran, when, how it ended
        metrics.jsonl               every report of every rank, one line each
        checkpoint_000000/ ...      committed checkpoints in order, each with its .manifest.json
        damaged-checkpoint_000001/  one whose files were not what its manifest said when the run went on
        logs/attempt_0/rank_0.log   what each rank wrote
        stacks/attempt_0/rank_1.txt stacks of ranks that had to be killed
        error.json, error.pkl       why it failed
        return_value.pkl            what rank 0's train_func returned
        .staging/                   checkpoints being written; swept when the next run starts
        .lock                       held by the coordinator
        .requests                   a named pipe, while it runs: where are the ranks?

A checkpoint is written aside, flushed to disk with its manifest, then renamed: a directory named ``checkpoint_…`` is
complete, always.

Elsewhere (S3, ...) the same files are there (see :mod:`distrain.stores`), but nothing can be renamed. There a
checkpoint is complete when it has its .manifest.json, which is written last; until then it has a .pending.json. One
that was damaged has a .damaged.json instead. ``.lock/`` holds the heartbeat of the coordinator.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import json
import math
import os
import re
import shutil
import time
import uuid
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from distrain.checkpoint import MANIFEST_FILE, METADATA_FILE, Checkpoint
from distrain.errors import CheckpointError, StorageError
from distrain.output import warn
from distrain.place import OPENING_PATIENCE_S, Place, locate
from distrain.rounds import Commit, CommittedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distrain import wire
    from distrain.loop import Loop

__all__ = [
    "DAMAGED",
    "DAMAGED_FILE",
    "PENDING_FILE",
    "PENDING",
    "CommittedCheckpoint",
    "RunPaths",
    "RunStore",
    "choose_run",
    "committed_at",
    "copy_file",
    "crc32_of",
    "damage_of",
    "list_files",
    "number_of",
    "sync_file",
]

_DEFAULT_STORAGE = "~/distrain_results"
DAMAGED = "damaged-"
PENDING_FILE = ".pending.json"
DAMAGED_FILE = ".damaged.json"
PENDING = "PENDING_VALIDATION"
_NUMBERED = re.compile(rf"(?:{DAMAGED})?checkpoint_(\d{{6,}})$")
_MANIFEST = "run.json"
_COPY_BYTES = 4 << 20
_KERNEL_COPY_BYTES = 64 << 20
_SYNC_FILE_RANGE_WRITE = 2
_WHOLE = 0
"""Bytes, for sync_file_range: to the end of the file."""
_NOT_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""What copy_file_range says where it cannot be used (other file systems, old kernels, sandboxes)."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Every file name of a run."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / _MANIFEST

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def error_text(self) -> Path:
        return self.root / "error.json"

    @property
    def error_pickle(self) -> Path:
        return self.root / "error.pkl"

    @property
    def return_value(self) -> Path:
        return self.root / "return_value.pkl"

    def end(self) -> tuple[Path, ...]:
        """What a run leaves at its end."""
        return self.error_text, self.error_pickle, self.return_value

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def requests(self) -> Path:
        return self.root / ".requests"

    def answer(self, token: str) -> Path:
        return self.root / "stacks" / f"answer_{token}.txt"

    @property
    def staging(self) -> Path:
        return self.root / ".staging"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def checkpoint(self, index: int) -> Path:
        return self.root / f"checkpoint_{index:06d}"

    def log(self, attempt: int, rank: int, logs: Path | None = None) -> Path:
        return (logs / self.root.name if logs else self.logs) / f"attempt_{attempt}" / f"rank_{rank}.log"

    def validation_log(self, checkpoint: str, logs: Path | None = None) -> Path:
        return (logs / self.root.name if logs else self.logs) / "validation" / f"{checkpoint}.log"

    def stacks(self, attempt: int, rank: int) -> Path:
        return self.root / "stacks" / f"attempt_{attempt}" / f"rank_{rank}.txt"

    def checkpoints(self) -> list[Path]:
        """Committed checkpoints, oldest first: those of our names, and others with a manifest."""
        return [path for _, path in self._numbered() if not path.name.startswith(DAMAGED)]

    def next_index(self) -> int:
        """The number of the next checkpoint: none is used twice."""
        return max((index + 1 for index, _ in self._numbered()), default=0)

    def make_room(self, path: Path) -> None:
        """Make the directory that this file of the run belongs in, but not the run directory itself, should that have
        vanished. Raises OSError."""
        self.root.stat()
        path.parent.mkdir(parents=True, exist_ok=True)

    def mirrored(self) -> list[Path]:
        """The files that are kept elsewhere, too; the manifest last, so that who sees its news finds everything."""
        here = {self.lock, self.requests, self.manifest}
        aside = {self.staging, self.fetched}
        files = [path for path in sorted(self.root.rglob("*")) if path.is_file() and path.suffix != ".new"]
        return [path for path in files if path not in here and not aside & set(path.parents)] + [self.manifest]

    @property
    def fetched(self) -> Path:
        """Local copies of checkpoints elsewhere."""
        return self.root / ".fetched"

    def _numbered(self) -> list[tuple[int, Path]]:
        with contextlib.suppress(FileNotFoundError):
            folders = [path for path in self.root.iterdir() if path.is_dir()]
            found = [path for path in folders if _NUMBERED.match(path.name) or (path / MANIFEST_FILE).exists()]
            return sorted((_index_of(path), path) for path in found)
        return []


def _index_of(path: Path) -> int:
    """What its manifest says, as users may give names; else what its name says, or -1."""
    try:
        return int(json.loads((path / MANIFEST_FILE).read_text())["index"])
    except (OSError, ValueError, KeyError, TypeError):
        return number_of(path.name)


def number_of(name: str) -> int:
    """Of a checkpoint of ours; -1 for other names."""
    match = _NUMBERED.match(name)
    return int(match[1]) if match else -1


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A checkpoint of the run and the metrics it was reported with."""

    path: Path | Place
    metrics: dict[str, Any]
    validation: dict[str, Any] | None = None
    """None if it is not validated; else ``status``, the name of a :class:`ReportedCheckpointStatus`, and what
    :class:`~distrain.wire.Reported` said."""

    @property
    def is_pending(self) -> bool:
        """Whether it waits for its validation."""
        return self.validation is not None and self.validation["status"] == PENDING

    @property
    def checkpoint(self) -> Checkpoint:
        """The handle that users get."""
        if isinstance(self.path, Place):
            return Checkpoint(self.path.url, self.path.given)
        return Checkpoint(self.path)


# -- which directory -------------------------------------------------------------------------------------------------


def choose_run(storage_path: str | os.PathLike[str] | None, name: str | None, filesystem: Any = None) -> Path | Place:
    """The run directory; it has a manifest if an unfinished run goes on there.

    Without a name: a new directory. With one: an unfinished run of that name goes on; a finished one is left alone, and
    the new run gets the next free name (``name-2``, ``name-3``, ...). Raises StorageError.
    """
    try:
        storage = locate(_DEFAULT_STORAGE if storage_path is None else storage_path, filesystem)
    except OSError as error:
        raise StorageError(f"cannot use the storage: {error}") from error
    if isinstance(storage, Place):
        storage = replace(storage, patience_s=OPENING_PATIENCE_S)
    if name is None:
        return storage / f"distrain-{time.strftime('%Y-%m-%d_%H-%M-%S')}-{uuid.uuid4().hex[:6]}"
    root, number = storage / name, 1
    while read_manifest(root).get("status") == "finished":
        number += 1
        root = storage / f"{name}-{number}"
    return root


def read_manifest(root: Path | Place) -> dict[str, Any]:
    """The run manifest; ``{}`` if there is none."""
    try:
        text = (root / _MANIFEST).read() if isinstance(root, Place) else (root / _MANIFEST).read_bytes()
        manifest: dict[str, Any] = json.loads(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        named = isinstance(root, Place) and isinstance(error, OSError)
        raise StorageError(str(error) if named else f"cannot read {root / _MANIFEST}: {error}") from error
    return manifest


# -- the store -------------------------------------------------------------------------------------------------------


class RunStore:
    """The coordinator's hand on the run directory. Raises StorageError if it cannot be used or is in use."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        self.metadata: dict[str, Any] = {}
        """What every checkpoint is given, beside its own metadata."""
        self.failed: Callable[[str], None] = warn
        """Hears what has failed after a call had returned."""
        self._unflushed = False
        self._generation = uuid.uuid4().hex[:8]
        with contextlib.ExitStack() as undo:
            try:
                root.mkdir(parents=True, exist_ok=True)
                self._lock_fd = self._lock()
                undo.callback(os.close, self._lock_fd)
                self._take(undo)
                self._metrics = undo.enter_context(_open_lines(self.paths.metrics))
                self._place = root.stat()
                self._sweep()
                self._probe()
                self._next_index, self.committed = self._find()
            except OSError as error:
                raise StorageError(f"cannot use the run directory {self.place}: {error}") from error
            undo.pop_all()

    # -- where it is ----------------------------------------------------------------------------------------------

    is_elsewhere = False
    """Whether checkpoints are brought by uploaders, under names in the run directory."""
    is_of_this_process = False
    """Whether only this process can reach it."""

    @property
    def place(self) -> Path | Place:
        """The run directory, as users know it."""
        return self.paths.root

    @property
    def storage_path(self) -> str:
        """What the run directory is in."""
        return str(self.paths.root.parent)

    @property
    def filesystem(self) -> str:
        """What that is on, for other processes (see :func:`distrain.place.encode_filesystem`)."""
        return ""

    def shown(self, path: Path) -> str:
        """Where users find this file of the run."""
        return str(path)

    # -- opening --------------------------------------------------------------------------------------------------

    def _take(self, undo: contextlib.ExitStack) -> None:
        """What else is to be done before the files are looked at. Raises OSError, StorageError."""

    def _probe(self) -> None:
        """Raises OSError if nothing can be written, read or deleted, before a training finds out."""
        probe = self.paths.root / ".probe"
        probe.write_bytes(b"distrain")
        if probe.read_bytes() != b"distrain":
            raise OSError(errno.EIO, "what was written does not come back", str(probe))
        probe.unlink()

    def _find(self) -> tuple[int, list[CommittedCheckpoint]]:
        """The number of the next checkpoint, and those that there are."""
        return self.paths.next_index(), self._intact()

    def _lock(self) -> int:
        fd = os.open(self.paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 64).decode(errors="replace").strip()
            os.close(fd)
            raise StorageError(
                f"another run (process {holder or 'unknown'}) is using {self.place}; "
                "wait for it, or give this run another name (RunConfig.name)"
            ) from None
        except OSError:  # a file system without locks: then nobody can be told apart
            return fd
        try:
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        except OSError:  # a full disk
            os.close(fd)
            raise
        return fd

    def _sweep(self) -> None:
        """Half-written checkpoints and half-done deletions of earlier runs: nobody can be writing them now."""
        shutil.rmtree(self.paths.staging, ignore_errors=True)

    def _intact(self) -> list[CommittedCheckpoint]:
        """The checkpoints of an earlier part of the run, without those that were damaged since. All bytes of the latest
        are looked at, since the run goes on from it; of the others, the manifest."""
        found: list[CommittedCheckpoint] = []
        damaged: list[str] = []
        for path in reversed(self.paths.checkpoints()):
            try:
                damage = damage_of(path, thoroughly=not found)
            except OSError as error:
                raise StorageError(f"cannot read the checkpoint {path}: {error}") from error
            if damage is None:
                found.append(committed_at(path))
            else:
                aside = self._free(f"{DAMAGED}{path.name}")
                path.rename(aside)
                damaged.append(f"{path} is damaged: {damage}; it is called {aside.name} from now on")
        for text in damaged:
            warn(text)
        return found[::-1]

    def close(self) -> None:
        """Flush everything and give the directory free."""
        try:
            with contextlib.suppress(OSError):  # a full disk; whoever wrote heard of it
                self._metrics.close()
            shutil.rmtree(self.paths.staging, ignore_errors=True)
        finally:
            os.close(self._lock_fd)

    def drop_end(self) -> None:
        """Delete what an earlier, failed part of this run left as its end. Raises OSError."""
        for path in self.paths.end():
            path.unlink(missing_ok=True)

    # -- small files ----------------------------------------------------------------------------------------------

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        self._check_place()
        write_atomically(self.paths.manifest, json.dumps(manifest, indent=1).encode())

    def append_metrics(self, line: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """One report. Non-finite numbers become null, and ``nonfinite`` says which they were."""
        finite, nonfinite = _without_nonfinite(metrics)
        record = {**line, "metrics": finite, **({"nonfinite": nonfinite} if nonfinite else {})}
        self._metrics.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
        self._unflushed = True

    def flush(self) -> None:
        """Raises OSError."""
        if self._unflushed:
            self._check_place()
            self._unflushed = False
        self._metrics.flush()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def latest(self) -> CommittedCheckpoint | None:
        return self.committed[-1] if self.committed else None

    def staging_directory(self, attempt: int, ordinal: int, rank: int) -> Path:
        """Where a rank writes its part of a checkpoint; the generation keeps ranks of earlier runs out."""
        self._check_place()
        folder = self._staging_root(attempt, ordinal) / f"rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _check_place(self) -> None:
        """Raises OSError if the run directory was unmounted, moved or deleted: the run must not go on in a new one."""
        if not os.path.samestat(self.paths.root.stat(), self._place):
            raise OSError(errno.ESTALE, "the run directory is not the one any more that the run began in")

    def _staging_root(self, attempt: int, ordinal: int) -> Path:
        return self.paths.staging / f"{self._generation}-{attempt}-{ordinal}"

    def target(self, attempt: int, ordinal: int, rank: int, *, name: str | None) -> str:
        """Where the files of a rank belong that are to become a checkpoint, in the end of that name. Raises OSError."""
        return str(self.staging_directory(attempt, ordinal, rank))

    def commit(
        self,
        attempt: int,
        commit: Commit,
        *,
        name: str | None = None,
        folder: str | None = None,
        validation: Mapping[str, Any] | None = None,
        then: Callable[[CommittedCheckpoint], None],
    ) -> None:
        """Make the ranks' files the run's next checkpoint: join their parts in a directory of that ``name``, if it is
        free, or take the ``folder`` of the run directory that they are in already. Calls ``then`` when that is done,
        here at once. Raises OSError; then nothing is committed."""
        if folder:
            then(self.adopt(attempt, commit, Path(folder), validation=validation))
        else:
            then(self.join(attempt, commit, name=name, validation=validation))

    def join(
        self,
        attempt: int,
        commit: Commit,
        *,
        name: str | None = None,
        validation: Mapping[str, Any] | None = None,
    ) -> CommittedCheckpoint:
        """See :meth:`commit`."""
        self._check_place()
        root = self._staging_root(attempt, commit.ordinal)
        merged = root / "merged"
        merged.mkdir()
        for file in commit.files:
            target = merged / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            (root / f"rank_{file.rank}" / file.path).rename(target)
        _write_and_sync(merged / MANIFEST_FILE, self._manifest_with_metadata(attempt, commit, merged, validation))
        _sync_directories(merged, commit)
        name = name or self.paths.checkpoint(self._next_index).name
        final = self._free(name)
        if final.name != name:
            warn(f"there is a {name} in {self.paths.root} already; this checkpoint is called {final.name}")
        merged.rename(final)
        saved = self._committed(final, commit, validation)
        shutil.rmtree(root, ignore_errors=True)
        return saved

    def adopt(
        self, attempt: int, commit: Commit, folder: Path, *, validation: Mapping[str, Any] | None = None
    ) -> CommittedCheckpoint:
        """See :meth:`commit`."""
        self._check_place()
        _sync_directories(folder, commit)
        write_atomically(folder / MANIFEST_FILE, self._manifest_with_metadata(attempt, commit, folder, validation))
        sync_directory(folder)
        return self._committed(folder, commit, validation)

    def _committed(self, path: Path, commit: Commit, validation: Mapping[str, Any] | None) -> CommittedCheckpoint:
        sync_directory(self.paths.root)
        self._next_index += 1
        self.committed.append(CommittedCheckpoint(path, dict(commit.metrics), _validation_of(validation)))
        return self.committed[-1]

    def amend(self, saved: CommittedCheckpoint, status: str, metrics: Mapping[str, Any]) -> None:
        """Note what came of the validation of a checkpoint, and add the metrics to its own. Raises OSError."""
        position = self.committed.index(saved)
        metrics = {**saved.metrics, **metrics}
        validation = {**(saved.validation or {}), "status": status}
        self.committed[position] = replace(saved, metrics=metrics, validation=validation)
        finite, nonfinite = _without_nonfinite(metrics)
        fields = {"metrics": finite, "nonfinite": nonfinite, "validation": self.committed[position].validation}
        self._amend_manifest(saved, fields)

    def _amend_manifest(self, saved: CommittedCheckpoint, fields: Mapping[str, Any]) -> None:
        assert isinstance(saved.path, Path)
        path = saved.path / MANIFEST_FILE
        write_atomically(path, json.dumps({**json.loads(path.read_text()), **fields}, indent=1).encode())

    def _free(self, name: str) -> Path:
        path, number = self.paths.root / name, 1
        while path.exists():
            number += 1
            path = self.paths.root / f"{name}-{number}"
        return path

    def _manifest_with_metadata(
        self, attempt: int, commit: Commit, folder: Path, validation: Mapping[str, Any] | None
    ) -> bytes:
        commit = replace(commit, files=tuple(self._with_metadata(folder, commit.files)))
        return json.dumps(self._manifest(attempt, commit, validation), indent=1).encode()

    def _manifest(self, attempt: int, commit: Commit, validation: Mapping[str, Any] | None) -> dict[str, Any]:
        finite, nonfinite = _without_nonfinite(commit.metrics)
        return {
            "index": self._next_index,
            "attempt": attempt,
            "time": time.time(),
            "ranks": list(commit.ranks),
            "metrics": finite,
            "nonfinite": nonfinite,
            "validation": _validation_of(validation),
            "files": {f.path: {"size": f.size, "crc32": f"{f.crc32:08x}", "rank": f.rank} for f in commit.files},
        }

    def _with_metadata(self, folder: Path, files: Sequence[CommittedFile]) -> Sequence[CommittedFile]:
        """Add the run's metadata to the checkpoint's own, which come first."""
        if not self.metadata:
            return files
        path = folder / METADATA_FILE
        try:
            own = json.loads(path.read_text()) if path.exists() else {}
        except ValueError:
            own = None
        if not isinstance(own, dict):
            warn(f"{METADATA_FILE} of a checkpoint holds no JSON object; the run's metadata is not added to it")
            return files
        data = json.dumps({**self.metadata, **own}).encode()
        _write_and_sync(path, data)
        added = CommittedFile(METADATA_FILE, 0, len(data), zlib.crc32(data))
        return [*(file for file in files if file.path != METADATA_FILE), added]

    def delete(self, positions: Sequence[int]) -> None:
        """Delete checkpoints, given by their positions in ``committed``, but not those that somebody reads; each
        vanishes at once, by a rename. Raises OSError."""
        self.paths.staging.mkdir(exist_ok=True)
        for position in sorted(positions, reverse=True):
            path = self.committed[position].path
            assert isinstance(path, Path)
            if is_being_read(path):
                continue
            del self.committed[position]
            aside = self.paths.staging / f"deleted-{path.name}-{self._generation}"
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def for_workers(self, saved: CommittedCheckpoint) -> str:
        """The path or URL by which other processes can read it. Raises OSError, CheckpointError."""
        return str(saved.path)

    # -- what is done by others -----------------------------------------------------------------------------------

    def start(self, loop: Loop | None, run_id: str, flags: Sequence[str]) -> None:
        """The run begins, with a loop that answers can be read in, if there is one; ``flags`` of the interpreter."""

    def opening(self) -> wire.OpenStorage | None:
        """What the uploaders of all hosts have to know before anything is stored."""
        return None

    def do(self, order: wire.Upload) -> wire.Message:
        """Store a rank's files from within this process, and say what came of it."""
        raise AssertionError(f"nobody can store {order.source} while train_func goes on")

    @property
    def settled(self) -> bool:
        """Whether nothing is under way."""
        return True

    def settle(self) -> None:
        """Wait until nothing is under way."""

    def abandon(self) -> None:
        """Nobody waits for what is under way: it may or may not arrive."""

    def tell_wait(self) -> None:
        """Say what is under way, as it takes its time."""

    def detach(self) -> None:
        """The loop ends."""


def _sync_directories(root: Path, commit: Commit) -> None:
    for folder in {Path(), *(parent for file in commit.files for parent in Path(file.path).parents)}:
        sync_directory(root / folder)


def _open_lines(path: Path) -> IO[str]:
    """Open for appending, without the torn last line that a power cut may have left."""
    file = path.open("a+", encoding="utf-8")
    end = size = file.seek(0, os.SEEK_END)
    while end and os.pread(file.fileno(), 1, end - 1) != b"\n":
        end -= 1
    if end < size:
        file.truncate(end)
    return file


def damage_of(path: Path, *, thoroughly: bool = True) -> str | None:
    """What is wrong with a committed checkpoint; None if its files are what its manifest says, metadata aside, which
    may be changed at any time. ``thoroughly``: look at the files' bytes, too. Raises OSError if it cannot be read."""
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text())
        files = {name: (fact["size"], fact["crc32"]) for name, fact in manifest["files"].items()}
        manifest["metrics"].items()
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST_FILE} cannot be understood ({type(error).__name__}: {error})"
    files.pop(METADATA_FILE, None)
    for name, (size, _) in files.items():
        try:
            found = (path / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return _changed_file(path, {name: crc32 for name, (_, crc32) in files.items()}) if thoroughly else None


def _changed_file(path: Path, crc32s: Mapping[str, str]) -> str | None:
    for name, expected in crc32s.items():
        if f"{crc32_of(path / name)[1]:08x}" != expected:
            return f"{name} has changed since it was committed"
    return None


def committed_at(path: Path | Place, manifest: Mapping[str, Any] | None = None) -> CommittedCheckpoint:
    """The checkpoint there, as its manifest, which is read from a local one, tells of it. Raises StorageError."""
    try:
        if manifest is None:
            assert isinstance(path, Path)
            manifest = json.loads((path / MANIFEST_FILE).read_text())
        metrics = with_nonfinite(manifest["metrics"], manifest.get("nonfinite", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} is damaged, its manifest cannot be read ({error}); move it away to go on"
        ) from error
    return CommittedCheckpoint(path, metrics, manifest.get("validation"))


def _validation_of(asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if asked is None else {**asked, "status": PENDING}


def is_being_read(path: Path) -> bool:
    """Whether somebody is in ``Checkpoint.as_directory()`` of a local checkpoint, as far as the file system tells."""
    try:
        fd = os.open(path / MANIFEST_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


# -- JSON has no NaN -------------------------------------------------------------------------------------------------


def _without_nonfinite(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The metrics with null for each non-finite number, and where those were, by JSON pointer (RFC 6901)."""
    nonfinite: dict[str, str] = {}

    def clean(value: Any, pointer: str) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[pointer] = str(value)
            return None
        return _each(clean, value, pointer)

    return clean(dict(metrics), ""), nonfinite


def with_nonfinite(metrics: dict[str, Any], nonfinite: Mapping[str, str]) -> dict[str, Any]:
    """The metrics as they were reported, NaN and infinities included."""

    def restore(value: Any, pointer: str) -> Any:
        return float(nonfinite[pointer]) if pointer in nonfinite else _each(restore, value, pointer)

    restored: dict[str, Any] = restore(metrics, "") if nonfinite else metrics
    return restored


def _each(function: Callable[[Any, str], Any], value: Any, pointer: str) -> Any:
    """A dict or list with the function applied to each item; anything else as it is."""
    if isinstance(value, dict):
        return {k: function(v, f"{pointer}/{k.replace('~', '~0').replace('/', '~1')}") for k, v in value.items()}
    if isinstance(value, list):
        return [function(item, f"{pointer}/{index}") for index, item in enumerate(value)]
    return value


# -- files -----------------------------------------------------------------------------------------------------------


def list_files(folder: Path) -> list[tuple[str, int]]:
    """Relative path and size in bytes of every file below ``folder``, sorted; links are followed. Raises
    CheckpointError for one that leads nowhere."""
    found = []
    for parent, _, names in os.walk(folder, followlinks=True):
        for name in names:
            if name == MANIFEST_FILE:  # of a committed checkpoint that is reported again
                continue
            path = Path(parent, name)
            if path.is_symlink() and not path.exists():
                raise CheckpointError(f"{path} is a link to {os.readlink(path)}, which does not exist")
            found.append((str(path.relative_to(folder)), path.stat().st_size))
    return sorted(found)


def copy_file(source: Path, target: Path) -> tuple[int, int]:
    """Copy and flush to disk; returns size in bytes and crc32 of what was written. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    buffer = memoryview(bytearray(_COPY_BYTES))
    with _naming(source), source.open("rb", buffering=0) as reader, target.open("wb+", buffering=0) as writer:
        with _naming(target):
            size, crc = _copy_in_kernel(reader.fileno(), writer.fileno(), buffer)
        while count := reader.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            written = 0
            with _naming(target):
                while written < count:
                    written += writer.write(buffer[written:count])
            _begin_flush(writer.fileno(), size, count)
            size += count
        with _naming(target):
            os.fsync(writer.fileno())
    return size, crc


def _copy_in_kernel(reader: int, writer: int, buffer: memoryview) -> tuple[int, int]:
    """Copy as far as the kernel does it by itself, which takes a third of the CPU, or no bytes at all where the file
    system can share them; returns size in bytes and crc32."""
    size = crc = 0
    while hasattr(os, "copy_file_range"):
        try:
            count = os.copy_file_range(reader, writer, _KERNEL_COPY_BYTES)
        except OSError as error:
            if error.errno not in _NOT_IN_KERNEL:
                raise
            break
        if not count:
            break
        _begin_flush(writer, size, count)
        end = size + count
        while size < end:
            read = os.preadv(writer, [buffer[: end - size]], size)
            if not read:
                raise OSError(errno.EIO, "the copy was made shorter while it was written")
            crc = zlib.crc32(buffer[:read], crc)
            size += read
    return size, crc


def _begin_flush(fd: int, start: int, count: int) -> None:
    """Have the kernel write these bytes to disk while the next ones are copied and hashed, where it can. A hint: only
    fsync makes them last."""
    with contextlib.suppress(AttributeError):  # Linux has it, Python does not
        ctypes.CDLL(None).sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def sync_file(path: Path) -> tuple[int, int]:
    """Flush a file to disk, while it is hashed; returns its size in bytes and crc32. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        _begin_flush(fd, 0, _WHOLE)
        found = crc32_of(path)
        os.fsync(fd)
    finally:
        os.close(fd)
    return found


def crc32_of(path: Path) -> tuple[int, int]:
    """Size in bytes and crc32 of a file."""
    size = crc = 0
    buffer = memoryview(bytearray(_COPY_BYTES))
    with path.open("rb", buffering=0) as reader:
        while count := reader.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            size += count
    return size, crc


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that readers see the old or the new one, never a part."""
    aside = path.with_name(f"{path.name}.new")
    _write_and_sync(aside, data)
    aside.replace(path)


def _write_and_sync(path: Path, data: bytes) -> None:
    with _naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError of a write or of a read does not say by itself which file it was."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_metrics(path: Path | Place, *, rank: int | None = 0) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl (of one rank, or of all), with non-finite numbers restored. A torn last line, as a
    power cut leaves it, is passed over. Raises OSError; no file is no line."""
    try:
        lines = io.BytesIO(path.read()) if isinstance(path, Place) else path.open("rb")
    except FileNotFoundError:
        return
    with lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            record = json.loads(line)
            if rank is None or record["rank"] == rank:
                record["metrics"] = with_nonfinite(record["metrics"], record.pop("nonfinite", {}))
                yield record
