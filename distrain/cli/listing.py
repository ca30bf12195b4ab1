"""``distrain ls`` and ``distrain clean``: the runs in a storage path. Runs in: coordinator."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from distrain.cli import parsers
from distrain.cli.text import age, coloured, echo, metrics_line, paint, screen, table
from distrain.storage.runs.listing import ABORTED, ENDED, FAILED, FINISHED, KILLED, Run, list_runs, storage_at
from distrain.system.text import count, size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from distrain.system.remote_path import RemotePath

_MOST_SIZED = 100
"""Runs up to which sizes are shown without ``--size``. Each file of a run has to be looked at."""
_LEAST_METRICS = 24
"""Columns that the last metrics need. Columns of less importance are left out before."""
_UNIMPORTANT = ("SCRIPT", "HOSTS", "SIZE", "RANKS")
"""Columns that a narrow terminal does without, the first one first."""


def ls_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain ls``."""
    parser = parsers.make_parser(
        "ls",
        "List the runs of a storage path, the newest first. A terminal shows as many as fit; a pipe gets all.",
        "  distrain ls\n  distrain ls -n 5 ~/runs\n  distrain ls s3://bucket/runs\n"
        "  distrain ls --json | jq -r '.[] | select(.state == \"failed\") | .name'",
    )
    parsers.add_storage(parser, "the storage path, or a run")
    add = parser.add_argument
    add("-n", type=parsers.number, metavar="N", help="show the newest N")
    add("--all", action="store_true", help="show all, also on a terminal")
    add("--size", action="store_true", help=f"show the sizes also of more than {_MOST_SIZED} runs")
    add("--names", action="store_true", help="show the names of the runs only")
    add("--json", action="store_true", help="write a list of JSON objects")
    return parser


def run_ls(options: argparse.Namespace) -> int:
    """List runs."""
    warnings.simplefilter("ignore")  # damaged lines of metrics
    gc.disable()  # it would look for circles in thousands of dicts, again and again
    storage = storage_at(options.path)
    runs = _listed(storage, is_default=options.path is None)
    shown = runs[: _limit(options)]
    sized = options.size or len(shown) <= _MOST_SIZED
    if options.names:
        for run in shown:
            if run.is_run:
                echo(run.name)
    elif options.json:
        import json

        print(json.dumps([_as_json(run, sized) for run in shown], indent=1))
    elif not runs:
        print(f"there are no runs in {storage}", file=sys.stderr)
    else:
        _print_table(shown, sized)
        if len(runs) > len(shown):
            print(paint(f"... and {count(len(runs) - len(shown), 'older one')}; --all lists them", "2"))
    return 0


def _listed(storage: Path | RemotePath, *, is_default: bool) -> list[Run]:
    try:
        return list_runs(storage)
    except FileNotFoundError:
        if is_default:  # there was no run yet
            return []
        raise


def _limit(options: argparse.Namespace) -> int | None:
    """Return how many runs to show, None for all."""
    if options.n is not None:
        return int(options.n)
    found = screen()
    return None if options.all or options.json or options.names or found is None else max(found[1] - 3, 5)


def _as_json(run: Run, sized: bool) -> dict[str, Any]:
    record = run.last_report()
    return {
        "name": run.name,
        "path": run.path,
        "state": run.state,
        "problem": run.problem or None,
        "began": run.began,
        "updated": run.ended,
        "script": run.manifest.get("script"),
        "attempts": len(run.attempts),
        "hosts": run.hosts,
        "ranks": run.ranks,
        "step": None if record is None else run.step_of(record),
        "metrics": None if record is None else record["metrics"],
        "bytes": run.bytes() if sized else None,
    }


def _print_table(runs: Sequence[Run], sized: bool) -> None:
    heads = ["NAME", "STATE", "AGE", "SCRIPT", "HOSTS", "RANKS", *(["SIZE"] if sized else []), "LAST METRICS"]
    now = time.time()
    rows = [_row(run, now, sized) for run in runs]
    found = screen()
    columns = None if found is None else found[0]
    for name in _UNIMPORTANT:
        if columns is None or name not in heads:
            continue
        widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]
        if sum(widths[:-1]) + 2 * len(widths[:-1]) + min(_LEAST_METRICS, widths[-1]) > columns:
            place = heads.index(name)
            heads, rows = _without(heads, place), [_without(row, place) for row in rows]
    right = [heads.index(name) for name in ("AGE", "RANKS", "SIZE") if name in heads]
    head, *cells = table([heads, *rows], columns, right)
    lines = ["  ".join(head)]
    for run, row in zip(runs, cells, strict=True):
        row[1] = coloured(run.state, row[1])
        lines.append("  ".join(row).rstrip())
    echo("\n".join(lines))


