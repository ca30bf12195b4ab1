"""``distrain ls`` and ``distrain clean``: the runs in a storage path. Runs in: coordinator."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.text import age, coloured, echo, metrics_line, paint, screen, table, write_json
from distrain.storage.runs.listing import ENDED, FAILED, FINISHED, FOREIGN, KILLED, STOPPED, Run, list_runs
from distrain.system.text import broken, count, size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


_WIDE = 100
"""Columns of a terminal from which on the script and the hosts are shown."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def ls_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain ls``."""
    parser = parsers.make_parser(
        "ls",
        "List the runs of a storage path, the newest first. A terminal shows as many as fit; a pipe gets all.",
        "  distrain ls\n  distrain ls -n 5 ~/runs\n  distrain ls s3://bucket/runs\n"
        "  distrain ls --json | jq -r '.runs[] | select(.state == \"failed\") | .name'",
    )
    parsers.add_storage(parser, "the storage path, or a run")
    add = parser.add_argument
    add("-n", type=parsers.number, metavar="N", help="show the newest N")
    add("--all", action="store_true", help="show all, also on a terminal")
    parsers.add_json(parser)
    return parser


def run_ls(options: argparse.Namespace) -> int:
    """List runs."""
    warnings.simplefilter("ignore")  # damaged lines of metrics
    gc.disable()  # it would look for circles in thousands of dicts, again and again
    storage = parsers.storage_of(options)
    runs = list_runs(storage, may_be_missing=options.path is None)
    found = screen()
    limit = options.n
    if limit is None and found is not None and not (options.all or options.json):
        limit = max(found[1] - 3, 5)
    shown = runs[:limit]
    if options.json:
        from distrain.api.runs import info_of

        write_json("ls", runs=[info_of(run) for run in shown if run.state != FOREIGN])
    elif not runs:
        print(f"there are no runs in {storage}", file=sys.stderr)
    else:
        _print_table(shown, found and found[0])
        if len(runs) > len(shown):
            print(paint(f"... and {count(len(runs) - len(shown), 'older one')}; --all lists them", "2"))
    return 0


def _print_table(runs: Sequence[Run], columns: int | None) -> None:
    heads = ["NAME", "STATE", "AGE", "RANKS", "SCRIPT", "HOSTS", "LAST METRICS"]
    rows = [heads, *(_row(run, time.time()) for run in runs)]
    if columns is not None and columns < _WIDE:
        rows = [row[:4] + row[6:] for row in rows]
    echo("\n".join(table(rows, columns, right=(2, 3))))


def _row(run: Run, now: float) -> list[str]:
    record = None if run.problem else run.last_report()
    nan = broken(record["metrics"]).removeprefix(", but ") if record else ""
    return [
        run.name,
        paint(run.state, "33") if nan else coloured(run.state),
        age(now - run.began) if run.began else "",
        str(run.ranks or ""),
        run.script,
        ",".join(run.hosts) if len(run.hosts) <= 2 else f"{len(run.hosts)} hosts",
        run.problem if record is None else f"{nan}: {metrics_line(record['metrics'])}".removeprefix(": "),
    ]


# -- clean -----------------------------------------------------------------------------------------------------------


def clean_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain clean``."""
    parser = parsers.make_parser(
        "clean",
        "Delete runs that have ended, with their checkpoints and logs. Running ones are never deleted, and neither is "
        "anything that is not a run. Without states, it deletes all that have ended; without options, it shows them.",
        "  distrain clean --older-than 30d --dry-run\n  distrain clean --failed --stopped --older-than 7d\n"
        "  distrain clean ~/runs --killed --yes",
    )
    parsers.add_storage(parser)
    add = parser.add_argument
    add("--older-than", metavar="AGE", type=_seconds, help="only those that ended so long ago: 12h, 7d, 4w")
    for state in (FAILED, FINISHED, STOPPED, KILLED):
        add(f"--{state}", dest="states", action="append_const", const=state, help=f"only those that are {state}")
    add("--dry-run", action="store_true", help="show what would be deleted; delete nothing")
    add("--yes", action="store_true", help="do not ask")
    return parser


def _seconds(text: str) -> float:
    import argparse

    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"must be an age such as 12h, 7d or 4w, got {text!r}")
    return float(number) * _UNITS[unit]


def run_clean(options: argparse.Namespace) -> int:
    """Delete runs, and what killed ones have left in the memory of this host."""
    from distrain.errors import StorageError
    from distrain.system import scratch

    is_chosen = options.older_than is not None or bool(options.states)
    if is_chosen and not options.dry_run:
        scratch.remove_abandoned()
    storage, now = parsers.storage_of(options), time.time()
    before, states = now - (options.older_than or 0), options.states or ENDED
    listed = list_runs(storage, may_be_missing=options.path is None)
    chosen = [run for run in listed if run.state in states and run.ended <= before and run.path != str(storage)]
    if not chosen:
        print(f"nothing to delete in {storage}")
        return 0
    sizes = {run.path: run.bytes() for run in chosen}
    rows = [[run.name, run.state, age(now - run.ended), size(sizes[run.path])] for run in chosen]
    echo("\n".join(table(rows, right=(2, 3))))
    total = f"{count(len(chosen), 'run')}, {size(sum(sizes.values()))}"
    if options.dry_run:
        print(f"{total} would be deleted")
        return 0
    if not is_chosen:
        which = "--older-than 30d, --failed, --finished, --stopped or --killed"
        raise StorageError(f"{total}, have ended. Nothing was deleted; name what to delete: {which}")
    if not options.yes and not _agrees(f"delete {total}, with all checkpoints? [y/N] "):
        print("nothing was deleted")
        return 1
    return _delete(chosen, sizes, before)


def _delete(runs: Sequence[Run], sizes: dict[str, int], before: float) -> int:
    from distrain.errors import StorageError
    from distrain.storage.runs.deletion import delete_run

    deleted = []
    for run in runs:
        try:
            delete_run(run, before)
            deleted.append(sizes[run.path])
        except (StorageError, OSError) as error:
            echo(f"distrain clean: {run.name} was not deleted: {error}", sys.stderr)
    print(f"deleted {count(len(deleted), 'run')}, {size(sum(deleted))}")
    return 0 if len(deleted) == len(runs) else 1


def _agrees(question: str) -> bool:
    from distrain.errors import StorageError

    if not sys.stdin.isatty():
        raise StorageError("cannot ask without a terminal: add --yes, or --dry-run to only look")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
