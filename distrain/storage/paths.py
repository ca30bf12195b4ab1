"""The run directory: every file name in it, and the choice of the directory for a run. Runs in: anywhere.

::

    {storage_path}/{name}/
        run.json                    settings, attempts, and how the run ended
        metrics.jsonl               every report of every rank, one line each
        events.jsonl                what happens: checkpoints, hangs, slow ranks, ...
        checkpoint_000000/ ...      committed checkpoints in order, each with its .manifest.json
        damaged-checkpoint_000001/  a checkpoint that differed from its manifest when the run continued
        logs/attempt_0/rank_0.log   the output of each rank
        evidence/attempt_0/         why ranks hung or failed: stacks/rank_1.txt, flight_recorder/rank_1.json, ...
        error.json, error.pkl       why the run failed
        return_value.pkl            the return value of rank 0's train_func
        page.html                   all of this for people
        trackers/wandb.json         how far a tracker has got, and the id of its run
        tensorboard/                event files of the tracker tensorboard
        .staging/                   checkpoints being written; deleted when the next run starts
        .lock                       held by the coordinator
        .reserve                    disk space for the end of the run, in case the disk becomes full
        .requests                   a socket for requests, while the run lasts

A checkpoint is written under another name and flushed to disk with its manifest, then renamed: a directory called
``checkpoint_...`` is always complete. Its manifest has its name. A directory with another name is a user's copy, which
the run ignores.

A remote run directory (S3, ...) has the same files (see ``remote_store``), but nothing can be renamed. A remote
checkpoint is complete when it has its .manifest.json, which is written last; until then it has a .pending.json. A
damaged one has a .damaged.json instead. ``.lock/`` has the heartbeat of the coordinator.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distrain.errors import StorageError
from distrain.storage import names
from distrain.storage.checkpoint import MANIFEST_FILE
from distrain.storage.lines import parse_json, read_file
from distrain.system.remote_path import OPENING_PATIENCE_S, RemotePath, locate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DAMAGED = "damaged-"
DAMAGED_FILE = ".damaged.json"
_NUMBERED = re.compile(rf"(?:{DAMAGED})?checkpoint_(\d{{6,}})$")
_LONGEST_NAME = 200
"""Bytes in the name of a checkpoint. File systems take 255, and deleted and damaged checkpoints get longer names."""


class _InRoot:
    """A file or directory that is directly in the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths, _: object) -> Path:
        return paths.root / self._name


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The path of every file of a run. log_dir: has the logs, in a directory named like the run; None for its own."""

    root: Path
    log_dir: Path | None = None

    manifest = _InRoot(names.MANIFEST)
    metrics = _InRoot(names.METRICS)
    events = _InRoot(names.EVENTS)
    error_text = _InRoot(names.ERROR_TEXT)
    error_pickle = _InRoot(names.ERROR_PICKLE)
    return_value = _InRoot(names.RETURN_VALUE)
    page = _InRoot("page.html")
    lock = _InRoot(names.LOCK)
    requests = _InRoot(names.REQUESTS)
    reserve = _InRoot(".reserve")
    staging = _InRoot(".staging")

    def end_files(self) -> tuple[Path, ...]:
        """Return the files that a run writes at its end."""
        return self.error_text, self.error_pickle, self.return_value, self.page

    def name_problem(self, name: str) -> str | None:
        """Return why a checkpoint cannot have this name, or None."""
        folders = (names.LOGS, names.EVIDENCE, names.TRACKERS, names.TENSORBOARD)
        taken = (names.MANIFEST, names.METRICS, names.EVENTS, *folders, *(path.name for path in self.end_files()))
        if name.removesuffix(".new") in taken:
            return f"must not be {name!r}, as the run directory has something else of that name"
        if not name or "/" in name or not name.isprintable() or name.startswith((".", DAMAGED)):
            return f"must be a plain name of a directory, got {name!a}"
        size = len(os.fsencode(name))
        return f"must not be longer than {_LONGEST_NAME} bytes, got {size}" if size > _LONGEST_NAME else None

    @property
    def logs(self) -> Path:
        return self.log_dir / self.root.name if self.log_dir else self.root / names.LOGS

    def checkpoint(self, index: int) -> Path:
        return self.root / names.checkpoint_name(index)

    def log(self, attempt: int, rank: int) -> Path:
        return self.logs / f"attempt_{attempt}" / f"rank_{rank}.log"

    def validation_log(self, checkpoint: str) -> Path:
        return self.logs / "validation" / f"{checkpoint}.log"

    def evidence(self, attempt: int) -> Path:
        return self.root / names.EVIDENCE / f"attempt_{attempt}"

    def checkpoints(self) -> list[Path]:
        """Return the committed checkpoints, the oldest first, without copies that users have made."""
        found = self._checkpoints_and_copies()
        ordered = sorted(
            (_index_of(path, manifest), path) for path, manifest in found if not is_copy(path.name, manifest)
        )
        return [path for _, path in ordered if not path.name.startswith(DAMAGED)]

    def next_index(self) -> int:
        """Return the number of the next checkpoint. No number is used twice."""
        found = self._checkpoints_and_copies()
        return max((max(_index_of(path, manifest), number_of(path.name)) + 1 for path, manifest in found), default=0)

    def make_parent(self, path: Path) -> None:
        """Make the directory of a file of the run, but not the run directory itself. Raise OSError."""
        self.root.stat()
        path.parent.mkdir(parents=True, exist_ok=True)

    def files_to_mirror(self) -> list[Path]:
        """Return the files of a spool that its remote run directory has, too.

        The manifest is the last, so that a reader who sees a change of it finds the other files.
        """
        local = {self.lock, self.reserve, self.requests, self.manifest}
        files = [path for path in sorted(self.root.rglob("*")) if path.is_file() and path.suffix != ".new"]
        return [path for path in files if path not in local and self.staging not in path.parents] + [self.manifest]

    def _checkpoints_and_copies(self) -> list[tuple[Path, dict[str, Any]]]:
        """Return every directory that is or was a checkpoint, or is a copy of one, with its manifest."""
        folders = [path for path in self.root.iterdir() if path.is_dir()] if self.root.exists() else []
        found = ((path, _manifest_in(path)) for path in folders)
        return [
            (path, manifest or {}) for path, manifest in found if manifest is not None or _NUMBERED.match(path.name)
        ]


def _manifest_in(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint, {} if it is damaged, None if there is none."""
    try:
        manifest = parse_json(read_file(path / MANIFEST_FILE, path.parent))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def is_copy(name: str, manifest: Mapping[str, Any]) -> bool:
    """Return whether a directory of this name is a copy, which its manifest shows by another name.

    Manifests of early versions have no name.
    """
    return bool(manifest.get("name", name) != name)


