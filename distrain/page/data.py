"""Everything that the page shows of a run, as one object for its script, from the facts of the run. Runs in: anywhere.

Tables are ``{"head": ..., "rows": ..., "numbers": the columns of numbers, "more": how many rows were left out}``.
"""

from __future__ import annotations

import json
import math
import re
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.errors import StorageError
from distrain.page.facts import Facts
from distrain.page.reports import AttemptReports, Reports
from distrain.page.time_use import PARTS, AttemptTimes, where_time_went
from distrain.storage import names
from distrain.storage.runs.details import command_of, failures_in, hangs_in
from distrain.storage.runs.listing import DAMAGED, RUNNING, Run, number_in, run_at
from distrain.storage.runs.logs import attempts_with_logs, log_files, read_lines
from distrain.system import __version__
from distrain.system.stacks import raised_at
from distrain.system.text import amount, duration, flatten, number, rank_list, size, without_controls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distrain.system.remote_path import RemotePath

_POINTS = 30_000
"""Points of all curves together, which bounds the size of the page."""
_MOST_POINTS = 1_500
"""Points of one curve."""
_MOST_ROWS = 100
_MOST_LINES = 40
_MOST_LOGS = 8
_LONGEST_TEXT = 20_000
"""Characters of one piece of text; of a longer one, the end is shown."""
_COLOURS = re.compile(r"\x1b\[[0-?]*m")

Table = dict[str, Any]


