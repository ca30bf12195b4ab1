"""One pass over metrics.jsonl: curves, paces and waiting times, in bounded memory. Runs in: anywhere."""

from __future__ import annotations

import io
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from distrain.page.contents import items, mapping, number, whole
from distrain.page.envelope import Envelope
from distrain.page.pace import Pace
from distrain.storage.records import with_nonfinite
from distrain.storage.retention import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distrain.page.contents import Attempt
    from distrain.system.remote_path import RemotePath

MOST_METRICS = 100
MOST_REPEATED = 8
"""Repeated parts of this many attempts are drawn, the earliest of them."""
_MOST_RANKS = 10_000
_BLOCK = 4 << 20
_LINE = re.compile(
    rb'^\{"time":([\d.]+),"attempt":(\d+),"rank":(\d+),"index":(\d+)'
    rb'(?:,"progress":(\[[^\]]*\]))?(?:,"waits":(\{[^}]*\}))?,"metrics":(\{.*\})\}$',
    re.MULTILINE,
)
"""A line as a run writes it. Others are read as JSON."""
_Fields = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]
_NUMBERS = {int, float}
KEPT = -1
"""Key of the part of a curve that was not repeated."""


@dataclass(slots=True)
class AttemptReports:
    """The reports of one attempt.

    first_step: the step of a report is this plus its index. lost_after: reports with later steps were repeated by a
    later attempt; None if none were. kept_until: time of rank 0's last report that was not repeated; None if there is
    none. waits: for each rank, the seconds that its reports which were not repeated have waited, for data and for
    checkpoints.
    """

    first_step: int
    lost_after: int | None = None
    kept_until: float | None = None
    last_time: float | None = None
    reports: int = 0
    last_step: int = 0
    waits: dict[int, list[float]] = field(default_factory=dict)


class Reports:
    """The reports of a run.

    Attributes: ``attempts`` by number, ``curves``: for each metric of rank 0 its parts, :data:`KEPT` and, by attempt,
    those that were repeated; ``more_metrics``: their names beyond :data:`MOST_METRICS`, ``damaged``: lines that cannot
    be understood, ``progress``: the last ``(step, total)`` of rank 0.
    """

    def __init__(self, attempts: Sequence[Attempt], position: Callable[[float], float]) -> None:
        self.pace = Pace(position)
        self.attempts: dict[int, AttemptReports] = {}
        self.curves: dict[str, dict[int, Envelope]] = {}
        self.more_metrics: set[str] = set()
        self.damaged = 0
        self.reports = 0
        self.progress: tuple[float, float | None] | None = None
        self._known = list(attempts)
        self._repeated: list[int] = []

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, file: IO[bytes]) -> None:
        """Add all whole lines of a file."""
        rest = b""
        while block := file.read(_BLOCK):
            body, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                self._add_block(body)

    def _add_block(self, body: bytes) -> None:
        found: list[_Fields] = _LINE.findall(body)
        if len(found) != body.count(b"\n") + 1:
            found = [fields for line in body.split(b"\n") for fields in self._fields_in(line)]
        mine: list[_Fields] = []
        for fields in found:
            try:
                moment, attempt, rank = float(fields[0]), int(fields[1]), int(fields[2])
            except ValueError:
                self.damaged += 1
                continue
            self._add_time(moment, attempt, rank)
            if rank == 0:
                mine.append(fields)
            elif fields[5]:
                self._add_waits(attempt, rank, int(fields[3]), fields[5])
        self._add_rank_0(mine)

    def _fields_in(self, line: bytes) -> Iterator[_Fields]:
        """Yield the fields of a line that was written otherwise, or is damaged."""
        if matched := _LINE.fullmatch(line):
            yield tuple(part or b"" for part in matched.groups())  # type: ignore[misc]
            return
        try:
            record = json.loads(line.decode())
            moment, *head = number(record["time"]), *(whole(record[name]) for name in ("attempt", "rank", "index"))
            if None in (moment, *head):
                raise ValueError("not a report")
            body = json.dumps(mapping(record["metrics"]))
            if record.get("nonfinite"):
                body += f',"nonfinite":{json.dumps(mapping(record["nonfinite"]))}'
            progress, waits = (json.dumps(record[name]) if record.get(name) else "" for name in ("progress", "waits"))
            fields = [*map(json.dumps, (moment, *head)), progress, waits, body]
        except (ValueError, KeyError, TypeError, RecursionError):
            self.damaged += 1
            return
        yield tuple(part.encode() for part in fields)  # type: ignore[misc]

    # -- all ranks ------------------------------------------------------------------------------------------------

    def _add_time(self, moment: float, attempt: int, rank: int) -> None:
        self.reports += 1
        there = self.attempts.get(attempt) or self._begin(attempt)
        there.reports += 1
        if there.last_time is None or moment > there.last_time:
            there.last_time = moment
        if rank < _MOST_RANKS:
            self.pace.add(attempt, rank, moment)

    def _begin(self, attempt: int) -> AttemptReports:
        """Begin an attempt. Without a known first step, its steps follow those of the attempts before."""
        known = [one.first_step for one in self._known if one.number == attempt]
        later = [one.first_step for one in self._known if one.number > attempt and one.training is not None]
        first_step = known[0] if known and known[0] is not None else None
        if first_step is None:
            first_step = max((one.last_step for one in self.attempts.values()), default=0)
        lost_after = min((step for step in later if step is not None), default=None)
        begun = self.attempts[attempt] = AttemptReports(first_step, lost_after)
        return begun

    def _add_waits(self, attempt: int, rank: int, index: int, text: bytes) -> None:
        there = self.attempts[attempt]
        if there.lost_after is not None and there.first_step + index > there.lost_after:
            return
        try:
            waits = mapping(json.loads(text))
        except ValueError:
            return
        sums = there.waits.setdefault(rank, [0.0, 0.0])
        for n, kind in enumerate(("data", "checkpoint")):
            sums[n] += max(0.0, number(waits.get(kind)) or 0.0)

    # -- rank 0 ---------------------------------------------------------------------------------------------------

    def _add_rank_0(self, lines: Sequence[_Fields]) -> None:
        start = 0
        while start < len(lines):  # runs of lines of one part of one attempt
            attempt = int(lines[start][1])
            there = self.attempts[attempt]
            end = start
            is_lost = self._is_lost(there, lines[start])
            while end < len(lines) and int(lines[end][1]) == attempt and self._is_lost(there, lines[end]) == is_lost:
                end += 1
            part = lines[start:end]
            steps = [there.first_step + int(fields[3]) for fields in part]
            there.last_step = max(there.last_step, steps[-1])
            if not is_lost:
                there.kept_until = float(part[-1][0])
            for fields in part:
                if fields[5]:
                    self._add_waits(attempt, 0, int(fields[3]), fields[5])
            if part[-1][4]:
                self._note_progress(part[-1][4])
            self._add_curves(attempt if is_lost else KEPT, steps, self._metrics_in([fields[6] for fields in part]))
            start = end

    @staticmethod
    def _is_lost(there: AttemptReports, fields: _Fields) -> bool:
        return there.lost_after is not None and there.first_step + int(fields[3]) > there.lost_after

    def _note_progress(self, text: bytes) -> None:
        try:
            step, *total = map(number, items(json.loads(text)))
        except ValueError:
            return
        if step is not None:
            self.progress = step, total[0] if total else None

    def _metrics_in(self, texts: list[bytes]) -> list[Mapping[str, Any]]:
        try:
            found = json.loads(b"[" + b",".join(texts) + b"]")
            if len(found) == len(texts):
                return [
                    flatten(metrics) if text.find(b"{", 1) > 0 else metrics
                    for metrics, text in zip(found, texts, strict=True)
                ]
        except (ValueError, RecursionError):  # damaged, or with non-finite numbers
            pass
        return [self._metrics_of(text) for text in texts]

    def _metrics_of(self, text: bytes) -> Mapping[str, Any]:
        try:
            record = json.loads(b'{"metrics":' + text + b"}")
            return flatten(with_nonfinite(record["metrics"], mapping(record.get("nonfinite"))))
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.damaged += 1
            return {}

    def _add_curves(self, part: int, steps: list[int], rows: list[Mapping[str, Any]]) -> None:
        if part != KEPT and part not in self._repeated:
            if len(self._repeated) == MOST_REPEATED:
                return
            self._repeated.append(part)
        for name in dict.fromkeys(name for row in rows for name in row):
            values = [row.get(name) for row in rows]
            if set(map(type, values)) <= _NUMBERS:
                self._extend(name, part, steps, values)
                continue
            pairs = [(step, value) for step, value in zip(steps, values, strict=True) if type(value) in _NUMBERS]
            if pairs:
                self._extend(name, part, [step for step, _ in pairs], [value for _, value in pairs])

    def _extend(self, name: str, part: int, steps: Sequence[int], values: Sequence[Any]) -> None:
        if name not in self.curves and len(self.curves) == MOST_METRICS:
            if len(self.more_metrics) < 10 * MOST_METRICS:
                self.more_metrics.add(name)
            return
        self.curves.setdefault(name, {}).setdefault(part, Envelope()).extend(steps, values)