def _index_of(path: Path, manifest: Mapping[str, Any]) -> int:
    """Return the index in the manifest, or else the number in the name, or -1."""
    try:
        return int(manifest["index"])
    except (ValueError, KeyError, TypeError):
        return number_of(path.name)


def number_of(name: str) -> int:
    """Return the number in the name of a checkpoint, -1 for names that users gave."""
    match = _NUMBERED.match(name)
    return int(match[1]) if match else -1


# -- which directory -------------------------------------------------------------------------------------------------


def new_name(stem: str) -> str:
    """Return a name that no other run has: ``stem``, the time, and a random suffix."""
    return f"{stem}-{time.strftime('%Y-%m-%d_%H-%M-%S')}-{uuid.uuid4().hex[:6]}"


def choose_run(
    storage_path: str | os.PathLike[str] | None, name: str | None, filesystem: Any = None, *, stem: str = "distrain"
) -> Path | RemotePath:
    """Return the run directory. It has a manifest if an unfinished run continues there. Raise StorageError.

    Without a name, the directory is new, and its name begins with ``stem``. With a name, an unfinished run of that name
    continues. A finished one is left alone, and the new run gets the next free name (``name-2``, ``name-3``, ...).
    """
    try:
        storage = locate(names.DEFAULT_STORAGE if storage_path is None else storage_path, filesystem)
        if isinstance(storage, RemotePath):
            storage.check_shared()
            storage = replace(storage, patience_s=OPENING_PATIENCE_S)
        roots = (storage / one for one in names.numbered(name or new_name(stem)))
        return next(root for root in roots if not name or read_manifest(root).get("status") != "finished")
    except OSError as error:
        raise StorageError(f"cannot use the storage: {error}") from error


def read_manifest(root: Path | RemotePath) -> dict[str, Any]:
    """Return the run manifest, ``{}`` if there is none. Raise StorageError if it is unreadable or damaged."""
    path = root / names.MANIFEST
    try:
        text = read_file(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        if isinstance(path, RemotePath):
            raise StorageError(f"cannot use the storage: {error}") from error
        raise StorageError(f"cannot read {path}: {error}") from error
    try:
        manifest: dict[str, Any] = parse_json(text)
        _check_manifest(manifest)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise StorageError(
            f"{path} is damaged, or another program's ({error}). If it is damaged, move it "
            "away: a run of this name then continues at its last checkpoint. If it is another program's, give the run "
            "another name (RunConfig.name)"
        ) from error
    return manifest


def _check_manifest(manifest: Any) -> None:
    """Raise ValueError, KeyError or TypeError if a field that readers of the run manifest need is wrong."""
    if not isinstance(manifest, dict):
        raise TypeError(f"it holds a {type(manifest).__name__}")
    if manifest.get("status") not in names.STATUSES:
        raise ValueError(f"its status is {manifest.get('status')!r:.40}")
    for attempt in manifest.get("attempts", []):
        int(attempt["attempt"])
    for name, kind in (("run_id", str), ("attempts", list), ("changes", list), ("checkpoint_config", dict)):
        if name in manifest and not isinstance(manifest[name], kind):
            raise TypeError(f"{name} is a {type(manifest[name]).__name__}")
