"""``distrain report`` and ``distrain page``: a run in one file, to send or to look at. Runs in: coordinator."""

from __future__ import annotations

import io
import os
import platform
import tarfile
import time
import warnings
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.showing import run_in_words
from distrain.cli.text import echo
from distrain.errors import DistrainError
from distrain.storage import names
from distrain.storage.files import write_output
from distrain.storage.lines import last_lines, read_file, read_with
from distrain.storage.runs.details import evidence_of
from distrain.storage.runs.logs import attempts_with_logs, log_files, read_lines
from distrain.system import __version__
from distrain.system.secrets import HIDDEN, hidden, secret_variables
from distrain.system.text import size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from distrain.storage.runs.listing import Run
    from distrain.system.remote_path import RemotePath

_MOST_BYTES = 20_000_000
"""Bytes of all files together, before they are compressed."""
_LINES, _LOG_LINES, _LOG_ATTEMPTS = 2000, 200, 3
"""The last lines of files that grow with the run and of each log, and the last attempts whose logs are packed."""
_FILES = (names.MANIFEST, names.ERROR_TEXT, names.EVENTS, names.METRICS)
_ADVICE = (
    "Look through it before you send it. What looks like a secret is masked (***), but no program finds all secrets. "
    "It has paths, host names, settings, and the last lines that the ranks have printed."
)


def report_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain report``."""
    parser = parsers.make_run_parser("report")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file (default: distrain-report-NAME.tar.gz)")
    return parser


def run_report(options: argparse.Namespace) -> int:
    """Write the archive, and show what is in it."""
    warnings.simplefilter("ignore")  # what is damaged
    run = parsers.run_of(options)
    path = Path(options.output or f"distrain-report-{run.name}.tar.gz").expanduser()
    packed, left_out = _packed(run)
    lines = [*(f"{size(len(body)):>8}  {name}" for name, body in packed.items()), *left_out]
    readme = "\n".join([f"A report about {run.name}, by `distrain report`.", _ADVICE, "", *lines, ""])
    packing = io.BytesIO()
    with tarfile.open(fileobj=packing, mode="w:gz") as archive:
        for name, body in {"README.txt": readme.encode(errors="replace"), **packed}.items():
            member = tarfile.TarInfo(f"distrain-report-{run.name}/{name}")
            member.size, member.mtime = len(body), int(time.time())
            archive.addfile(member, io.BytesIO(body))
    write_output(path, packing.getvalue())
    echo("\n".join([f"wrote {path} ({size(packing.tell())}), with", *lines, _ADVICE]))
    return 0


def _packed(run: Run) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of the archive without secrets, and why others were left out."""
    packed: dict[str, bytes] = {}
    left_out: list[str] = []
    room, known = _MOST_BYTES, secret_variables()
    for name, read in _parts(run):
        try:
            text = read()
        except FileNotFoundError:
            continue
        except Exception as error:  # whatever is damaged: the rest helps, too
            left_out.append(f"left out: {name}: {error}")
            continue
        if len(text) > room:
            left_out.append(f"left out: {name}: too large ({size(len(text))}); it is in {run.path}")
            continue
        for secret in known:
            text = text.replace(secret, HIDDEN)
        packed[name] = hidden(text).encode(errors="replace")
        room -= len(packed[name])
    return packed, left_out


def _parts(run: Run) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each file of the archive, and a function that reads it."""
    yield "show.txt", lambda: run_in_words(run, 120)
    yield "versions.txt", _versions
    evidence = [f"{names.EVIDENCE}/{name}" for name in evidence_of(run.location)]
    for name in (*_FILES, *evidence):
        yield name, partial(_text_of, run, name)
    for attempt in attempts_with_logs(run)[-_LOG_ATTEMPTS:]:
        for log in log_files(run, attempt).values():
            yield f"{names.LOGS}/attempt_{attempt}/{log.name}", partial(_end_of_log, run, log)


def _text_of(run: Run, name: str) -> str:
    if name.endswith((".pickle", ".gz")):
        raise DistrainError("secrets in it can't be masked; check it before you send it")
    if name.endswith(".jsonl"):
        data = b"".join(read_with(run.location / name, partial(last_lines, most=_LINES)))
    else:
        data = read_file(run.location / name, run.path, most=_MOST_BYTES)
    return data.decode(errors="replace")


def _end_of_log(run: Run, log: Path | RemotePath) -> str:
    return "\n".join(read_lines(log, _LOG_LINES, run))


def _versions() -> str:
    """Return what runs this command: versions, the platform, and the names of environment variables."""
    packages = sorted(f"{package.name} {package.version}" for package in distributions())
    variables = " ".join(sorted(os.environ))
    python = f"distrain {__version__}, python {platform.python_version()} on {platform.platform()}"
    return f"{python}\n\npackages: {', '.join(packages)}\n\nenvironment variables (names only): {variables}\n"


# -- the page --------------------------------------------------------------------------------------------------------


def page_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain page``."""
    parser = parsers.make_run_parser("page")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file (default: page.html in the run directory)")
    return parser


def run_page(options: argparse.Namespace) -> int:
    """Write the page of a run."""
    from distrain.page import write_page

    echo(f"wrote {write_page(parsers.run_of(options).location, options.output)}")
    return 0
