"""One pass over metrics.jsonl: curves, ranks and waiting times, in bounded memory. Runs in: anywhere."""

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

from distrain.page.envelope import Envelope
from distrain.storage.lines import with_nonfinite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distrain.system.remote_path import RemotePath

MOST_METRICS = 100
_BLOCK = 2 << 20
_KEYS = ("time", "attempt", "rank", "index", "progress", "waits", "metrics", "nonfinite")
_LINE = re.compile(
    rb'^\{"time":([\d.]+),"attempt":(\d+),"rank":(\d+),"index":(\d+)(?:,"progress":(\[[^\]]*\]))?'
    rb'(?:,"waits":\{(?:"data":([\d.e-]+))?,?(?:"checkpoint":([\d.e-]+))?\})?,"metrics":(\{.*\})\}$',
    re.MULTILINE,
)
"""A line as a run writes it. Others are written so first."""
_Fields = tuple[bytes, ...]
"""Time, attempt, rank, index, progress, two waits and metrics, as they are in the line; empty if they are missing."""
_NUMBERS = {int, float}


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
    last_time: float = 0.0
    waits: dict[int, list[float]] = field(default_factory=dict)

    @property
    def last_kept_index(self) -> float:
        """The last report that no later attempt repeated."""
        return math.inf if self.lost_after is None else self.lost_after - self.first_step


@dataclass(slots=True)
class RankReports:
    """The reports of one rank in its last attempt: the first and the last time, their number, and the last step."""

    attempt: int
    began: float
    last: float = 0.0
    count: int = 0
    step: int = 0

    @property
    def interval(self) -> float:
        """The mean time between two reports."""
        return (self.last - self.began) / (self.count - 1) if self.count > 1 else 0.0


