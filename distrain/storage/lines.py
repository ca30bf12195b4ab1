"""The files of a run as all readers read them: JSON, lines, and numbers that JSON lacks. Runs in: anywhere.

A run may be damaged, or belong to a stranger. So nothing here waits for a pipe, follows a stranger's link, or takes
more time and memory than the constants allow. Files on remote storage are read as they are.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from distrain.storage.ownership import open_to_read
from distrain.system.text import size, with_nonfinite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distrain.system.remote_path import RemotePath

_T = TypeVar("_T")
MOST_BYTES, MOST_OF_LINES, LONGEST_LINE = 64 << 20, 256 << 20, 8 << 20
"""The most bytes of a file that is read as a whole, of the end of a metrics.jsonl that is shown, and of a line."""
_MOST_DAMAGED, _DEEPEST = 1000, 100
"""Damaged lines after which the rest of a file is left out, and levels of nested objects and lists."""
_TAIL, _LONG_LINE = 1 << 20, 1000
"""Bytes in which the last lines of a file are searched: at least, and for each line."""
_FIRST_STEP, _STEP = 4 << 10, 1 << 20
"""Bytes that are read at once when a file is read from its end."""


# -- any file --------------------------------------------------------------------------------------------------------


def parse_json(data: bytes) -> Any:
    """Return the value that JSON stands for. Raise ValueError if it is damaged, too long or nested too deeply."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is longer than {size(MOST_BYTES)}")
    try:
        value = json.loads(data.decode())  # json.loads() would take bytes with zeros for UTF-32
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [value] if data.count(b"[") + data.count(b"{") > _DEEPEST else [], 0
    while level:
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level, depth = [one for one in level if isinstance(one, (dict, list))], depth + 1
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
    return value


