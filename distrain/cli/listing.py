"""``distrain ls`` and ``board``: the runs in storage paths, as a table and in the browser. Runs in: coordinator."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.text import age, coloured, cut, echo, metrics_line, paint, screen, table, width_of, write_json
from distrain.jobs.place import has_queue
from distrain.storage.runs.listing import FOREIGN, Run, WrongArgument, differing, list_runs, storage_at
from distrain.storage.runs.notes import Notes
from distrain.system.text import broken, did_you_mean, number, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


_LONGEST, _LEAST = 32, 16
"""Characters of a setting or a note at most, and of the metrics at least."""


def add_ls_options(add: parsers.Add) -> None:
    """Add the options of ``distrain ls``."""
    add("more", nargs="*", metavar="MORE", help="further ones")
    add("--sort", metavar="METRIC", help="the best first: the lowest of a loss or an error, else the highest")
    add("--tag", help="only those with this tag")
    add("-n", type=parsers.number, metavar="N", help="show the first N")
    add("--all", action="store_true", help="show all, also on a terminal")


def run_ls(options: argparse.Namespace) -> int:
    """List runs."""
    gc.disable()  # it would look for circles in thousands of dicts, again and again
    storage = parsers.storage_of(options)
    runs = list_runs(storage, may_be_missing=options.path is None)
    for path in options.more:
        runs += list_runs(storage_at(path))
    if options.path is None and has_queue():
        from distrain.cli.queueing import jobs_elsewhere  # it takes a while

        runs += jobs_elsewhere(storage)({run.path for run in runs})
    runs = [run for run in runs if options.tag in (None, *run.notes.tags)]
    best = _best(runs, options.sort) if options.sort else {}
    places = {path: place for place, path in enumerate(best)}
    runs.sort(key=lambda run: (places.get(run.path, len(places)), run.state == FOREIGN, -run.began))
    found = screen()
    limit = options.n
    if limit is None and found is not None and not (options.all or options.json):
        limit = max(found[1] - 3, 5)
    shown = runs[:limit]
    if options.json:
        from distrain.api.runs import info_of

        write_json("ls", runs=[info_of(run) for run in shown if run.state != FOREIGN])
    elif not runs:
        tagged = f" with the tag {options.tag}" if options.tag else ""
        echo(f"there are no runs{tagged} in {' '.join([str(storage), *options.more])}", sys.stderr)
    else:
        _print_table(shown, found and found[0], (f"BEST {options.sort}", best) if best else None)
        if len(runs) > len(shown):
            print(paint(f"... and {len(runs) - len(shown):,} more; --all lists them", "2"))
    return 0


def _best(runs: Sequence[Run], metric: str) -> dict[str, float]:
    """Return the best value of a metric, the best run first, by the paths of those that have one."""
    from distrain.page.facts import Facts  # these take a while
    from distrain.storage.retention import LOWEST_IS_BEST

    reports = {run.path: Facts(run, run.location).reports for run in runs if run.manifest}
    found = {path: value for path, one in reports.items() if (value := one.best(metric)) is not None}
    if not found:
        hint = did_you_mean(metric, {name for one in reports.values() for name in one.curves})
        raise WrongArgument(f"no run has reported a number {metric!r}{hint}")
    return dict(sorted(found.items(), key=lambda item: item[1], reverse=not LOWEST_IS_BEST.search(metric.lower())))


def _print_table(runs: Sequence[Run], columns: int | None, best: tuple[str, dict[str, float]] | None) -> None:
    """Print what fits: name and state, the best value, and of the other columns the first ones."""
    start = len(os.path.commonprefix([run.path for run in runs]).rpartition("/")[0]) + 1  # noqa: RUF071 - URLs, too
    longest = max(len(run.path) if columns is None else max(columns // 2, len(run.name)) for run in runs)
    names = [run.path[start:] if len(run.path) - start <= longest else f"…{run.path[1 - longest :]}" for run in runs]
    now, heads = time.time(), ["NAME", "STATE", "LAST METRICS"]
    rows = [heads, *([name, *_state_and_metrics(run)] for name, run in zip(names, runs, strict=True))]
    more = [
        ["AGE", *(age(now - run.began) if run.began else "" for run in runs)],
        ["RANKS", *(str(run.ranks or "") for run in runs)],
    ]
    if any(run.notes != Notes() for run in runs):
        more.append(["NOTE", *(str(run.notes) for run in runs)])
    for name, values in differing([run.settings for run in runs]).items():
        if len({str(value) for value in values if value is not None}) > 1:  # scripts have settings of their own
            more.append([printable(name), *("" if value is None else number(value) for value in values)])
    more.append(["SCRIPT", *(run.script for run in runs)])
    more.append(["HOSTS", *(",".join(run.hosts) if len(run.hosts) <= 2 else f"{len(run.hosts)} hosts" for run in runs)])
    if best is not None:
        more.insert(0, [best[0], *(number(best[1].get(run.path, "")) for run in runs)])
    used = sum(max(width_of(row[n]) for row in rows) + 2 for n in (0, 1)) + _LEAST
    for column in more:
        cells = [cut(cell, _LONGEST) for cell in column]
        width = max(map(len, cells)) + 2
        if columns is None or used + width <= columns or (best and column is more[0]):
            used += width
            for row, cell in zip(rows, cells, strict=True):
                row.insert(-1, cell)
    echo("\n".join(table(rows, columns, right=[n for n, head in enumerate(heads) if head in ("AGE", "RANKS")])))


def _state_and_metrics(run: Run) -> tuple[str, str]:
    record = None if run.problem else run.last_report()
    if record is None:
        return coloured(run.state), run.problem
    metrics, nan = metrics_line(record["metrics"]), broken(record["metrics"]).removeprefix(", but ")
    return (paint(run.state, "33"), f"{nan}: {metrics}") if nan else (coloured(run.state), metrics)


# -- the board -------------------------------------------------------------------------------------------------------


def add_board_options(add: parsers.Add) -> None:
    """Add the options of ``distrain board``."""
    add("--port", type=parsers.port, default=0, metavar="N", help="the port (default: a free one)")


def run_board(options: argparse.Namespace) -> int:
    """Serve the board."""
    import secrets

    from distrain.board.runs import Board
    from distrain.cli.queueing import jobs_elsewhere
    from distrain.cli.requesting import HOST, listener_at, request
    from distrain.system.imports import require

    storage = parsers.storage_of(options)
    if not isinstance(storage, Path):
        raise WrongArgument(f"the board shows local runs only; `distrain ls {storage}` lists those there")
    if options.path is None:
        storage.mkdir(parents=True, exist_ok=True)  # the first run has not made it yet
    board = Board(storage, *([jobs_elsewhere(storage)] if has_queue() else []))
    board.look()
    server = require("distrain.board.server")
    listener = listener_at(options.port)
    token = secrets.token_urlsafe(24)
    echo(f"distrain board of {storage}: Ctrl-C ends it\n")
    echo(f"    http://{HOST}:{listener.getsockname()[1]}/{token}/\n")
    server.serve(board, listener, token, request)
    return 0
