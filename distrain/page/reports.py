"""One pass over metrics.jsonl: curves, paces and waiting times, in bounded memory. Runs in: anywhere."""

from __future__ import annotations

import gc
import io
import json
import math
import re
from bisect import bisect_right
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from distrain.page.contents import items, mapping, number, whole
from distrain.page.envelope import Envelope
from distrain.page.pace import SLOTS, Pace
from distrain.storage.lines import with_nonfinite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distrain.page.clock import Clock
    from distrain.page.contents import Attempt
    from distrain.system.remote_path import RemotePath

MOST_METRICS = 100
MOST_REPEATED = 8
"""Repeated parts of this many attempts are drawn, the earliest of them."""
_MOST_RANKS = 10_000
_BLOCK = 2 << 20
_LINE = re.compile(
    rb'^\{"time":([\d.]+),"attempt":(\d+),"rank":(\d+),"index":(\d+)(?:,"progress":(\[[^\]]*\]))?'
    rb'(?:,"waits":\{(?:"data":([\d.e-]+))?,?(?:"checkpoint":([\d.e-]+))?\})?,"metrics":(\{.*\})\}$',
    re.MULTILINE,
)
"""A line as a run writes it. Others are read as JSON."""
_Fields = tuple[bytes, ...]
"""Time, attempt, rank, index, progress, two waits and metrics, as they are in the line; empty if they are missing."""
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
    last_step: int = 0
    waits: dict[int, list[float]] = field(default_factory=dict)

    @property
    def last_kept_index(self) -> float:
        """The last report that no later attempt repeated."""
        return math.inf if self.lost_after is None else self.lost_after - self.first_step


