"""``distrain show`` and ``distrain compare``: all about one run, and how several differ. Runs in: coordinator."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING, Any

from distrain.cli import parsers
from distrain.cli.text import (
    bold,
    coloured,
    cut,
    echo,
    metrics_line,
    paint,
    screen,
    table,
    value,
)
from distrain.storage import names
from distrain.storage.runs.comparison import command_of, different_settings, metrics_of
from distrain.storage.runs.details import checkpoints_of, error_of, extremes_of, hangs_of, reports_of
from distrain.storage.runs.listing import ABORTED, FAILED, FINISHED, KILLED, RUNNING, Run, WrongArgument
from distrain.storage.runs.logs import attempts_with_logs, log_folder
from distrain.system.naming import name_ranks
from distrain.system.text import count, duration, printable, size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

_INDENT = 13
_MOST_ATTEMPTS = 8
_MOST_METRICS = 12
_MOST_CHECKPOINTS = 5
_MOST_ERROR_LINES = 25


def show_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain show``."""
    parser = parsers.make_parser(
        "show",
        "Show one run on one screen: its state, command, code, hosts, attempts, metrics, checkpoints, logs and error.",
        "  distrain show last\n  distrain show train-2026-11-24_01-02-03-ab12cd\n"
        "  distrain show s3://bucket/runs/train-2026-11-24_01-02-03-ab12cd",
    )
    parsers.add_run(parser)
    return parser


def run_show(options: argparse.Namespace) -> int:
    """Show one run."""
    run = parsers.run_of(options)
    reports = list(reports_of(run))
    found = screen()
    columns = 120 if found is None else found[0]
    head = textwrap.wrap(f"{run.name}: {verdict(run, reports)}", columns, break_on_hyphens=False)
    lines = [coloured(run.state, line) for line in head]
    for label, text in _facts(run):
        if text:
            rest = textwrap.wrap(printable(text), max(columns - _INDENT, 30), break_on_hyphens=False)
            lines += _labelled(label, rest)
    lines += _labelled("attempts", _attempts(run, columns - _INDENT))
    lines += _labelled("metrics", _metrics(reports, columns - _INDENT))
    lines += _labelled("checkpoints", _checkpoints(run, columns - _INDENT))
    if error := error_of(run):
        lines += ["", coloured(FAILED, "error"), *_first(error.splitlines(), _MOST_ERROR_LINES, "line")]
    echo("\n".join(lines))
    return 0


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    return [f"{label if i == 0 else '':{_INDENT}}{line}" for i, line in enumerate(lines)]


def verdict(run: Run, reports: Sequence[dict[str, Any]]) -> str:
    """Return one sentence about the state of the run."""
    lasted = duration((time.time() if run.state == RUNNING else run.ended) - run.began)
    at = _where(reports)
    if run.state == RUNNING:
        text = f"running for {lasted}{at}" + (f", attempt {run.attempts[-1]['attempt']}" if run.attempts else "")
    elif run.state == FINISHED:
        text = f"finished after {lasted}{at}"
    elif run.state == FAILED:
        text = f"failed after {lasted}{at}{_why(run)}"
    elif run.state == ABORTED:
        text = f"stopped after {lasted}{at}{_why(run)}; it continues if you start it again with --name {run.name}"
    elif run.state == KILLED:
        text = (
            f"killed{at}: run.json says that it is running, but no process holds its lock. It continues if you start "
            f"it again with --name {run.name}"
        )
    else:
        text = run.state
    return text + (f"; all ranks hung {count(hangs, 'time')}" if (hangs := hangs_of(run)) else "")


def _where(reports: Sequence[dict[str, Any]]) -> str:
    if not reports:
        return ", without a report"
    progress = reports[-1].get("progress")
    if isinstance(progress, list) and len(progress) == 2 and progress[1]:
        return f" at step {progress[0]} of {progress[1]} ({progress[0] / progress[1]:.0%})"
    return f" at step {reports[-1]['step']}"


def _why(run: Run) -> str:
    failure = run.attempts[-1].get("failure") if run.attempts else None
    return f": {printable(str(failure))}" if failure else ""


def _facts(run: Run) -> Iterable[tuple[str, str]]:
    facts = run.manifest
    yield "run", run.path
    yield "script", str(facts.get("script") or "")
    yield "command", command_of(run)
    who = f" by {facts['user']}" if facts.get("user") else ""
    where = f" on {facts['host']}, process {facts.get('pid')}, in {facts.get('directory')}" if facts.get("host") else ""
    yield "started", f"{_clock(run.began)}{who}{where}"
    yield "code", _code(facts.get("git"))
    versions = facts.get("versions") if isinstance(facts.get("versions"), dict) else {}
    shown = {"distrain": facts.get("distrain"), "python": facts.get("python"), **(versions or {})}
    yield "versions", ", ".join(f"{name} {version}" for name, version in shown.items() if version)
    yield "settings", metrics_line(facts.get("train_loop_config") or {})
    yield "hosts", "; ".join(f"{host}: {name_ranks(ranks)}" for host, ranks in run.hosts.items())
    if attempts := attempts_with_logs(run):
        yield "logs", str(log_folder(run) / f"attempt_{attempts[-1]}")


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _code(git: object) -> str:
    if not isinstance(git, dict):
        return ""
    changed = {True: ", with uncommitted changes", False: ""}.get(git.get("dirty"), ", perhaps with changes")  # type: ignore[arg-type]
    return f"git {git.get('commit')}{changed}"