def read_file(path: str | Path | RemotePath, run: str | Path | None = None, *, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file of a run, whose directory is ``run``, by default that of the file.

    Raise FileNotFoundError if there is no regular file, OSError otherwise, and for a local file above ``most`` bytes.
    """
    if not isinstance(path, (str, Path)):
        return path.read_bytes()

    def read(file: IO[bytes]) -> bytes:
        found = os.fstat(file.fileno()).st_size
        if found > most:
            raise OSError(errno.EFBIG, f"it has {size(found)}, more than {size(most)}", str(path))
        return file.read(found)  # what is added in the meantime is for the next look

    return read_with(path, read, run)


def read_with(
    path: str | Path | RemotePath,
    action: Callable[[IO[bytes]], _T],
    run: str | Path | None = None,
    below: str | Path | None = None,
) -> _T:
    """Return the result of ``action``, which is called with the file. The rest is as for :func:`open_to_read`."""
    if not isinstance(path, (str, Path)):
        return path.read_with(action)
    with open(open_to_read(path, run, below=below), "rb") as file:
        return action(file)


class Tail:
    """A reader of the lines of a file that grows. A line that is longer than ``longest`` comes in parts.

    most: bytes after which a call of :meth:`read` begins no other line.

    Attributes: ``position``: where it goes on, ``is_in_line``: True if the beginning of the line there is not wanted,
    or is read, ``left_out``: bytes at the beginning of the file that are not wanted.
    """

    def __init__(self, position: int = 0, longest: int = LONGEST_LINE, most: float = math.inf) -> None:
        self.position, self.left_out, self.is_in_line = position, 0, False
        self._longest, self._most = longest, most

    def read(self, file: IO[bytes], *, to_end: bool = False) -> Iterator[tuple[bytes, bool]]:
        """Yield lines, or parts, and True for those that begin a line.

        to_end: also a torn last line, as nothing will follow.
        """
        last = file.seek(self.position) + self._most
        while self.position < last and (part := file.readline(self._longest)):
            is_whole = part.endswith(b"\n")
            if not (is_whole or to_end or len(part) == self._longest):
                return
            begins, self.is_in_line = not self.is_in_line, not is_whole
            self.position += len(part)
            yield part, begins


def last_lines(file: IO[bytes], most: int) -> list[bytes]:
    """Return the last whole lines and what follows them; of a long line, the end. Leave the position at the end."""
    start = max(0, file.seek(0, os.SEEK_END) - max(_TAIL, _LONG_LINE * most))
    file.seek(start)
    lines = file.readlines()
    lines = lines[1 if start and len(lines) > 1 else 0 :]
    is_torn = bool(lines) and not lines[-1].endswith(b"\n")
    return lines[max(0, len(lines) - most - is_torn) :]


# -- files of lines --------------------------------------------------------------------------------------------------


def read_metrics(
    path: Path | RemotePath, *, rank: int | None = 0, most: int = 0, tail: Tail | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics.jsonl, of one rank or (None) of all, with non-finite numbers restored.

    A torn last line, which a power cut may leave, is skipped. Other damaged lines are skipped with a warning. A missing
    file has no lines. most: bytes at the end of a larger file that are read. tail: has read it so far. Raise OSError.
    """

    def parse(line: bytes, number: int) -> dict[str, Any] | None:
        return record_in(line, f"line {number} of {path}") if rank is None or may_be_of(rank, line) else {}

    yield from (one for one in _records(path, parse, most, tail) if rank is None or one["rank"] == rank)


def read_events(path: Path | RemotePath, tail: Tail | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of an events.jsonl, each with ``time``, ``event`` and ``attempt``.

    A damaged line is skipped. A missing file has no lines. tail: has read it so far. Raise OSError.
    """
    yield from _records(path, lambda line, _: _event_in(line), MOST_BYTES, tail)


def _records(
    path: Path | RemotePath, parse: Callable[[bytes, int], dict[str, Any] | None], most: int, tail: Tail | None
) -> Iterator[dict[str, Any]]:
    """Yield the non-empty results of ``parse`` for lines and their numbers, until too many are damaged (None)."""
    tail, damaged = tail or Tail(), 0
    try:
        file = os.fdopen(open_to_read(path), "rb") if isinstance(path, Path) else io.BytesIO(path.read_bytes())
    except FileNotFoundError:
        return
    with file:
        if most and not tail.position and (start := file.seek(0, os.SEEK_END) - most) > 0:
            warnings.warn(f"the first {size(start)} of {path} were left out", stacklevel=3)
            tail.position = tail.left_out = start
            tail.is_in_line = True
        for number, line in enumerate((part for part, begins in tail.read(file) if begins), start=1):
            record = parse(line, number)
            damaged += record is None
            if damaged > _MOST_DAMAGED:
                warnings.warn(f"{path} was left out from line {number:,} on: too many lines are damaged", stacklevel=3)
                return
            if record:
                yield record


def _event_in(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line of an events.jsonl, None if the line is damaged."""
    try:
        event = _parsed(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not {"time", "event", "attempt"} <= event.keys():
        return None
    since = 0 if event["event"] == "slow" else event.get("since", 0)  # a slow rank has been so since a step, as text
    is_usable = isinstance(event.get("name", ""), str) and is_number(event["time"]) and is_number(since)
    return event if is_usable else None


def is_number(value: Any) -> bool:
    """Return whether a value in a file of a run is a number to compute with."""
    return type(value) in (int, float) and abs(value) < 1e15


def last_record(path: str | Path | RemotePath, most: int = MOST_OF_LINES) -> dict[str, Any] | None:
    """Return rank 0's last line in a metrics.jsonl, or None if it has none in the last ``most`` bytes.

    The file is read from its end. Raise OSError.
    """

    def find(file: IO[bytes]) -> dict[str, Any] | None:
        lines, damaged = _lines_backwards(file, most), 0
        next(lines, None)  # the part after the last newline is empty or torn
        for line in lines:
            record = record_in(line, f"one of the last lines of {path}") if may_be_of(0, line) else {}
            damaged += record is None
            if (record and record["rank"] == 0) or damaged > _MOST_DAMAGED:
                return record
        if file.seek(0, os.SEEK_END) > most >= MOST_BYTES:
            warnings.warn(f"rank 0 has no report in the last {size(most)} of {path}", stacklevel=4)
        return None

    try:
        return read_with(path, find)
    except FileNotFoundError:
        return None


def may_be_of(rank: int, line: bytes) -> bool:
    """Return whether a line of a metrics.jsonl belongs to a rank, or is damaged, without decoding it."""
    return b'"rank":%d' % rank in line.replace(b" ", b"") or not line.rstrip().endswith(b"}")


def record_in(line: bytes, where: str) -> dict[str, Any] | None:
    """Return the record in a line of a metrics.jsonl. Warn and return None if the line is damaged."""
    try:
        record: dict[str, Any] = _parsed(line)
        record["metrics"] = with_nonfinite(record["metrics"], record.pop("nonfinite", {}))
        if not isinstance(record["metrics"], dict):
            raise TypeError("the metrics must be an object")
        if not all(map(is_number, (record["rank"], record["attempt"], record["index"], record["time"]))):
            raise ValueError("rank, attempt, index and time must be numbers")
        progress = record.pop("progress", None)
        if isinstance(progress, list) and len(progress) == 2 and all(map(is_number, progress)) and progress[1] > 0:
            record["progress"] = progress
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"skipped {where}: it cannot be parsed ({why})", stacklevel=3)
        return None
    return record


def _parsed(line: bytes) -> Any:
    if len(line) >= LONGEST_LINE:
        raise ValueError(f"it is longer than {size(LONGEST_LINE)}")
    return parse_json(line)


def _lines_backwards(file: IO[bytes], most: int) -> Iterator[bytes]:
    """Yield the parts of the end of the file between newlines, the last one first."""
    end, step, rest = file.seek(0, os.SEEK_END), _FIRST_STEP, b""
    first = max(0, end - most)
    while end > first:
        start = max(first, end - step)
        file.seek(start)
        rest, *lines = (file.read(end - start) + rest[:LONGEST_LINE]).split(b"\n")
        yield from reversed(lines)
        end, step = start, min(2 * step, _STEP)
    yield rest