class Reports:
    """The reports of a run. Of those that were repeated after a restart, the later ones are drawn.

    attempts: for each, its number, its first step (None: unknown), and if its ranks have trained.

    Attributes: ``attempts`` and ``ranks`` by number, ``curves`` of rank 0's metrics, ``more_metrics``: their names
    beyond :data:`MOST_METRICS`, ``damaged``: lines that cannot be understood, ``last``: rank 0's last report.
    """

    def __init__(self, attempts: Sequence[tuple[int, int | None, bool]]) -> None:
        self.attempts: dict[int, AttemptReports] = {}
        self.ranks: dict[int, RankReports] = {}
        self.curves: dict[str, Envelope] = {}
        self.more_metrics: set[str] = set()
        self.damaged = 0
        self.last: dict[str, Any] | None = None
        self._known = attempts

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
            found = [_LINE.fullmatch(line) or _rewritten(line) for line in block.split(b"\n")]
            lines = [match.groups(b"") for match in found if match is not None]
            self.damaged += len(found) - len(lines)
        for attempt, part in groupby(lines, key=itemgetter(1)):
            self._add_lines(int(attempt), list(part))

    def _add_lines(self, attempt: int, lines: list[_Fields]) -> None:
        """Add lines of one attempt. It goes through them in few steps, as there may be millions."""
        there = self.attempts.get(attempt) or self._begin(attempt)
        raw_times, _, raw_ranks, raw_indices, progress, data, checkpoint, metrics = zip(*lines, strict=True)
        times, indices = list(map(float, raw_times)), list(map(int, raw_indices))
        there.last_time = max(there.last_time, *times)
        has_waits = any(data) or any(checkpoint)
        places: dict[bytes, list[int]] = {}
        for place, raw in enumerate(raw_ranks):
            if (mine := places.get(raw)) is None:
                mine = places[raw] = []
            mine.append(place)
        for raw, mine in places.items():
            rank, first, last = int(raw), mine[0], mine[-1]
            seen = self.ranks.get(rank)
            if seen is None or seen.attempt != attempt:
                seen = self.ranks[rank] = RankReports(attempt, times[first])
            seen.last, seen.count, seen.step = times[last], seen.count + len(mine), there.first_step + indices[last]
            kept = mine[: bisect_right(mine, there.last_kept_index, key=indices.__getitem__)]
            if has_waits:
                sums = there.waits.setdefault(rank, [0.0, 0.0])
                for n, waits in enumerate((data, checkpoint)):
                    sums[n] += sum(map(float, filter(None, map(waits.__getitem__, kept))))
            if rank == 0:
                self.last = {"time": seen.last, "step": seen.step, "progress": _progress_in(progress[last])}
            if rank == 0 and kept:
                there.kept_until = times[kept[-1]]
                steps = [there.first_step + indices[n] for n in kept]
                self._add_curves("", steps, self._metrics_in([metrics[n] for n in kept]))

    def _begin(self, attempt: int) -> AttemptReports:
        """Begin an attempt. Without a known first step, its steps follow those of the attempts before."""
        known = [first for number, first, _ in self._known if number == attempt]
        later = [first for number, first, trained in self._known if number > attempt and trained and first is not None]
        first_step = known[0] if known and known[0] is not None else (self.last or {}).get("step", 0)
        begun = self.attempts[attempt] = AttemptReports(first_step, min(later, default=None))
        return begun

    # -- rank 0 ---------------------------------------------------------------------------------------------------

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
            return with_nonfinite(record["metrics"], record.get("nonfinite", {}))
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.damaged += 1
            return {}

    def _add_curves(self, prefix: str, steps: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the columns of a table of metrics. Nested metrics are tables in it."""
        for key, values in _columns(rows):
            name, kinds = prefix + key, set(map(type, values))
            if kinds <= _NUMBERS:
                self._extend(name, steps, values)
                continue
            numbers = [(step, value) for step, value in zip(steps, values, strict=True) if type(value) in _NUMBERS]
            nested = [(step, value) for step, value in zip(steps, values, strict=True) if type(value) is dict]
            if numbers:
                self._extend(name, [step for step, _ in numbers], [value for _, value in numbers])
            if nested:
                self._add_curves(f"{name}/", [step for step, _ in nested], [value for _, value in nested])

    def _extend(self, name: str, steps: Sequence[int], values: Sequence[Any]) -> None:
        if name in self.curves or len(self.curves) < MOST_METRICS:
            self.curves.setdefault(name, Envelope()).extend(steps, values)
        elif len(self.more_metrics) < 10 * MOST_METRICS:
            self.more_metrics.add(name)


def _rewritten(line: bytes) -> re.Match[bytes] | None:
    """Return a match of a line that another program has written, None if it is damaged."""
    try:
        record = json.loads(line.decode())
        ordered = {key: record[key] for key in _KEYS if record.get(key) is not None}
        if waits := ordered.get("waits"):
            ordered["waits"] = {kind: waits[kind] for kind in ("data", "checkpoint") if kind in waits}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return _LINE.fullmatch(json.dumps(ordered, separators=(",", ":")).encode())


def _progress_in(text: bytes) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return None


def _columns(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, Sequence[Any]]]:
    """Return each key with its values, None where it is missing."""
    keys = list(rows[0])
    if len(keys) > 1 and set(map(len, rows)) == {len(keys)}:  # usually all rows have the same keys
        with suppress(KeyError):
            return list(zip(keys, zip(*map(itemgetter(*keys), rows), strict=True), strict=True))
    return [(key, [row.get(key) for row in rows]) for key in dict.fromkeys(chain.from_iterable(rows))]


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


def read_reports(
    path: Path | RemotePath, attempts: Sequence[tuple[int, int | None, bool]], notes: list[str]
) -> Reports:
    """Read all reports of a run. A note says what could not be read."""
    reports = Reports(attempts)
    try:
        opened = path.open("rb") if isinstance(path, Path) else io.BytesIO(path.read_bytes())
        with opened as file, _without_collections():
            reports.read(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"the reports cannot be read: {error}")
    if reports.damaged:
        notes.append(f"{reports.damaged:,} damaged lines of {path.name} were passed over")
    return reports
