"""The records of a run: manifests of checkpoints, and the lines of metrics.jsonl. Runs in: anywhere."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.errors import StorageError
from distrain.storage.checkpoint import MANIFEST_FILE, METADATA_FILE, PENDING_FILE, POSITIONS, Checkpoint
from distrain.storage.file_transfer import hash_files
from distrain.storage.lines import last_record as last_record
from distrain.storage.lines import parse_json, read_file, with_nonfinite
from distrain.storage.lines import read_events as read_events
from distrain.storage.lines import read_metrics as read_metrics
from distrain.storage.lines import without_nonfinite as without_nonfinite
from distrain.system.remote_path import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from distrain.storage.commit import Commit
    from distrain.storage.file_transfer import Files

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
        """How far the run was: ``step 5 of 20``, or ``report 12`` if the user does not count steps."""
        return "step {:,} of {:,}".format(*self.progress) if self.progress else f"report {self.step:,}"

    @property
    def checkpoint(self) -> Checkpoint:
        """The handle for users."""
        if isinstance(self.path, RemotePath):
            return Checkpoint(self.path.url, self.path.given)
        return Checkpoint(self.path)


def committed_at(path: Path | RemotePath, manifest: Mapping[str, Any] | None = None) -> CommittedCheckpoint:
    """Return the checkpoint at ``path`` by its manifest, which is read if it is not given. Raise StorageError."""
    try:
        if manifest is None:
            manifest = parse_json(read_file(path / MANIFEST_FILE))
            assert manifest is not None
        metrics = with_nonfinite(dict(manifest["metrics"].items()), manifest.get("nonfinite", {}))
        index, validation = int(manifest.get("index", -1)), manifest.get("validation")
        step, world_size = int(manifest.get("step", 0)), int(manifest.get("world_size", 0))
        ranks, silent = (tuple(map(int, manifest.get(name, ()))) for name in ("ranks", "silent"))
        size = sum(int(fact["size"]) for fact in manifest.get("files", {}).values())
        time, skip_to, progress = float(manifest.get("time", 0)), manifest.get("skip_to"), manifest.get("progress")
        if validation is not None:
            str(validation["status"]), [metrics[name] for name in validation.get("metrics", ())]
        _, _, _ = map(float, (size, *(progress or (0, 0))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise StorageError(
            f"{path} is damaged, its manifest cannot be read ({error}); move it away, then start again"
        ) from error
    if reason := _why_disowned(manifest):
        raise StorageError(f"{path}: {reason}")
    return CommittedCheckpoint(
        path, metrics, validation, index, step, world_size, ranks, silent, size, time, skip_to, progress
    )


def _why_disowned(manifest: Mapping[str, Any]) -> str | None:
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
        "files": {file.path: file_entry(file.size, file.crc32, file.rank) for file in commit.files},
    }


def file_entry(size: int, crc32: int, rank: int) -> dict[str, Any]:
    """Return the entry of a file in the manifest of a checkpoint."""
    return {"size": size, "crc32": f"{crc32:08x}", "rank": rank}


def add_metadata(
    checkpoint: Path | RemotePath,
    metadata: Mapping[str, Any],
    positions: Mapping[str, Any],
    files: dict[str, dict[str, Any]],
    write: Callable[[bytes], None],
) -> str | None:
    """Add the run's metadata to the checkpoint's own, whose entries win, and to the manifest's ``files``.

    positions: the positions in the data. They replace those in the checkpoint's own metadata, which are old.
    write: replaces the metadata file.
    Return None, or what is wrong with that file. Raise OSError.
    """
    if not metadata and not positions:
        return None
    try:
        own = json.loads((checkpoint / METADATA_FILE).read_bytes()) if METADATA_FILE in files else {}
    except ValueError:
        own = None
    if not isinstance(own, dict):
        return "holds no JSON object; the run's metadata and the positions in the data are not added to it"
    data = json.dumps({**metadata, **own, **({POSITIONS: positions} if positions else {})}).encode()
    write(data)
    files[METADATA_FILE] = file_entry(len(data), zlib.crc32(data), rank=0)
    return None


def complete_manifest(
    checkpoint: Path,
    name: str,
    manifest: Mapping[str, Any],
    metadata: Mapping[str, Any],
    positions: Mapping[str, Any],
    write: Callable[[bytes], None],
) -> tuple[bytes, str | None]:
    """Add metadata as :func:`add_metadata` does. Return the text of the manifest under this name, and its answer."""
    files = dict(manifest["files"])
    problem = add_metadata(checkpoint, metadata, positions, files, write)
    return json.dumps({**manifest, "files": files, "name": name}, indent=1).encode(), problem


# -- damage ----------------------------------------------------------------------------------------------------------


def damage_of(
    checkpoint: Path | RemotePath,
    *,
    read_files: bool = True,
    needs_manifest: bool = True,
    is_needed: Callable[[], bool] = lambda: True,
) -> str | None:
    """Return how a checkpoint differs from its manifest, or None. Metadata may differ, as users may change it.

    read_files: compare the bytes of local files, too. Of remote files, only those with another version are read.
    needs_manifest: False for a directory that a user may have made.
    is_needed: once it returns False, local files are read no further.
    Raise OSError if the checkpoint cannot be read, or is not read to its end.
    """
    try:
        manifest = read_file(checkpoint / MANIFEST_FILE)
    except FileNotFoundError:
        if isinstance(checkpoint, RemotePath) and PENDING_FILE in checkpoint.files():
            return "it was never finished, or is being deleted"
        return f"{MANIFEST_FILE} is missing" if needs_manifest else None
    if isinstance(checkpoint, RemotePath):
        return remote_damage(checkpoint, manifest, checkpoint.files())

    def size_of(name: str) -> int | None:
        try:
            return (checkpoint / name).stat().st_size
        except FileNotFoundError:
            return None

    def hash_all(files: Mapping[str, Mapping[str, Any]]) -> Files:
        return hash_files(checkpoint, list(files), is_needed=is_needed) if read_files else []

    return _difference(manifest, size_of, hash_all)


def remote_damage(checkpoint: RemotePath, manifest: bytes, present: Mapping[str, tuple[int, str]]) -> str | None:
    """Return how a remote checkpoint differs from its manifest, or None.

    ``present``: its files, as :meth:`RemotePath.files` returns them. Only a file with another version is read: a run
    that was copied to another bucket has new versions of the same bytes. Raise OSError.
    """

    def hash_others(files: Mapping[str, Mapping[str, Any]]) -> Files:
        return checkpoint.hash_all(
            [name for name in files if files[name].get("version", "") not in ("", present[name][1])]
        )

    return _difference(manifest, lambda name: present.get(name, (None, ""))[0], hash_others)


def _difference(
    manifest: bytes,
    size_of: Callable[[str], int | None],
    hash_some: Callable[[Mapping[str, Mapping[str, Any]]], Files],
) -> str | None:
    """Compare the sizes of all files, and the hashes that ``hash_some`` returns, with the manifest."""
    try:
        fields = parse_json(manifest)
        fields["metrics"].items(), int(fields.get("index", -1))
        if reason := _why_disowned(fields):
            return reason
        files = {name: fact for name, fact in fields["files"].items() if name != METADATA_FILE}
        sizes = {name: fact["size"] for name, fact in files.items()}
        hashes = {name: int(fact["crc32"], 16) for name, fact in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST_FILE} cannot be parsed ({type(error).__name__}: {error})"
    for name, size in sizes.items():
        if (found := size_of(name)) != size:
            return f"{name} is missing" if found is None else f"{name} has {found} bytes instead of {size}"
    changed = (name for name, _, crc32 in hash_some(files) if crc32 != hashes[name])
    return next((f"{name} has changed since it was committed" for name in changed), None)