class Reports:
    """The reports of a run.

    Attributes: ``attempts`` by number, ``curves``: for each metric of rank 0 its parts, :data:`KEPT` and, by attempt,
    those that were repeated; ``more_metrics``: their names beyond :data:`MOST_METRICS`, ``damaged``: lines that cannot
    be understood, ``progress``: the last ``(step, total)`` of rank 0.
    """

    def __init__(self, attempts: Sequence[Attempt], clock: Clock) -> None:
        self.pace = Pace([clock.time(slot / SLOTS) for slot in range(SLOTS + 1)])
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
        while block := file.read(_BLOCK):
            block += file.readline()
            if not block.endswith(b"\n"):  # a torn last line
                block = block[: block.rfind(b"\n") + 1]
            if block:
                self._add_block(block[:-1])

    def _add_block(self, block: bytes) -> None:
        lines: list[_Fields] = _LINE.findall(block)
        if len(lines) != block.count(b"\n") + 1:
            lines = [fields for line in block.split(b"\n") if (fields := self._fields_in(line)) is not None]
        for attempt, part in groupby(lines, key=itemgetter(1)):
            self._add_lines(int(attempt), list(part))

    def _fields_in(self, line: bytes) -> _Fields | None:
        """Return the fields of a line that was perhaps written otherwise, None if it is damaged."""
        if matched := _LINE.fullmatch(line):
            return matched.groups(b"")
        try:
            record = json.loads(line.decode())
            moment, *head = number(record["time"]), *(whole(record[name]) for name in ("attempt", "rank", "index"))
            if None in (moment, *head):
                raise ValueError("not a report")
            body = json.dumps(mapping(record["metrics"]))
            if record.get("nonfinite"):
                body += f',"nonfinite":{json.dumps(mapping(record["nonfinite"]))}'
            progress = json.dumps(record["progress"]) if record.get("progress") else ""
            waits = [number(mapping(record.get("waits")).get(kind)) for kind in ("data", "checkpoint")]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.damaged += 1
            return None
        fields = (*map(str, (moment, *head)), progress, *("" if wait is None else str(wait) for wait in waits), body)
        return tuple(field.encode() for field in fields)

    def _add_lines(self, attempt: int, lines: list[_Fields]) -> None:
        """Add lines of one attempt. It goes through them in few steps, as there may be millions."""
        there = self.attempts.get(attempt) or self._begin(attempt)
        raw_times, _, raw_ranks, raw_indices, progress, data, checkpoint, metrics = zip(*lines, strict=True)
        times, indices = list(map(float, raw_times)), list(map(int, raw_indices))
        there.last_time = max(times if there.last_time is None else (there.last_time, *times))
        self.reports += len(lines)
        has_waits = any(data) or any(checkpoint)
        places: dict[bytes, list[int]] = {}
        for place, rank in enumerate(raw_ranks):
            if (mine := places.get(rank)) is None:
                mine = places[rank] = []
            mine.append(place)
        for raw_rank, mine in places.items():
            rank = int(raw_rank)
            if rank < _MOST_RANKS:
                self.pace.extend(attempt, rank, list(map(times.__getitem__, mine)))
            lost = bisect_right(mine, there.last_kept_index, key=indices.__getitem__)
            kept = mine[:lost]
            if has_waits:
                sums = there.waits.setdefault(rank, [0.0, 0.0])
                sums[0] += sum(map(float, filter(None, map(data.__getitem__, kept))))
                sums[1] += sum(map(float, filter(None, map(checkpoint.__getitem__, kept))))
            if rank == 0:
                if kept:
                    there.kept_until = times[kept[-1]]
                if progress[mine[-1]]:
                    self._note_progress(progress[mine[-1]])
                for part, chosen in ((KEPT, kept), (attempt, mine[lost:])):
                    if chosen:
                        self._add_rank_0(part, there, [indices[n] for n in chosen], [metrics[n] for n in chosen])

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

    # -- rank 0 ---------------------------------------------------------------------------------------------------

    def _add_rank_0(self, part: int, there: AttemptReports, indices: list[int], texts: list[bytes]) -> None:
        steps = [there.first_step + index for index in indices]
        there.last_step = max(there.last_step, steps[-1])
        if part != KEPT and part not in self._repeated:
            if len(self._repeated) == MOST_REPEATED:
                return
            self._repeated.append(part)
        self._add_curves("", part, steps, self._metrics_in(texts))

    def _note_progress(self, text: bytes) -> None:
        try:
            step, *total = map(number, items(json.loads(text)))
        except ValueError:
            return
        if step is not None:
            self.progress = step, total[0] if total else None

    def _metrics_in(self, texts: list[bytes]) -> list[Mapping[str, Any]]:
        try:
            found: list[Mapping[str, Any]] = json.loads(b"[" + b",".join(texts) + b"]")
            if len(found) == len(texts):
                return found
        except (ValueError, RecursionError):  # damaged, or with non-finite numbers
            pass
        return [self._metrics_of(text) for text in texts]

    def _metrics_of(self, text: bytes) -> Mapping[str, Any]:
        try:
            record = json.loads(b'{"metrics":' + text + b"}")
            return with_nonfinite(record["metrics"], mapping(record.get("nonfinite")))
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.damaged += 1
            return {}

    def _add_curves(self, prefix: str, part: int, steps: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the columns of a table of metrics. Nested metrics are tables in it."""
        for key, values in _columns(rows):
            name, kinds = prefix + key, set(map(type, values))
            if kinds <= _NUMBERS:
                self._extend(name, part, steps, values)
                continue
            if kinds == {dict}:
                self._add_nested(name, part, steps, values)
                continue
            for wanted, add in (({dict}, self._add_nested), (_NUMBERS, self._extend)):
                if kinds & wanted:
                    pairs = [(step, value) for step, value in zip(steps, values, strict=True) if type(value) in wanted]
                    add(name, part, [step for step, _ in pairs], [value for _, value in pairs])

    def _add_nested(self, name: str, part: int, steps: Sequence[int], values: Sequence[Any]) -> None:
        self._add_curves(f"{name}/", part, steps, values)

    def _extend(self, name: str, part: int, steps: Sequence[int], values: Sequence[Any]) -> None:
        if name not in self.curves and len(self.curves) == MOST_METRICS:
            if len(self.more_metrics) < 10 * MOST_METRICS:
                self.more_metrics.add(name)
            return
        self.curves.setdefault(name, {}).setdefault(part, Envelope()).extend(steps, values)


def _columns(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, Sequence[Any]]]:
    """Return each key with its values, None where it is missing."""
    keys = list(rows[0])
    if len(keys) > 1 and set(map(len, rows)) == {len(keys)}:  # usually all rows have the same keys
        with suppress(KeyError):
            return list(zip(keys, zip(*map(itemgetter(*keys), rows), strict=True), strict=True))
    return [(key, [row.get(key) for row in rows]) for key in dict.fromkeys(chain.from_iterable(rows))]


@contextmanager
def _opened(path: Path | RemotePath) -> Iterator[IO[bytes]]:
    if isinstance(path, Path):
        with path.open("rb") as file:
            yield file
    else:
        yield io.BytesIO(path.read_bytes())


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause Python's search for unreachable cycles. Decoding makes none, and would start it thousands of times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_reports(path: Path | RemotePath, attempts: Sequence[Attempt], clock: Clock, notes: list[str]) -> Reports:
    """Read all reports of a run. A note says what could not be read."""
    reports = Reports(attempts, clock)
    try:
        with _opened(path) as file, _without_collections():
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
    """Return the time of the last report of an attempt, or of the attempts before. None without one, or if remote.

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