def _without(row: list[str], place: int) -> list[str]:
    return row[:place] + row[place + 1 :]


def _row(run: Run, now: float, sized: bool) -> list[str]:
    record = None if run.problem else run.last_report()
    last = run.problem if record is None else metrics_line(record["metrics"])
    hosts = list(run.hosts)
    return [
        run.name,
        run.state,
        age(now - run.began) if run.began else "",
        run.script,
        ",".join(hosts) if len(hosts) <= 2 else f"{len(hosts)} hosts",
        str(run.ranks or ""),
        *([size(run.bytes()) if run.is_run else ""] if sized else []),
        last,
    ]


# -- clean -----------------------------------------------------------------------------------------------------------


def clean_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain clean``."""
    parser = parsers.make_parser(
        "clean",
        "Delete runs that have ended, with their checkpoints and logs. Running ones are never deleted, and neither is "
        "anything that is no run. Without states, all that have ended are meant.",
        "  distrain clean --older-than 30d --dry-run\n  distrain clean --failed --aborted --older-than 7d\n"
        "  distrain clean ~/runs --killed --yes",
    )
    parsers.add_storage(parser)
    add = parser.add_argument
    add("--older-than", metavar="AGE", type=_seconds, help="only those that ended so long ago: 12h, 7d, 4w")
    for state in (FAILED, FINISHED, ABORTED, KILLED):
        add(f"--{state}", dest="states", action="append_const", const=state, help=f"only those that are {state}")
    add("--dry-run", action="store_true", help="show what would be deleted; delete nothing")
    add("--yes", action="store_true", help="do not ask")
    return parser


def _seconds(text: str) -> float:
    import argparse

    units = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"must be an age such as 12h, 7d or 4w, got {text!r}")
    return float(number) * units[unit]


def run_clean(options: argparse.Namespace) -> int:
    """Delete runs."""
    from distrain.errors import StorageError
    from distrain.storage.runs.deletion import delete_rests, delete_run

    if options.older_than is None and not options.states:
        raise StorageError("name what to delete: --older-than 30d, --failed, --finished, --aborted or --killed")
    storage = storage_at(options.path)
    before = time.time() - (options.older_than or 0)
    states = tuple(options.states or ENDED)
    chosen = [
        run
        for run in _listed(storage, is_default=options.path is None)
        if run.state in states and run.ended <= before and run.path != str(storage)
    ]
    rests = delete_rests(storage, dry_run=options.dry_run)
    if rests:
        verb = "would be deleted" if options.dry_run else "deleted"
        print(f"{verb}: what an earlier clean has left of {count(rests, 'run')}")
    if not chosen:
        print(f"no run in {storage} is to be deleted")
        return 0
    sizes = {run.path: run.bytes() for run in chosen}
    rows = [[run.name, run.state, age(time.time() - run.ended), size(sizes[run.path])] for run in chosen]
    echo("\n".join("  ".join(row) for row in table(rows, None, right=(2, 3))))
    total = f"{count(len(chosen), 'run')}, {size(sum(sizes.values()))}"
    if options.dry_run:
        print(f"{total} would be deleted")
        return 0
    if not options.yes and not _agrees(f"delete {total}, with all checkpoints? [y/N] "):
        print("nothing was deleted")
        return 1
    code, freed, deleted = 0, 0, 0
    for run in chosen:
        try:
            delete_run(run, before)
        except (StorageError, OSError) as error:
            echo(f"distrain clean: {run.name} is left: {error}", sys.stderr)
            code = 1
        else:
            deleted, freed = deleted + 1, freed + sizes[run.path]
    print(f"deleted {count(deleted, 'run')}, {size(freed)}")
    return code


def _agrees(question: str) -> bool:
    from distrain.errors import StorageError

    if not sys.stdin.isatty():
        raise StorageError("there is no terminal to ask on: add --yes, or --dry-run to see only")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