def _attempts(run: Run, columns: int) -> list[str]:
    rows = []
    for attempt in run.attempts[-_MOST_ATTEMPTS:]:
        ended = attempt.get("ended") or (time.time() if run.state == RUNNING else run.ended)
        hosts = attempt.get("hosts") or {}
        ranks = sum(map(len, hosts.values()))
        where = f"{count(ranks, 'rank')} on {count(len(hosts), 'host')}"
        start = f", from {attempt['checkpoint']}" if attempt.get("checkpoint") else ""
        lasted = duration(ended - (attempt.get("started") or ended))
        rows.append(f"{attempt.get('attempt')}  {_clock(attempt.get('started') or 0.0)}, {lasted}, {where}{start}")
        if attempt.get("failure"):
            rows.append(f"   {printable(str(attempt['failure']))}")
    lines = [cut(row, columns) for row in rows]
    left = len(run.attempts) - _MOST_ATTEMPTS
    return [paint(f"... {count(left, 'earlier one')}", "2"), *lines] if left > 0 else lines


def _metrics(reports: Sequence[dict[str, Any]], columns: int) -> list[str]:
    if not reports:
        return []
    from distrain.storage.retention import flatten

    last, extremes = flatten(reports[-1]["metrics"]), extremes_of(reports)
    rows = [["", "last", "least", "largest"]]
    for name in dict.fromkeys([*last, *extremes]):
        row = [printable(name), value(last.get(name)), "", ""]
        if found := extremes.get(name):
            row[2] = f"{value(found.least)} (step {found.least_step})"
            row[3] = f"{value(found.largest)} (step {found.largest_step})"
        rows.append(row)
    lines = ["  ".join(row).rstrip() for row in table(rows, columns)]
    return [lines[0], *_first(lines[1:], _MOST_METRICS, "metric")]


def _checkpoints(run: Run, columns: int) -> list[str]:
    found = checkpoints_of(run)
    if not found:
        return []
    rows = [[c.name, f"step {c.step}", size(c.bytes), metrics_line(c.metrics)] for c in found]
    lines = ["  ".join(row).rstrip() for row in table(rows[-_MOST_CHECKPOINTS:], columns, right=(1, 2))]
    left = len(rows) - _MOST_CHECKPOINTS
    total = f"{count(len(found), 'checkpoint')}, {size(sum(c.bytes for c in found))}"
    return [total, *([paint(f"... {count(left, 'earlier one')}", "2")] if left > 0 else []), *lines]


def _first(lines: Sequence[str], most: int, what: str) -> list[str]:
    if len(lines) <= most + 1:  # a line that counts the others would take the place of one
        return list(lines)
    return [*lines[:most], paint(f"... {count(len(lines) - most, f'more {what}')}", "2")]


# -- compare ---------------------------------------------------------------------------------------------------------


def compare_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain compare``."""
    parser = parsers.make_parser(
        "compare",
        "Show how runs differ: settings, command, code and versions that are not the same, and metrics side by side.",
        "  distrain compare train-2026-11-24_01 last",
    )
    parsers.add_run(parser, nargs="+")
    return parser


def run_compare(options: argparse.Namespace) -> int:
    """Compare runs."""
    runs = parsers.runs_of(options)
    if len(runs) < 2:
        raise WrongArgument("name two runs or more")
    letters = [chr(ord("A") + i % 26) for i in range(len(runs))]
    for letter, run in zip(letters, runs, strict=True):
        echo(f"{bold(letter)}  {run.name}  {coloured(run.state, run.state)}")
    differing = different_settings(runs)
    _print_columns("settings that differ", letters, differing)
    if not differing:
        print("\nthe settings are the same")
    _print_columns(f"metrics of rank 0, in {names.METRICS}", letters, metrics_of(runs))
    return 0


def _print_columns(title: str, letters: Sequence[str], rows: dict[str, list[Any]]) -> None:
    if not rows:
        return
    found = screen()
    label = min(max(map(len, rows)), 40)
    width = None if found is None else max((found[0] - label) // len(letters) - 2, 8)
    cells = [[cut(name, label), *(cut(_shown(item), width) for item in items)] for name, items in rows.items()]
    head, *lines = table([["", *letters], *cells], None)
    print(f"\n{bold(title)}\n{bold('  '.join(head))}")
    echo("\n".join("  ".join(line).rstrip() for line in lines))


def _shown(item: Any) -> str:
    return printable(item) if isinstance(item, str) else value(item)
