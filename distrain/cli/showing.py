"""``distrain show``, ``page`` and ``compare``: all about one run, or how some differ. Runs in: coordinator."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain.api.runs import info_of
from distrain.cli import parsers
from distrain.cli.text import cut, echo, metrics_line, paint, screen, table, write_json
from distrain.page.data import Table, attempts_table, checkpoints_table
from distrain.page.facts import Facts
from distrain.storage.runs.details import command_of
from distrain.storage.runs.listing import FAILED, Run, differing, find_run
from distrain.storage.runs.logs import attempts_with_logs, log_folder
from distrain.storage.runs.notes import Notes
from distrain.system.text import count, flatten, name_ranks, number, printable, size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

_EVENTS = {"slow": "slow rank", "memory_damage": "damaged part", "memory_checkpoint_lost": "lost checkpoint"}
"""Events whose names in events.jsonl are not words to count, in the words of users."""
_NO_NEWS = ("checkpoint", "stored", "trouble_over")
_INDENT = 13
_LONGEST = 20_000
_MOST_ATTEMPTS, _MOST_CHANGES, _MOST_CHECKPOINTS, _MOST_NOTES, _MOST_ERROR_LINES = 8, 8, 5, 5, 25


class Details:
    """All that ``distrain show`` tells about a run. Its attributes are the keys of the JSON (docs/json.md)."""

    def __init__(self, found: Facts) -> None:
        run, facts, attempts = found.run, found.run.manifest, attempts_with_logs(found.run)
        self.run = info_of(run)
        self.verdict = found.verdict
        self.command = command_of(run)
        self.process = {name: facts.get(name) for name in ("user", "host", "pid", "directory")}
        self.git = _dict(facts.get("git"))
        own = {name: facts.get(name) for name in ("distrain", "python")}
        self.versions = {**own, **(_dict(facts.get("versions")) or {})}
        self.settings = _dict(facts.get("train_loop_config"))
        self.logs = str(log_folder(run) / f"attempt_{attempts[-1]}") if attempts else None
        events = {
            (str(one["event"]).removesuffix("_began"), str(one.get("since", n))) for n, one in enumerate(found.events)
        }
        self.events = Counter(kind for kind, _ in sorted(events))  # the two events of a hang have the same ``since``
        self.attempts = run.attempts
        listed = facts.get("changes")
        changes = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        self.changes = [one for one in changes if "attempt" in one and isinstance(one.get("lines"), list)]
        self.extremes = {
            name: {"least": low[1], "least_step": low[0], "largest": high[1], "largest_step": high[0]}
            for name, curve in found.reports.curves.items()
            if (low := curve.lowest) and (high := curve.highest)
        }
        self.checkpoints, self.in_memory = found.checkpoints, found.in_memory
        self.error = str(found.error.get("message") or "") if run.state == FAILED else None


def details_of(run: Run) -> dict[str, Any]:
    """Return the JSON about a run."""
    return vars(Details(Facts(run, run.location)))


def _dict(item: object) -> dict[str, Any] | None:
    return item if isinstance(item, dict) else None


def run_show(options: argparse.Namespace) -> int:
    """Show one run."""
    run = parsers.run_of(options)
    if options.json:
        write_json("show", **details_of(run))
    else:
        echo(run_in_words(run, (screen() or (120, 0))[0]))
    return 0


def run_in_words(run: Run, columns: int) -> str:
    """Return one screen of text about a run."""
    found = Facts(run, run.location)
    shown, width = Details(found), columns - _INDENT
    wrap = partial(textwrap.wrap, break_on_hyphens=False, break_long_words=False)  # paths stay whole
    lines = wrap(f"{run.name}: {shown.verdict}", columns)
    for label, text in _facts(shown):
        text = printable(cut(text, _LONGEST))
        lines += _labelled(label, wrap(text, max(width, 30)))
    lines += _labelled("attempts", _lines(attempts_table(found), width, _MOST_ATTEMPTS, "attempt", -1))  # no hosts
    lines += _labelled("changes", _changes(shown, width))
    if kept := found.checkpoints:
        lines += _labelled("checkpoints", [f"{count(len(kept), 'checkpoint')}, {size(sum(one.bytes for one in kept))}"])
    checkpoints = _lines(checkpoints_table(found), width, _MOST_CHECKPOINTS, "checkpoint")
    lines += _labelled("" if kept else "checkpoints", checkpoints)
    lines += _labelled("damage", _first([printable(cut(note, width)) for note in found.notes], _MOST_NOTES, "note"))
    if shown.error:
        lines += ["", paint("error", "31"), *_first(shown.error.splitlines(), _MOST_ERROR_LINES, "line")]
    return "\n".join(lines)


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    return [f"{label if i == 0 else '':{_INDENT}}{line}" for i, line in enumerate(lines)]


def _facts(shown: Details) -> Iterable[tuple[str, str]]:
    run, process = shown.run, shown.process
    yield "run", run.path
    yield "note", str(Notes(run.note, run.tags))
    yield "command", shown.command
    who = f" by {process['user']}" if process["user"] else ""
    where = f" on {process['host']}, process {process['pid']}, in {process['directory']}" if process["host"] else ""
    yield "started", f"{_clock(run.started)}{who}{where}"
    if shown.git is not None:
        yield "code", f"git {shown.git.get('commit')}{', with uncommitted changes' if shown.git.get('dirty') else ''}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in shown.versions.items() if version)
    if shown.settings is not None:
        yield "settings", metrics_line(shown.settings)
    yield "metrics", metrics_line(run.metrics or {})
    yield "hosts", "; ".join(f"{host}: {name_ranks(ranks)}" for host, ranks in run.hosts.items())
    if shown.logs is not None:
        yield "logs", shown.logs
    news = ((kind, often) for kind, often in shown.events.items() if kind not in _NO_NEWS)
    yield "events", ", ".join(count(often, _EVENTS.get(kind, kind)) for kind, often in news)


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _lines(found: Table | None, columns: int, most: int, what: str, end: int | None = None) -> list[str]:
    """Return a table of the page as text. end: of the columns that are shown."""
    if found is None:
        return []
    rows = [[printable(cell) for cell in row[:end]] for row in (found["head"], *found["rows"])]
    return _first([cut(line, columns) for line in table(rows, None, found["numbers"])], most + 1, what, found["more"])


def _changes(shown: Details, columns: int) -> list[str]:
    found = [(one["attempt"], line) for one in shown.changes[::-1] for line in one["lines"]]
    return _first([printable(cut(f"{attempt}  {line}", columns)) for attempt, line in found], _MOST_CHANGES, "change")


def _first(lines: Sequence[str], most: int, what: str, more: int = 0) -> list[str]:
    if len(lines) <= most + 1:  # a line that counts the others would take the place of one
        return list(lines)
    return [*lines[:most], paint(f"... {count(len(lines) - most + more, f'more {what}')}", "2")]


# -- the page --------------------------------------------------------------------------------------------------------


def add_page_options(add: parsers.Add) -> None:
    """Add the options of ``distrain page``."""
    add("-o", "--output", metavar="FILE", help="the file (default: page.html in the run directory)")


def run_page(options: argparse.Namespace) -> int:
    """Write the page of a run."""
    from distrain.page import write_page

    echo(f"wrote {write_page(parsers.run_of(options).location, options.output)}")
    return 0


# -- several runs ----------------------------------------------------------------------------------------------------


def add_compare_options(add: parsers.Add) -> None:
    """Add the options of ``distrain compare``."""
    add("others", nargs="+", metavar="RUN", help="the runs to compare it with")


def run_compare(options: argparse.Namespace) -> int:
    """Compare runs."""
    storage = parsers.storage_of(options)
    runs = [find_run(given, storage) for given in (options.run, *options.others)]
    code = [{"state": run.state, "command": command_of(run), "git": run.manifest.get("git") or {}} for run in runs]
    settings = differing([{**flatten(one), **run.settings} for one, run in zip(code, runs, strict=True)])
    metrics = differing([Facts(run, run.location).reports.last_metrics for run in runs])
    if options.json:
        write_json("compare", runs=[info_of(run) for run in runs], settings=settings, metrics=metrics)
        return 0
    rows = [[printable(name), *map(_cell, values)] for name, values in (*settings.items(), *metrics.items())]
    room = (screen() or (120, 0))[0] - max((len(row[0]) for row in rows), default=0)
    width = max(room // len(runs) - 2, 8)
    ends = [run.name if len(run.name) <= width else f"…{run.name[1 - width :]}" for run in runs]  # beginnings are alike
    echo("\n".join(table([["", *ends], *([name, *(cut(cell, width) for cell in cells)] for name, *cells in rows)])))
    if not rows:
        echo("they have the same settings and metrics")
    return 0


def _cell(value: object) -> str:
    return "-" if value is None else number(value)
