"""Write the page of a run, once or for as long as it trains. Runs in: anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.errors import StorageError
from distrain.page import sections
from distrain.page.clock import Clock
from distrain.page.contents import read_facts
from distrain.page.drawings import Span
from distrain.page.markup import Html, el, join, moment
from distrain.page.reports import last_report_time, read_reports
from distrain.page.time_use import AttemptTimes, where_time_went
from distrain.page.verdict import STATES, UNKNOWN, verdict
from distrain.storage.files import write_atomically
from distrain.storage.paths import RunPaths
from distrain.storage.runs.listing import KILLED, RUNNING
from distrain.system.log import warn
from distrain.system.remote_path import RemotePath, locate
from distrain.system.version import __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from distrain.page.contents import RunFacts
    from distrain.page.reports import Reports
    from distrain.page.time_use import Part

_NAMES = RunPaths(Path())
_PAUSE_FACTOR = 4
"""While a run is watched, this many times as long is paused as a page takes."""
_SECONDS_PER_BYTE = 30e-9
"""How long it takes to read metrics.jsonl, measured with 1,000,000 reports on a slow machine."""
_FREE_S, _SHARE_OF_RUN, _MOST_S = 0.03, 0.02, 5.0


def write_page(
    run: str | os.PathLike[str] | RemotePath, output: str | os.PathLike[str] | None = None, *, refresh_s: float = 0
) -> Path:
    """Write the page of a run, finished or not, and return its path. It is one HTML file that needs no network.

    run: the run directory, a path or URL. output: ``page.html`` in the run directory by default. A run on remote
    storage needs it. refresh_s: while the run trains, browsers reload the page after so many seconds; 0 is never.

    Raises StorageError if there is no run, or the page cannot be written.

    ::

        path = distrain.page.write_page(result.path)
    """
    return _write(run, output, refresh_s)[0]


def watch_page(
    run: str | os.PathLike[str] | RemotePath, output: str | os.PathLike[str] | None = None, *, every_s: float = 5.0
) -> Path:
    """Write the page of a run again and again until it has ended. Return its path.

    every_s: seconds between two pages, or more if a page takes long. Raises as :func:`write_page`.

    ::

        distrain.page.watch_page(result.path)
    """
    while True:
        began = time.monotonic()
        path, is_live = _write(run, output, every_s)
        if not is_live:
            return path
        time.sleep(max(every_s, _PAUSE_FACTOR * (time.monotonic() - began)))


def write_page_at_end(root: Path | RemotePath, seconds: float) -> None:
    """Write the page of a run that has just ended, unless that would take long. Never raises.

    seconds: how long the run took. A page may take 2 percent of it, and at most 5 s. Remote runs get none.
    """
    if isinstance(root, RemotePath):
        return
    metrics = root / _NAMES.metrics.name
    try:
        size = metrics.stat().st_size if metrics.exists() else 0
        if size * _SECONDS_PER_BYTE <= min(_MOST_S, _FREE_S + _SHARE_OF_RUN * seconds):
            write_page(root)
    except Exception as error:
        warn(f"the page of the run could not be written: {error!r}")


def _write(
    run: str | os.PathLike[str] | RemotePath, output: str | os.PathLike[str] | None, refresh_s: float
) -> tuple[Path, bool]:
    """Write the page. Return its path, and whether the run is still training."""
    try:
        root = run if isinstance(run, RemotePath) else locate(run)
        if output is None and isinstance(root, RemotePath):
            raise StorageError(f"{root} is on remote storage: name the file for its page (output=, -o)")
        path = root / _NAMES.page.name if output is None else Path(output).expanduser()
        assert isinstance(path, Path)
        facts = read_facts(root)
        page = _page(root, facts, refresh_s if facts.is_live else 0)
        write_atomically(path, page.encode("utf-8", "replace"), sync=False)
    except OSError as error:
        raise StorageError(f"cannot write the page of {run}: {error}") from error
    return path, facts.is_live


# -- the page --------------------------------------------------------------------------------------------------------


def _page(root: Path | RemotePath, facts: RunFacts, refresh_s: float) -> str:
    metrics = root / _NAMES.metrics.name
    spans = _spans(facts, metrics)
    clock = Clock((span.attempt.started, span.until) for span in spans)
    reports = read_reports(metrics, facts.attempts, clock, facts.notes)
    seconds, parts = _times(facts, spans, reports)
    progress = reports.progress or _last_step(reports)
    sentence = verdict(facts, seconds=seconds, progress=progress)
    curves, plots = sections.curves(facts, reports)
    found = [
        sections.failure(facts),
        sections.time_use(parts),
        sections.attempts(facts, spans, clock),
        curves,
        sections.pace(reports),
        sections.checkpoints(facts),
        sections.settings(facts),
    ]
    body = join(_body(facts, sentence, [section for section in found if section is not None]))
    return _document(facts.name, body, plots, refresh_s)


def _last_step(reports: Reports) -> tuple[float, float | None] | None:
    last = max((there.last_step for there in reports.attempts.values()), default=0)
    return (float(last), None) if last else None


def _spans(facts: RunFacts, metrics: Path | RemotePath) -> list[Span]:
    """Return the attempts with their ends. An end that nobody recorded is the last report before it, or the start."""
    spans = []
    for n, attempt in enumerate(facts.attempts):
        is_last = n == len(facts.attempts) - 1
        until = attempt.ended
        is_running = until is None and is_last and facts.is_live
        if is_running:
            until = facts.made
        elif until is None:
            known = [attempt.started, attempt.training, last_report_time(metrics, attempt.number)]
            until = max([time for time in known if time is not None])
            if is_last and facts.updated is not None and facts.state not in (RUNNING, KILLED):
                until = max(until, facts.updated)
        spans.append(Span(attempt, max(until, attempt.started), is_running))
    return spans


def _times(facts: RunFacts, spans: Sequence[Span], reports: Reports) -> tuple[float | None, list[Part] | None]:
    """Return the seconds of the run and their parts, as far as they are known."""
    starts = [one for one in (facts.started, *(span.attempt.started for span in spans)) if one is not None]
    if not starts:
        return None, None
    started, ended = min(starts), max([*(span.until for span in spans), *starts])
    if facts.is_live:
        ended = facts.made
    elif facts.state != KILLED and facts.updated is not None:
        ended = max(ended, facts.updated)
    if not spans or any(span.attempt.first_step is None for span in spans):
        return ended - started, None  # a run of an early version
    times = [_attempt_times(span, spans[n + 1 :], reports) for n, span in enumerate(spans)]
    hangs = [(hang.since, hang.until) for hang in facts.hangs]
    return ended - started, where_time_went(times, started=started, ended=ended, hangs=hangs)


def _attempt_times(span: Span, later: Sequence[Span], reports: Reports) -> AttemptTimes:
    attempt, there = span.attempt, reports.attempts.get(span.attempt.number)
    kept_until = None
    if any(other.attempt.training is not None for other in later):
        kept_until = there.kept_until if there is not None and there.kept_until is not None else attempt.training
    waits = there.waits.values() if there is not None else ()
    data, checkpoint = max(waits, key=sum, default=[0.0, 0.0])
    return AttemptTimes(
        started=attempt.started,
        training=attempt.training,
        ended=span.until,
        kept_until=kept_until,
        data=data,
        checkpoint=checkpoint,
    )


def _body(facts: RunFacts, sentence: str, shown: Sequence[sections.Section]) -> list[Html]:
    word, look = STATES.get(facts.state, UNKNOWN)
    lead = el("p", el("strong", word, class_=f"state {look}"), " ", sentence, class_="verdict")
    where = el("p", facts.location, class_="location")
    header = el("header", el("p", "A run of distrain", class_="kind"), el("h1", facts.name), lead, where)
    links = (el("li", el("a", section.heading, href=f"#{section.name}")) for section in shown)
    nav = el("nav", el("ul", *links), aria_label="Sections of this page")
    notes = [el("p", "Note: ", note, class_="note warning") for note in facts.notes[:20]]
    main = el("main", *notes, *(section.html() for section in shown))
    made = el("p", "Written ", moment(facts.made), f" by distrain {__version__}. Times are in UTC. ")
    plotting = el("p", "The curves are drawn by uPlot (MIT licence, in the source of this page).")
    return [header, nav, main, el("footer", made, plotting)]


def _document(title: str, body: Html, plots: list[dict[str, Any]], refresh_s: float) -> str:
    own, library = files("distrain.page"), files("distrain.page") / "uplot"
    styles = [(library / "uPlot.min.css").read_text(), (own / "page.css").read_text()]
    scripts = [(library / "uPlot.iife.min.js").read_text(), (own / "page.js").read_text()] if plots else []
    licence = (library / "LICENSE").read_text()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {' '.join(map(_hash, styles))}",
            f"script-src {' '.join(map(_hash, scripts)) or chr(39) + 'none' + chr(39)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    head = [
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        el("meta", http_equiv="refresh", content=f"{refresh_s:g}") if refresh_s else None,
        el("title", f"{title} - distrain"),
        *(el("style", Html(style)) for style in styles),
    ]
    data = json.dumps(plots, separators=(",", ":")).replace("<", "\\u003c")
    tail = [
        Html(f"<!-- uPlot:\n{licence}-->") if scripts else None,
        el("script", Html(data), type="application/json", id="plots"),
        *(el("script", Html(script)) for script in scripts),
    ]
    page = el("html", el("head", *head), el("body", body, *tail), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _hash(text: str) -> str:
    """Return the source of a Content-Security-Policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
