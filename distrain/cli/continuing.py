"""``distrain resume``, ``note`` and ``clean``: what users do with runs that have ended. Runs in: coordinator."""

from __future__ import annotations

import os
import shlex
import sys
import time
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.run.options import make_parser
from distrain.cli.text import age, echo, table
from distrain.errors import StorageError
from distrain.storage.runs.details import command_of
from distrain.storage.runs.listing import ENDED, FINISHED, Run, WrongArgument, list_runs, storage_at
from distrain.storage.runs.notes import Notes, write_notes
from distrain.storage.secrets import HIDDEN
from distrain.system.text import count, size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def run_resume(options: argparse.Namespace) -> int:
    """Replace this process by the run."""
    run = parsers.run_of(options)
    command, folder = command_of(run), str(run.manifest.get("directory"))
    again = f"Start it again as before, in {folder}: {command}"
    if run.is_active or run.state == FINISHED:
        raise WrongArgument(
            f"{run.name} is {run.state}; only a run that has failed, or was stopped or killed, is resumed"
        )
    if not command.startswith("distrain run ") or "--as-ray" in command:
        name = f"It continues if it has the name {run.name} again: RunConfig(name=...), or --name"
        raise WrongArgument(f"{run.name} was not started by `distrain run`, or its script calls fit(). {again}\n{name}")
    if HIDDEN in command:
        raise WrongArgument(f"the command had a secret, which was not stored. {again}")
    if not os.path.isdir(folder):
        raise WrongArgument(f"the directory in which {run.name} was started is not on this machine: {folder}")
    words = ["run", f"--name={run.name}", f"--storage-path={run.location.parent}", *shlex.split(command)[2:]]
    os.chdir(folder)
    given = make_parser().parse_known_args(words[1:])[0]  # the stored options come last
    if os.path.realpath(f"{storage_at(given.storage_path)}/{given.name}") != os.path.realpath(run.path):
        raise WrongArgument(f"{run.path} has been moved since it was started. {again}")
    echo(f"in {folder}: {shlex.join(['distrain', *words])}", sys.stderr)
    os.execv(sys.executable, [sys.executable, "-m", "distrain", *words])  # noqa: S606 - no shell


def add_note_options(add: parsers.Add) -> None:
    """Add the options of ``distrain note``."""
    add("text", nargs="?", metavar="TEXT", help="the note, in place of an earlier one")
    add("--tag", action="append", default=[], metavar="TAG", help="add a tag")
    add("--untag", action="append", default=[], metavar="TAG", help="remove a tag")


def run_note(options: argparse.Namespace) -> int:
    """Change the note and the tags of a run, and print them."""
    run = parsers.run_of(options)
    text = run.notes.text if options.text is None else options.text
    tags = [tag for tag in dict.fromkeys([*run.notes.tags, *options.tag]) if tag not in options.untag]
    notes = Notes(text, tuple(tags))
    if notes != run.notes:
        try:
            write_notes(run.location, notes)
        except OSError as error:
            raise WrongArgument(f"the note cannot be written into {run.path}: {error.strerror or error}") from None
    echo(f"{run.name}: {notes}")
    return 0


# -- clean -----------------------------------------------------------------------------------------------------------


def add_clean_options(add: parsers.Add) -> None:
    """Add the options of ``distrain clean``."""
    add("--older-than", metavar="AGE", type=parsers.seconds, help="only those that ended so long ago: 12h, 7d, 4w")
    for state in ENDED:
        add(f"--{state}", dest="states", action="append_const", const=state, help=f"only {state} runs")
    add("--yes", action="store_true", help="delete them; without it, they are only shown")


def run_clean(options: argparse.Namespace) -> int:
    """Delete runs, and what killed ones have left in the memory of this host."""
    from distrain.system import scratch

    is_chosen = options.older_than is not None or bool(options.states)
    if is_chosen and options.yes:
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
    if not is_chosen:
        which = "--older-than 30d, --failed, --finished, --stopped or --killed"
        raise StorageError(f"{total}, have ended. Nothing was deleted; name what to delete: {which}")
    if not options.yes:
        print(f"{total}; nothing was deleted without --yes")
        return 0
    return _delete(chosen, sizes, before)


def _delete(runs: Sequence[Run], sizes: dict[str, int], before: float) -> int:
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
