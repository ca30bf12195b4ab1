"""``distrain show``: all about one run. Runs in: coordinator."""

from __future__ import annotations

import shlex
import textwrap
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.text import cut, echo, metrics_line, paint, screen, table, value
from distrain.page.reports import read_reports
from distrain.storage import names
from distrain.storage.lines import read_events
from distrain.storage.runs.details import checkpoints_of, error_of, newest_in_memory, verdict
from distrain.storage.runs.listing import FAILED, RUNNING, Run
from distrain.storage.runs.logs import attempts_with_logs, log_folder
from distrain.system.text import count, duration, flatten, name_ranks, printable, size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from distrain.page.reports import Reports
    from distrain.storage.records import CommittedCheckpoint

_PROGRAMS = {
    "/distrain/launch.py": ("python", "-m", "distrain.launch"),
    "/distrain/__main__.py": ("distrain",),
    "/bin/distrain": ("distrain",),
}
"""By the end of ``sys.argv[0]``, what the user has typed."""
_INDENT = 13
_MOST_ATTEMPTS, _MOST_METRICS, _MOST_CHECKPOINTS, _MOST_ERROR_LINES = 8, 12, 5, 25


def show_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain show``."""
    return parsers.make_run_parser(
        "show",
        "Show one run on one screen: its state, command, code, hosts, attempts, metrics, checkpoints, logs and error.",
        "  distrain show last\n  distrain show train-2026-11-24_01-02-03-ab12cd\n"
        "  distrain show s3://bucket/runs/train-2026-11-24_01-02-03-ab12cd",
    )


def run_show(options: argparse.Namespace) -> int:
    """Show one run."""
    warnings.simplefilter("ignore")  # what is damaged
    echo(run_in_words(parsers.run_of(options), (screen() or (120, 0))[0]))
    return 0


def run_in_words(run: Run, columns: int) -> str:
    """Return one screen of text about a run. Warns of what is damaged."""
    reports = read_reports(run.location / names.METRICS, run.attempts, [], rank=0)
    sentence = f"{run.name}: {verdict(run, reports.last)}"
    lines = [textwrap.fill(sentence, columns, break_on_hyphens=False)]
    for label, text in _facts(run):
        lines += _labelled(label, textwrap.wrap(printable(text), max(columns - _INDENT, 30), break_on_hyphens=False))
    lines += _labelled("attempts", _attempts(run, columns - _INDENT))
    lines += _labelled("metrics", _metrics(reports, columns - _INDENT))
    lines += _labelled("checkpoints", _checkpoints(run, columns - _INDENT))
    if run.state == FAILED and (message := str(error_of(run.location).get("message") or "")):
        lines += ["", paint("error", "31"), *_first(message.splitlines(), _MOST_ERROR_LINES, "line")]
    return "\n".join(lines)


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    return [f"{label if i == 0 else '':{_INDENT}}{line}" for i, line in enumerate(lines)]


def _facts(run: Run) -> Iterable[tuple[str, str]]:
    facts = run.manifest
    yield "run", run.path
    yield "command", command_of(run)
    who = f" by {facts['user']}" if facts.get("user") else ""
    where = f" on {facts['host']}, process {facts.get('pid')}, in {facts.get('directory')}" if facts.get("host") else ""
    yield "started", f"{_clock(run.began)}{who}{where}"
    if isinstance(git := facts.get("git"), dict):
        yield "code", f"git {git.get('commit')}{', with uncommitted changes' if git.get('dirty') else ''}"
    versions = facts.get("versions") if isinstance(facts.get("versions"), dict) else {}
    shown = {"distrain": facts.get("distrain"), "python": facts.get("python"), **(versions or {})}
    yield "versions", ", ".join(f"{name} {version}" for name, version in shown.items() if version)
    if isinstance(config := facts.get("train_loop_config"), dict):
        yield "settings", metrics_line(config)
    if isinstance(hydra := facts.get("hydra"), dict):
        yield "hydra", f"{shlex.join(map(str, hydra.get('overrides', [])))} in {hydra.get('output_dir')}".strip()
    yield "hosts", "; ".join(f"{host}: {name_ranks(ranks)}" for host, ranks in run.hosts.items())
    if attempts := attempts_with_logs(run):
        yield "logs", str(log_folder(run) / f"attempt_{attempts[-1]}")
    events = Counter(str(event["event"]) for event in read_events(run.location / names.EVENTS))
    yield "events", ", ".join(f"{number} {kind}" for kind, number in events.items() if kind != "checkpoint")


def command_of(run: Run) -> str:
    """Return the command line of a run, as it can be typed."""
    argv = run.manifest.get("argv")
    if not isinstance(argv, list) or not argv:
        return ""
    program = str(argv[0])
    for end, typed in _PROGRAMS.items():
        if program.endswith(end):
            return shlex.join([*typed, *map(str, argv[1:])])
    return shlex.join(["python", *map(str, argv)] if program.endswith(".py") else map(str, argv))


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _attempts(run: Run, columns: int) -> list[str]:
    rows = []
    for attempt in run.attempts[::-1]:
        ended = attempt.get("ended") or (time.time() if run.state == RUNNING else run.ended)
        start = f", from {attempt['checkpoint']}" if attempt.get("checkpoint") else ""
        why = f": {printable(str(attempt['failure']))}" if attempt.get("failure") else ""
        lasted = duration(ended - attempt["started"])
        rows.append(cut(f"{attempt['attempt']}  {_clock(attempt['started'])}, {lasted}{start}{why}", columns))
    return _first(rows, _MOST_ATTEMPTS, "attempt")


def _metrics(reports: Reports, columns: int) -> list[str]:
    if reports.last is None:
        return []
    last = flatten(reports.last["metrics"])
    rows = [["", "last", "least", "largest"]]
    for name in dict.fromkeys([*last, *reports.curves]):
        row = [printable(name), value(last.get(name)), "", ""]
        curve = reports.curves.get(name)
        if curve and curve.lowest and curve.highest:
            row[2:] = [f"{value(found)} (step {step})" for step, found in (curve.lowest, curve.highest)]
        rows.append(row)
    return _first(table(rows, columns), _MOST_METRICS + 1, "metric")


def _checkpoints(run: Run, columns: int) -> list[str]:
    found = checkpoints_of(run.location)
    if newest := newest_in_memory(run, list(read_events(run.location / names.EVENTS))):
        stored = found[-1].path.name if found else "none"
        line = f"{newest.get('name')} in memory, at step {newest.get('step')}; newest on storage: {stored}"
        return [printable(line), *_stored(found, columns)]
    return _stored(found, columns)


def _stored(found: Sequence[CommittedCheckpoint], columns: int) -> list[str]:
    if not found:
        return []
    rows = [[c.path.name, f"step {c.step}", size(c.bytes), metrics_line(c.metrics)] for c in found[::-1]]
    total = f"{count(len(found), 'checkpoint')}, {size(sum(c.bytes for c in found))}"
    return [total, *_first(table(rows, columns, right=(1, 2)), _MOST_CHECKPOINTS, "checkpoint")]


def _first(lines: Sequence[str], most: int, what: str) -> list[str]:
    if len(lines) <= most + 1:  # a line that counts the others would take the place of one
        return list(lines)
    return [*lines[:most], paint(f"... {count(len(lines) - most, f'more {what}')}", "2")]
