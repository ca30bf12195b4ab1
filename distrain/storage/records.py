"""What is written of metrics and checkpoints, and read again. Runs in: anywhere."""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from distrain.checkpoint import MANIFEST_FILE, METADATA_FILE, Checkpoint
from distrain.errors import StorageError
from distrain.storage.files import crc32_of
from distrain.system.remote_path import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PENDING = "PENDING_VALIDATION"


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A checkpoint of the run and the metrics it was reported with."""

    path: Path | RemotePath
    metrics: dict[str, Any]
    validation: dict[str, Any] | None = None
    """None if it is not validated; else ``status``, the name of a :class:`ReportedCheckpointStatus`, and what
    :class:`~distrain.wire.Reported` said."""
    index: int = field(default=-1, compare=False)
    """Its place among all checkpoints that the run has committed."""

    @property
    def is_pending(self) -> bool:
        """Whether it waits for its validation."""
        return self.validation is not None and self.validation["status"] == PENDING

    @property
    def checkpoint(self) -> Checkpoint:
        """The handle that users get."""
        if isinstance(self.path, RemotePath):
            return Checkpoint(self.path.url, self.path.given)
        return Checkpoint(self.path)


def committed_at(path: Path | RemotePath, manifest: Mapping[str, Any] | None = None) -> CommittedCheckpoint:
    """The checkpoint there, as its manifest, which is read from a local one, tells of it. Raises StorageError."""
    try:
        if manifest is None:
            assert isinstance(path, Path)
            manifest = json.loads((path / MANIFEST_FILE).read_text())
        metrics = with_nonfinite(dict(manifest["metrics"].items()), manifest.get("nonfinite", {}))
        index, validation = int(manifest.get("index", -1)), manifest.get("validation")
        if validation is not None:
            str(validation["status"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path} is damaged, its manifest cannot be read ({error}); move it away to go on"
        ) from error
    return CommittedCheckpoint(path, metrics, validation, index)


def no_metadata(checkpoint: Path | RemotePath) -> str:
    """What to say of one whose own metadata cannot be added to."""
    return f"{METADATA_FILE} of {checkpoint} holds no JSON object; the run's metadata is not added to it"


def damage_of(path: Path, *, thoroughly: bool = True) -> str | None:
    """What is wrong with a committed checkpoint; None if its files are what its manifest says, metadata aside, which
    may be changed at any time. ``thoroughly``: look at the files' bytes, too. Raises OSError if it cannot be read.
    """
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


# -- JSON has no NaN -------------------------------------------------------------------------------------------------


def without_nonfinite(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
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


def read_metrics(path: Path | RemotePath, *, rank: int | None = 0) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl (of one rank, or of all), with non-finite numbers restored. A torn last line, as a
    power cut leaves it, is passed over, and so are others that cannot be understood, with a warning. Raises OSError; no
    file is no line.
    """
    try:
        lines = io.BytesIO(path.read()) if isinstance(path, RemotePath) else path.open("rb")
    except FileNotFoundError:
        return
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            record = _record_in(line, f"line {number} of {path}")
            if record is not None and (rank is None or record["rank"] == rank):
                yield record


def last_metrics(path: Path | RemotePath) -> dict[str, Any] | None:
    """Return the metrics of rank 0's last line in a metrics.jsonl, which is read from its end; None if there is none.

    Raises OSError.
    """

    def find(file: IO[bytes]) -> dict[str, Any] | None:
        lines = _lines_backwards(file)
        next(lines, None)  # empty, or torn
        records = (_record_in(line, f"one of the last lines of {path}") for line in lines)
        return next((record["metrics"] for record in records if record is not None and record["rank"] == 0), None)

    try:
        if isinstance(path, RemotePath):
            return path.read_with(find)
        with path.open("rb") as file:
            return find(file)
    except FileNotFoundError:
        return None


def _record_in(line: bytes, where: str) -> dict[str, Any] | None:
    """Return what a line of a metrics.jsonl says; None, with a warning, if it cannot be understood."""
    try:
        record: dict[str, Any] = json.loads(line.decode())  # not as UTF-32, which zeros are taken for
        record["metrics"] = with_nonfinite(record["metrics"], record.pop("nonfinite", {}))
        int(record["rank"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"passed over: {where} cannot be understood ({why})", stacklevel=3)
        return None
    return record


def _lines_backwards(file: IO[bytes]) -> Iterator[bytes]:
    """Yield what is between newlines, beginning with what follows the last one."""
    end, size, rest = file.seek(0, os.SEEK_END), _TAIL_BYTES, b""
    while end:
        start = max(0, end - size)
        file.seek(start)
        rest, *lines = (file.read(end - start) + rest).split(b"\n")
        yield from reversed(lines)
        end, size = start, 2 * size
    yield rest


_TAIL_BYTES = 64 << 10
