"""The lines of metrics.jsonl and events.jsonl, and their numbers that JSON lacks. Runs in: anywhere."""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from distrain.system.remote_path import RemotePath

_T = TypeVar("_T")
_TAIL_BYTES = 4 << 10
_RANK_0 = b'"rank":0'
"""It is in each line of rank 0. Lines of other ranks need not be decoded, and there may be thousands."""


# -- JSON has no NaN -------------------------------------------------------------------------------------------------


def without_nonfinite(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the metrics with None for each non-finite number, and those numbers by JSON pointer (RFC 6901)."""
    nonfinite: dict[str, str] = {}

    def clean(value: Any, pointer: str) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[pointer] = str(value)
            return None
        return _each(clean, value, pointer)

    return clean(dict(metrics), ""), nonfinite


def with_nonfinite(metrics: dict[str, Any], nonfinite: Mapping[str, str]) -> dict[str, Any]:
    """Return the metrics as they were reported, with NaN and infinities."""

    def restore(value: Any, pointer: str) -> Any:
        return float(nonfinite[pointer]) if pointer in nonfinite else _each(restore, value, pointer)

    restored: dict[str, Any] = restore(metrics, "") if nonfinite else metrics
    return restored


def _each(function: Callable[[Any, str], Any], value: Any, pointer: str) -> Any:
    """Apply the function to each item of a dict or list. Return any other value unchanged."""
    if isinstance(value, dict):
        return {k: function(v, f"{pointer}/{k.replace('~', '~0').replace('/', '~1')}") for k, v in value.items()}
    if isinstance(value, list):
        return [function(item, f"{pointer}/{index}") for index, item in enumerate(value)]
    return value


def read_metrics(path: Path | RemotePath, *, rank: int | None = 0) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics.jsonl, of one rank or (None) of all, with non-finite numbers restored.

    A torn last line, which a power cut may leave, is skipped. Other damaged lines are skipped with a warning. A missing
    file has no lines. Raise OSError.
    """
    for number, line in enumerate(_whole_lines(path), start=1):
        record = record_in(line, f"line {number} of {path}")
        if record is not None and (rank is None or record["rank"] == rank):
            yield record


def read_events(path: Path | RemotePath) -> Iterator[dict[str, Any]]:
    """Yield the lines of an events.jsonl, each with ``time``, ``event`` and ``attempt``.

    A damaged line is skipped. A missing file has no lines. Raise OSError.
    """
    yield from (event for line in _whole_lines(path) if (event := event_in(line)) is not None)


def event_in(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line of an events.jsonl, None if the line is damaged."""
    try:
        event = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not {"time", "event", "attempt"} <= event.keys():
        return None
    since = 0 if event["event"] == "slow" else event.get("since", 0)  # a slow rank has been so since a step, as text
    return event if _is_count(event["time"]) and _is_count(since) else None


def _is_count(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15


def _whole_lines(path: Path | RemotePath) -> Iterator[bytes]:
    """Yield the lines of a file, without a torn last one. A missing file has none."""
    try:
        lines = io.BytesIO(read_file(path))
    except FileNotFoundError:
        return
    yield from (line for line in lines if line.endswith(b"\n"))


def last_record(path: str | Path | RemotePath) -> dict[str, Any] | None:
    """Return rank 0's last line in a metrics.jsonl, or None. Raise OSError.

    The file is read from its end.
    """

    def find(file: IO[bytes]) -> dict[str, Any] | None:
        lines = lines_backwards(file)
        next(lines, None)  # the part after the last newline is empty or torn
        likely = (line for line in lines if _RANK_0 in line.replace(b" ", b"") or not line.endswith(b"}"))
        records = (record_in(line, f"one of the last lines of {path}") for line in likely)
        return next((record for record in records if record is not None and record["rank"] == 0), None)

    try:
        return _read_with(path, find)
    except FileNotFoundError:
        return None


def last_lines(path: Path | RemotePath, most: int) -> bytes:
    """Return the last lines of a file. Raise OSError."""
    return _read_with(path, lambda file: b"\n".join([*islice(lines_backwards(file), most + 1)][::-1]))


def read_file(path: str | Path | RemotePath) -> bytes:
    """Return the content of a file of a run. Raise FileNotFoundError if there is no regular one, OSError."""
    return _read_with(path, lambda file: file.read()) if isinstance(path, (str, Path)) else path.read_bytes()


def _read_with(path: str | Path | RemotePath, action: Callable[[IO[bytes]], _T]) -> _T:
    if not isinstance(path, (str, Path)):
        return path.read_with(action)
    if not os.path.isfile(path) and not os.path.isdir(path) and os.path.exists(path):  # nobody may write to a pipe
        raise FileNotFoundError(f"{path} is not a regular file")
    with open(path, "rb", buffering=0) as file:
        return action(file)


def record_in(line: bytes, where: str) -> dict[str, Any] | None:
    """Return the record in a line of a metrics.jsonl. Warn and return None if the line is damaged."""
    try:
        record: dict[str, Any] = json.loads(line.decode())  # json.loads() would take bytes with zeros for UTF-32
        record["metrics"] = with_nonfinite(record["metrics"], record.pop("nonfinite", {}))
        if not isinstance(record["metrics"], dict):
            raise TypeError("the metrics must be an object")
        if not all(map(_is_count, (record["rank"], record["attempt"], record["index"], record["time"]))):
            raise ValueError("rank, attempt, index and time must be numbers")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"skipped {where}: it cannot be parsed ({why})", stacklevel=3)
        return None
    return record


def lines_backwards(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the parts of the file between newlines, the last one first."""
    end, size, rest = file.seek(0, os.SEEK_END), _TAIL_BYTES, b""
    while end:
        start = max(0, end - size)
        file.seek(start)
        rest, *lines = (file.read(end - start) + rest).split(b"\n")
        yield from reversed(lines)
        end, size = start, 2 * size
    yield rest