def page_data(folder: Path | RemotePath, known_as: Path | RemotePath | None = None) -> dict[str, Any]:
    """Return what the page shows. Raise StorageError if there is neither a manifest nor a report.

    known_as: where the run is, if ``folder`` is another name for it.
    """
    root = known_as or folder
    run = run_at(folder)._replace(name=root.name)
    if not run.manifest and run.state != DAMAGED and not (folder / names.METRICS).exists():
        raise StorageError(f"{root} is not a run directory: {run.problem or f'it has no {names.MANIFEST}'}")
    facts = Facts(run, folder, rank=None)
    error, reports = facts.error, facts.reports
    most = max(16, min(_MOST_POINTS, _POINTS // max(1, len(reports.curves))))
    data = {
        "name": str(run.manifest.get("name") or root.name),
        "location": str(root),
        "state": run.state,
        "verdict": f"{facts.verdict[:1].upper()}{facts.verdict[1:]}.",
        "notes": [text.replace(str(folder), str(root)) for text in facts.notes[:20]],
        "failures": [_failure(one) for one in failures_in(error)[:_MOST_LOGS]],
        "message": str(error.get("message") or ""),
        "where": _lines(error.get("where")),
        "curves": [{"name": name, **curve.drawn(most)} for name, curve in reports.curves.items()],
        "more_metrics": len(reports.more_metrics),
        "starts": sorted({first for attempt in run.attempts[1:] if (first := attempt.get("first_step"))})[-50:],
        "ranks": _ranks(run, reports),
        "attempts": attempts_table(facts),
        "evidence": facts.evidence[:_MOST_ROWS],
        "events": _events(facts),
        "checkpoints": checkpoints_table(facts),
        "time": _time_use(facts),
        "logs": _logs(facts),
        "settings": _settings(run),
        "made": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "version": __version__,
    }
    return {key: _plain(value) for key, value in data.items()}


def _plain(value: Any) -> Any:
    """Return JSON without colours and control characters, and without the beginnings of very long texts."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if not isinstance(value, str) or (value.isascii() and value.isprintable() and len(value) <= _LONGEST_TEXT):
        return value
    return _COLOURS.sub("", without_controls(value[-_LONGEST_TEXT:]))


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], numbers: Iterable[int] = ()) -> Table | None:
    if not rows:
        return None
    shown = [[str(cell) for cell in row] for row in rows[:_MOST_ROWS]]
    return {"head": head, "rows": shown, "numbers": list(numbers), "more": len(rows) - len(shown)}


# -- the failure -----------------------------------------------------------------------------------------------------


def _failure(one: Mapping[str, Any]) -> dict[str, Any]:
    role = {"culprit": "failed first", "victim": "because of another rank"}.get(str(one.get("role")), "")
    traceback = str(one.get("traceback") or "")
    return {
        "rank": f"rank {one.get('rank')}" + (f" on {one['host']}" if one.get("host") else ""),
        "role": role,
        "why": f"{one.get('summary') or 'no reason is known'}" + (f" ({at})" if (at := raised_at(traceback)) else ""),
        "traceback": traceback,
        "lines": _lines(one.get("last_lines")),
    }


def _lines(listed: object) -> list[str]:
    """Return the first lines of a list, which error.json may lack."""
    return list(map(str, listed[:_MOST_LINES])) if isinstance(listed, list) else []


def _logs(facts: Facts) -> list[tuple[str, list[str]]]:
    """Return the last lines of the ranks that have failed, and of others, in the last attempt of a local run."""
    run = facts.run
    if not isinstance(run.location, Path) or not (attempts := attempts_with_logs(run)):
        return []
    files = log_files(run, attempts[-1])
    failed = [failure.get("rank") for failure in failures_in(facts.error)]
    chosen = sorted(files, key=lambda rank: (rank not in failed, rank))[:_MOST_LOGS]
    found = []
    for rank in chosen:
        with suppress(OSError):
            found.append((f"rank {rank}, attempt {attempts[-1]}", list(read_lines(run, files[rank], _MOST_LINES))))
    return found


# -- ranks ----------------------------------------------------------------------------------------------------------


_RANKS = ("rank", "host", "last report", "behind the latest report", "interval", "waited for data", "for checkpoints")


def _ranks(run: Run, reports: Reports) -> Table | None:
    """Return the table of the ranks, those first that are behind the others, and then those that report slowly."""
    hosts = {rank: host for host, ranks in run.hosts.items() for rank in ranks}
    ordered = sorted(reports.ranks.items(), key=lambda item: (item[1].attempt, item[1].step, -item[1].interval))
    latest = max((one.last for one in reports.ranks.values()), default=0)
    rows = []
    for rank, one in ordered:
        waits = zip(*(there.waits[rank] for there in reports.attempts.values() if rank in there.waits), strict=True)
        spent = [duration(total) if total else "-" for total in map(sum, waits)] or ["-", "-"]
        times = duration(latest - one.last), duration(one.interval)
        rows.append((rank, hosts.get(rank, ""), f"{one.step:,}", *times, *spent))
    return _table(_RANKS, rows, (2, 3, 4, 5, 6))


# -- the time --------------------------------------------------------------------------------------------------------


def _times(run: Run, reports: Reports) -> list[AttemptTimes]:
    """Return the times of the attempts. An end that nobody has recorded is the last report before it, or the start."""
    found = []
    for attempt in run.attempts:
        there = reports.attempts.get(attempt["attempt"], AttemptReports())
        training, ended = attempt.get("training"), attempt.get("ended")
        if ended is None:
            ended = max(training or 0.0, there.last_time, run.until if attempt is run.attempts[-1] else 0.0)
        found.append(
            AttemptTimes(
                started=attempt["started"],
                training=training,
                ended=max(ended, attempt["started"]),
                kept_until=None if there.lost_after == math.inf else there.kept_until or training,
                waits=max(there.waits.values(), key=sum, default=(0.0, 0.0)),
            )
        )
    return found


def _hangs(run: Run, events: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return the times of the hangs. One that has no end lasts until the end of the run."""
    seen, now = hangs_in(events), run.until
    ends = [(event, event["time"] if event["event"] == "hang" else now) for event in seen]
    return [(event["since"], end) for event, end in ends if event["event"] == "hang" or event is seen[-1]]


def parts_of_time(run: Run, reports: Reports, events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of all :data:`PARTS` of the run's time so far; ``{}`` before its first attempt.

    reports: those of all ranks.
    """
    times = _times(run, reports)
    if not times:
        return {}
    started = min(number_in(run.manifest.get("started")) or times[0].started, times[0].started)
    ended = max(run.until, *(one.ended for one in times))
    return where_time_went(times, _hangs(run, events), started=started, ended=ended)


def _time_use(facts: Facts) -> dict[str, Any] | None:
    parts = parts_of_time(facts.run, facts.reports, facts.events)
    if not parts:
        return None
    total = sum(parts.values()) or 1.0
    shown = {kind: seconds for kind, seconds in parts.items() if seconds >= 0.0005 * total or kind == "training"}
    rows = [
        (PARTS[kind][0], duration(seconds), f"{seconds / total:.1%}", PARTS[kind][1]) for kind, seconds in shown.items()
    ]
    return {
        "goodput": f"{parts['training'] / total:.0%} of {duration(total)}",
        "parts": [(kind, seconds / total) for kind, seconds in shown.items()],
        "table": _table(("part", "time", "share", "meaning"), rows, (1, 2)),
    }


def attempts_table(facts: Facts) -> Table | None:
    """Return the table of the attempts, the last one first."""
    run, rows = facts.run, []
    for attempt, timed in zip(run.attempts, _times(run, facts.reports), strict=True):
        named = [f"{host} ({rank_list(ranks)})" for host, ranks in islice(attempt["hosts"].items(), 8)]
        more = [f"{len(attempt['hosts']) - 8:,} more"] if len(attempt["hosts"]) > 8 else []
        step = attempt.get("first_step")
        begin = f"{attempt.get('checkpoint') or 'the beginning'}" + (f" (report {step:,})" if step else "")
        is_running = run.state == RUNNING and attempt is run.attempts[-1]
        rows.append(
            (
                attempt["attempt"],
                _after(run, timed.started),
                duration(timed.ended - timed.started),
                begin,
                attempt.get("failure") or attempt.get("planned_end") or ("running" if is_running else run.state),
                ", ".join(named + more),
            )
        )
    return _table(("attempt", "began", "lasted", "from", "ended", "hosts (ranks)"), rows[::-1], (1, 2))


def _events(facts: Facts) -> Table | None:
    """Return the table of what events.jsonl has beside checkpoints: hangs, slow ranks, troubles with hosts."""
    run = facts.run
    rows = [
        (
            _after(run, event["time"]),
            event["event"],
            ", ".join(
                f"{name}: {_after(run, value) if name == 'since' and number_in(value) else value}"
                for name, value in event.items()
                if name not in ("time", "event") and value != ""
            ),
        )
        for event in facts.events
        if event["event"] != "checkpoint"
    ]
    return _table(("after", "event", "details"), rows[::-1])


def _after(run: Run, moment: object) -> str:
    started, at = number_in(run.manifest.get("started")), number_in(moment)
    return "?" if started is None or at is None else f"+{duration(at - started)}"


# -- checkpoints and settings ----------------------------------------------------------------------------------------


def checkpoints_table(facts: Facts) -> Table | None:
    """Return the table of the checkpoints in the directory, and of those in events.jsonl that were deleted since."""
    run, newest = facts.run, facts.in_memory
    there = {saved.path.name: saved for saved in facts.checkpoints}
    made = facts.made if newest is None else {**facts.made, str(newest.get("name")): newest}
    used: dict[str, list[int]] = {}
    for attempt in run.attempts:
        used.setdefault(str(attempt.get("checkpoint")), []).append(attempt["attempt"])
    rows = []
    for name in [*made, *(name for name in there if name not in made)]:
        event, saved = made.get(name, {}), there.get(name)
        step = number_in(event.get("step", saved and saved.step))
        held = number_in(event.get("bytes", saved and saved.bytes))
        seconds = number_in(event.get("seconds"))
        flat = flatten(saved.metrics) if saved else {}
        metrics = [f"{k}={amount(v) if isinstance(v, (int, float)) else number(v)}" for k, v in flat.items()]
        rows.append(
            (
                name,
                "?" if step is None else f"{step:,.0f}",
                _after(run, saved.time if saved and saved.time else event.get("time")),
                size(int(held or 0)),
                "?" if seconds is None else duration(seconds),
                ("kept" if saved else "in memory" if made.get(name) is newest else "deleted")
                + (f"; attempts from it: {rank_list(used[name])}" if name in used else ""),
                " ".join(metrics[:6]),
            )
        )
    return _table(("checkpoint", "report", "after", "size", "took", "state", "metrics"), rows[::-1], (1, 2, 3, 4))


_SHOWN_ELSEWHERE = ("attempts", "status", "name", "argv")


def _settings(run: Run) -> list[tuple[str, Table | None]]:
    """Return the rest of run.json: the configs, the versions and the command, a table for each."""
    fields = {name: value for name, value in run.manifest.items() if name not in _SHOWN_ELSEWHERE}
    fields["command"] = command_of(run) or None
    for name in ("started", "continued", "updated"):
        with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
            fields[name] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(fields[name]))
    groups = {name: flatten(value) for name, value in fields.items() if isinstance(value, dict)}
    groups = {"run": {n: value for n, value in fields.items() if n not in groups and value is not None}, **groups}
    return [
        (name, _table(("name", "value"), [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in group.items()]))
        for name, group in list(groups.items())[:_MOST_ROWS]
        if group
    ]