@contextmanager
def _opened(path: Path | RemotePath) -> Iterator[IO[bytes]]:
    if isinstance(path, Path):
        with path.open("rb") as file:
            yield file
    else:
        yield io.BytesIO(path.read_bytes())


def read_reports(
    path: Path | RemotePath, attempts: Sequence[Attempt], position: Callable[[float], float], notes: list[str]
) -> Reports:
    """Read all reports of a run. A note says what could not be read."""
    reports = Reports(attempts, position)
    try:
        with _opened(path) as file:
            reports.read(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"the reports cannot be read: {error}")
    if reports.damaged:
        notes.append(f"{reports.damaged:,} damaged lines of {path.name} were passed over")
    return reports


_HEAD = re.compile(rb'\{"time": ?([\d.]+), ?"attempt": ?(\d+),.*\n$')


def last_report_time(path: Path | RemotePath, attempt: int) -> float | None:
    """Return the time of the last report of an attempt, or of the attempts before. None without one, or if it is remote.

    The lines of attempts follow each other, so a few lines of a long file tell.
    """
    if not isinstance(path, Path):
        return None
    try:
        with path.open("rb") as file:
            before, after = 0, file.seek(0, 2)
            found = _report_at(file, 0, attempt)
            while found is not None and after - before > 1:
                middle = (before + after) // 2
                if (later := _report_at(file, middle, attempt)) is None:
                    after = middle
                else:
                    before, found = middle, later
    except OSError:
        return None
    return found


def _report_at(file: IO[bytes], offset: int, attempt: int) -> float | None:
    """Return the time in the first line that begins at an offset or after it, None if it is of a later attempt."""
    file.seek(max(0, offset - 1))
    if offset:
        file.readline()
    match = _HEAD.match(file.readline())
    return float(match[1]) if match and int(match[2]) <= attempt else None
