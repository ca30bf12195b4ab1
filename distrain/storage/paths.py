"""The run directory: every file name in it, and which one a run gets. Runs in: anywhere.


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
        .reserve                    space for the end of the run, should the disk become full
        .requests                   a named pipe, while it runs: where are the ranks?

A checkpoint is written aside, flushed to disk with its manifest, then renamed: a directory named ``checkpoint_…`` is
complete, always. Its manifest says its name: one that somebody has copied, or renamed, is theirs and left alone.

Elsewhere (S3, ...) the same files are there (see ``remote_store``), but nothing can be renamed. There a
checkpoint is complete when it has its .manifest.json, which is written last; until then it has a .pending.json. One
that was damaged has a .damaged.json instead. ``.lock/`` holds the heartbeat of the coordinator.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distrain.checkpoint import MANIFEST_FILE
from distrain.errors import StorageError
from distrain.system.remote_path import OPENING_PATIENCE_S, RemotePath, locate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DEFAULT_STORAGE = "~/distrain_results"
DAMAGED = "damaged-"
DAMAGED_FILE = ".damaged.json"
_NUMBERED = re.compile(rf"(?:{DAMAGED})?checkpoint_(\d{{6,}})$")
_MANIFEST = "run.json"
_STATUSES = ("running", "finished", "failed", "aborted")
_LOGS, _STACKS = "logs", "stacks"
_LONGEST_NAME = 200
"""Bytes; what is deleted or damaged gets a longer one, and file systems take 255."""


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

    def why_not(self, name: str) -> str | None:
        """Why a checkpoint cannot be called so; None if it can."""
        taken = (self.manifest, self.metrics, *self.end(), self.logs, self.answer("").parent)
        if name.removesuffix(".new") in {path.name for path in taken}:
            return f"must not be {name!r}, as the run directory has something else of that name"
        if not name or "/" in name or "\0" in name or name.startswith((".", DAMAGED)):
            return f"must be a plain name of a directory, got {name!r}"
        size = len(os.fsencode(name))
        return f"must not be longer than {_LONGEST_NAME} bytes, got {size}" if size > _LONGEST_NAME else None

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def requests(self) -> Path:
        return self.root / ".requests"

    def answer(self, token: str) -> Path:
        return self.root / _STACKS / f"answer_{token}.txt"

    @property
    def reserve(self) -> Path:
        return self.root / ".reserve"

    @property
    def staging(self) -> Path:
        return self.root / ".staging"

    @property
    def logs(self) -> Path:
        return self.root / _LOGS

    def checkpoint(self, index: int) -> Path:
        return self.root / f"checkpoint_{index:06d}"

    def log(self, attempt: int, rank: int, logs: Path | None = None) -> Path:
        return (logs / self.root.name if logs else self.logs) / f"attempt_{attempt}" / f"rank_{rank}.log"

    def validation_log(self, checkpoint: str, logs: Path | None = None) -> Path:
        return (logs / self.root.name if logs else self.logs) / "validation" / f"{checkpoint}.log"

    def stacks(self, attempt: int, rank: int) -> Path:
        return self.root / _STACKS / f"attempt_{attempt}" / f"rank_{rank}.txt"

    def checkpoints(self) -> list[Path]:
        """Committed checkpoints, oldest first: those of our names, and others with a manifest; no copies."""
        ours = [(path, said) for path, said in self._all() if not is_copy(path.name, said)]
        ordered = sorted((_index_of(path, said), path) for path, said in ours)
        return [path for _, path in ordered if not path.name.startswith(DAMAGED)]

    def next_index(self) -> int:
        """The number of the next checkpoint: none is used twice."""
        return max((max(_index_of(*found), number_of(found[0].name)) + 1 for found in self._all()), default=0)

    def make_room(self, path: Path) -> None:
        """Make the directory that this file of the run belongs in, but not the run directory itself, should that have
        vanished. Raises OSError.
        """
        self.root.stat()
        path.parent.mkdir(parents=True, exist_ok=True)

    def mirrored(self) -> list[Path]:
        """The files that are kept elsewhere, too; the manifest last, so that who sees its news finds everything."""
        here = {self.lock, self.reserve, self.requests, self.manifest}
        aside = {self.staging, self.fetched}
        files = [path for path in sorted(self.root.rglob("*")) if path.is_file() and path.suffix != ".new"]
        return [path for path in files if path not in here and not aside & set(path.parents)] + [self.manifest]

    @property
    def fetched(self) -> Path:
        """Local copies of checkpoints elsewhere."""
        return self.root / ".fetched"

    def _folders(self) -> set[Path]:
        with contextlib.suppress(FileNotFoundError):
            return {path for path in self.root.iterdir() if path.is_dir()}
        return set()

    def _all(self) -> list[tuple[Path, dict[str, Any]]]:
        """All that is, was, or is a copy of, a checkpoint, and its manifest."""
        found = ((path, _said_in(path)) for path in self._folders())
        return [(path, said or {}) for path, said in found if said is not None or _NUMBERED.match(path.name)]


def _said_in(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, as far as it can be understood; None if it has none."""
    try:
        said = json.loads((path / MANIFEST_FILE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def is_copy(name: str, manifest: Mapping[str, Any]) -> bool:
    """Whether the directory of this name has the manifest of another checkpoint. Older ones do not say their names."""
    return bool(manifest.get("name", name) != name)


def _index_of(path: Path, manifest: Mapping[str, Any]) -> int:
    """What its manifest says, as users may give names; else what its name says, or -1."""
    try:
        return int(manifest["index"])
    except (ValueError, KeyError, TypeError):
        return number_of(path.name)


def number_of(name: str) -> int:
    """Of a checkpoint of ours; -1 for other names."""
    match = _NUMBERED.match(name)
    return int(match[1]) if match else -1


# -- which directory -------------------------------------------------------------------------------------------------


def choose_run(
    storage_path: str | os.PathLike[str] | None, name: str | None, filesystem: Any = None
) -> Path | RemotePath:
    """The run directory; it has a manifest if an unfinished run goes on there.

    Without a name: a new directory. With one: an unfinished run of that name goes on; a finished one is left alone, and
    the new run gets the next free name (``name-2``, ``name-3``, ...). Raises StorageError.
    """
    try:
        storage = locate(_DEFAULT_STORAGE if storage_path is None else storage_path, filesystem)
    except OSError as error:
        raise StorageError(f"cannot use the storage: {error}") from error
    if isinstance(storage, RemotePath):
        storage = replace(storage, patience_s=OPENING_PATIENCE_S)
    if name is None:
        return storage / f"distrain-{time.strftime('%Y-%m-%d_%H-%M-%S')}-{uuid.uuid4().hex[:6]}"
    root, number = storage / name, 1
    while read_manifest(root).get("status") == "finished":
        number += 1
        root = storage / f"{name}-{number}"
    return root


def read_manifest(root: Path | RemotePath) -> dict[str, Any]:
    """Return the run manifest, ``{}`` if there is none. Raises StorageError if it cannot be read or understood."""
    path = root / _MANIFEST
    try:
        text = path.read() if isinstance(path, RemotePath) else path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(str(error) if isinstance(path, RemotePath) else f"cannot read {path}: {error}") from error
    try:
        manifest: dict[str, Any] = json.loads(text)
        _check_manifest(manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} is damaged, or another program's ({error}). If it is damaged, move it "
            "away: a run of this name then continues at its last checkpoint. If it is another program's, give the run "
            "another name (RunConfig.name, --name)"
        ) from error
    return manifest


def _check_manifest(manifest: Any) -> None:
    """Raise ValueError, KeyError or TypeError if these are not the fields that readers of a run manifest rely on."""
    if not isinstance(manifest, dict):
        raise TypeError(f"it holds a {type(manifest).__name__}")
    if manifest.get("status") not in _STATUSES:
        raise ValueError(f"its status is {manifest.get('status')!r:.40}")
    for attempt in manifest.get("attempts", []):
        int(attempt["attempt"])
    for name, kind in (("run_id", str), ("attempts", list), ("checkpoint_config", dict)):
        if name in manifest and not isinstance(manifest[name], kind):
            raise TypeError(f"{name} is a {type(manifest[name]).__name__}")
