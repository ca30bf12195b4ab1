"""The facts about a checkpoint that is committed, in memory or on storage, and its manifest. Runs in: anywhere."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distrain.errors import StorageError
from distrain.storage.checkpoint import Checkpoint
from distrain.system.remote_path import RemotePath
from distrain.system.text import with_nonfinite, without_nonfinite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Commit:
    """The order to commit a checkpoint, because all its files are stored.

    files: by name, see :func:`file_entry`.
    silent: the ranks of which nobody knows that they report nothing: they had just not reported in time.
    """

    ordinal: int
    files: Mapping[str, dict[str, Any]]
    ranks: tuple[int, ...]
    metrics: dict[str, Any]
    world_size: int = 0
    silent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The files of one rank. folder: their directory on ``host``. copy: the host that has, or gets, a copy, or ""."""

    host: str
    folder: str
    copy: str = ""


@dataclass(frozen=True)
class MemoryRound:
    """A checkpoint that is committed, in memory.

    manifest: as on storage; a file belongs to the part of its ``rank``. metadata: the run's, which is added to the
    checkpoint's own. positions: those in the data.
    """

    name: str
    manifest: dict[str, Any]
    metadata: dict[str, Any]
    positions: dict[str, Any]
    parts: dict[int, MemoryPart]

    @property
    def index(self) -> int:
        """The number of the checkpoint, counted over the whole run."""
        return int(self.manifest["index"])

    @cached_property
    def files(self) -> dict[int, dict[str, tuple[int, int]]]:
        """By rank and name: size and crc32 of each file."""
        files: dict[int, dict[str, tuple[int, int]]] = {rank: {} for rank in self.parts}
        for name, fact in self.manifest["files"].items():
            files[fact["rank"]][name] = fact["size"], int(fact["crc32"], 16)
        return files

    def encoded(self) -> bytes:
        """Return a text for :meth:`decoded`."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, text: bytes) -> MemoryRound:
        """Return the round from its text."""
        fields = json.loads(text)
        parts = {int(rank): MemoryPart(**part) for rank, part in fields["parts"].items()}
        return cls(**{**fields, "parts": parts})


def merged_positions(by_rank: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the ranks' positions in the data, by the name of a loader and by rank.

    A rank whose position equals that of the next lower rank has no entry. The ranks are text, as keys are in JSON.
    """
    merged: dict[str, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    for rank in sorted(by_rank):
        for name, position in by_rank[rank].items():
            if name not in last or position != last[name]:
                merged.setdefault(name, {})[str(rank)] = last[name] = position
    return merged


def other_data(by_rank: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return a warning if ranks that share a dataset do not read the same data."""
    seen: dict[str, tuple[int, Any]] = {}
    for rank, positions in by_rank.items():
        for name, position in positions.items():
            if "data" not in position:  # the rank has not begun, or it is a loader
                continue
            data = {**position["data"], **position.get("first rows", {})}
            first, expected = seen.setdefault(name, (rank, data))
            if data != expected and position["ranks"] > 1:
                return (
                    f"dataset {name!r} is not the same on all ranks: rank {first} reads {expected}, and rank {rank} "
                    f"reads {data}; some rows come twice, or never. Have all ranks read the same, or each its own rows "
                    "with DataConfig(datasets_to_split=[...])"
                )
    return None


# -- checkpoints that are committed ---------------------------------------------------------------------------------

PENDING = "PENDING_VALIDATION"


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A checkpoint of the run and the metrics that it was reported with."""

    path: Path | RemotePath
    metrics: dict[str, Any]
    validation: dict[str, Any] | None = None
    """The ``status`` (the name of a :class:`ReportedCheckpointStatus`), the validation's arguments from
    :class:`~distrain.wire.Reported`, the ``report`` (its attempt and index) that asked for it, and the names of the
    ``metrics`` that it has added; None if the checkpoint is not validated."""
    index: int = field(default=-1, compare=False)
    """The number of the commit, counted from 0 over the whole run."""
    step: int = field(default=0, compare=False)
    """The number of reports that a rank had made with it, over the whole run. A restart repeats later ones."""
    world_size: int = field(default=0, compare=False)
    """The number of ranks in the attempt that has made it; 0 if that is unknown."""
    ranks: tuple[int, ...] = field(default=(), compare=False)
    """The ranks that have reported its files."""
    silent: tuple[int, ...] = field(default=(), compare=False)
    """The ranks whose files it may lack: they had just not reported in time."""
    bytes: int = field(default=0, compare=False)
    """The size of its files."""
    time: float = field(default=0.0, compare=False)
    """The time of the commit, in seconds since 1970; 0 if that is unknown."""
    skip_to: dict[str, Any] | None = field(default=None, compare=False)
    """After a rollback to it: by dataset or loader, the position up to which rows are left out. Else None."""
    progress: Sequence[float] | None = field(default=None, compare=False)
    """The step that it was reported with, and the last one; None without ``progress``."""
    manifest: dict[str, Any] | None = field(default=None, compare=False)
    """Its future manifest, if the hosts have it in memory, and ``path`` does not exist yet. Else None."""

    @property
    def is_in_memory(self) -> bool:
        """True if the hosts have it in memory, and ``path`` does not exist yet."""
        return self.manifest is not None

    @property
    def is_pending(self) -> bool:
        """True while the checkpoint waits for its validation."""
        return self.validation is not None and self.validation["status"] == PENDING

    @property
    def place(self) -> str:
        """The progress of the run: ``step 5 of 20``, or ``report 12`` if the user does not count steps."""
        return "step {:,} of {:,}".format(*self.progress) if self.progress else f"report {self.step:,}"

    @property
    def checkpoint(self) -> Checkpoint:
        """The handle for users."""
        if isinstance(self.path, RemotePath):
            return Checkpoint(self.path.url, self.path.given)
        return Checkpoint(self.path)


def committed(path: Path | RemotePath, manifest: Mapping[str, Any]) -> CommittedCheckpoint:
    """Return the checkpoint at ``path`` by its manifest. Raise StorageError."""
    try:
        metrics = with_nonfinite(dict(manifest["metrics"].items()), manifest.get("nonfinite", {}))
        index, validation = int(manifest.get("index", -1)), manifest.get("validation")
        step, world_size = int(manifest.get("step", 0)), int(manifest.get("world_size", 0))
        ranks, silent = (tuple(map(int, manifest.get(name, ()))) for name in ("ranks", "silent"))
        size = sum(int(fact["size"]) for fact in manifest.get("files", {}).values())
        time, skip_to, progress = float(manifest.get("time", 0)), manifest.get("skip_to"), manifest.get("progress")
        if validation is not None:
            str(validation["status"]), [metrics[name] for name in validation.get("metrics", ())]
        _, _, _ = map(float, (size, *(progress or (0, 0))))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise unreadable(path, error) from error
    if reason := why_disowned(manifest):
        raise StorageError(f"{path}: {reason}")
    return CommittedCheckpoint(
        path, metrics, validation, index, step, world_size, ranks, silent, size, time, skip_to, progress
    )


def unreadable(path: Path | RemotePath, error: Exception) -> StorageError:
    """Return the error for a checkpoint whose manifest cannot be read."""
    return StorageError(f"{path} is damaged, its manifest cannot be read ({error}); move it away, then start again")


def why_disowned(manifest: Mapping[str, Any]) -> str | None:
    """Return what turned out later to be wrong with a checkpoint, or None."""
    if "lacks" in manifest:
        return f"it lacks the files of rank {manifest['lacks']}, which had not reported in time"
    return "several rollbacks in a row have come from it" if "suspect" in manifest else None


def new_manifest(commit: Commit, *, validation: Mapping[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    """Return the manifest of a new checkpoint.

    facts: its name (None for a number), index, attempt, step, progress and time. validation: the arguments of its
    validation, or None.
    """
    finite, nonfinite = without_nonfinite(commit.metrics)
    return {
        **facts,
        "world_size": commit.world_size,
        "ranks": list(commit.ranks),
        "silent": list(commit.silent),
        "metrics": finite,
        "nonfinite": nonfinite,
        "validation": None if validation is None else {**validation, "status": PENDING},
        "files": dict(commit.files),
    }


def file_entry(size: int, crc32: int, rank: int) -> dict[str, Any]:
    """Return the entry of a file in the manifest of a checkpoint."""
    return {"size": size, "crc32": f"{crc32:08x}", "rank": rank}
