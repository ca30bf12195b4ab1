"""The sections of the page. Pure: facts in, HTML out. Runs in: anywhere."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.page.contents import items, mapping, number, text, whole
from distrain.page.drawings import heat_map, time_bar, timeline
from distrain.page.markup import Html, clip, el, figure, join, moment, plain, table
from distrain.page.pace import LEVELS, rows, slow_ranks
from distrain.page.reports import KEPT, MOST_METRICS, MOST_REPEATED
from distrain.page.time_use import goodput
from distrain.page.verdict import failed_at
from distrain.storage.retention import flatten
from distrain.storage.runs.listing import FINISHED
from distrain.system.naming import rank_list
from distrain.system.text import count, duration, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distrain.page.clock import Clock
    from distrain.page.contents import RunFacts, SavedCheckpoint
    from distrain.page.drawings import Span
    from distrain.page.envelope import Envelope
    from distrain.page.reports import Reports
    from distrain.page.time_use import Part

_POINTS = 30_000
"""Points of all curves together, which bounds the size of the page."""
_MOST_POINTS = 1_500
"""Points of one curve."""
_MOST_FAILURES = 10
_MOST_LINES = 40
_MOST_ROWS = 100
_MOST_SETTINGS = 300
_NEWEST = 12
"""Checkpoints that are shown at once. The others are folded."""
_SLOWEST = 10
_SLOW = 1.25
"""A rank whose intervals are longer by this factor, on average, is called slow."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section: its id, its heading and what is below it."""

    name: str
    heading: str
    content: Html

    def html(self) -> Html:
        """Return the section as a landmark."""
        heading = el("h2", self.heading, id=f"{self.name}-heading")
        return el("section", heading, self.content, id=self.name, aria_labelledby=f"{self.name}-heading")


def _how(*paragraphs: object) -> Html:
    return el("details", el("summary", "How this is computed"), *(el("p", text) for text in paragraphs), class_="how")


def _note(content: str) -> Html:
    return el("p", content, class_="note")


# -- the failure -----------------------------------------------------------------------------------------------------


def failure(facts: RunFacts) -> Section | None:
    """Return what is known about a failure: each failed rank, and where the others were."""
    error = facts.error
    failures = [mapping(one) for one in items(error.get("failures"))]
    parts = [_failed_rank(one) for one in failures[:_MOST_FAILURES]]
    if len(failures) > _MOST_FAILURES:
        parts.append(_note(f"{count(len(failures) - _MOST_FAILURES, 'further failure')} are in error.json."))
    if message := text(error.get("message")):
        whole_text = el("pre", plain(message), tabindex="0")
        parts.append(el("details", el("summary", "The whole message"), whole_text) if failures else whole_text)
    if facts.log_tail:
        parts += [el("h3", "The last output of rank 0"), _lines(facts.log_tail)]
    if not facts.stacks and (where := [line for line in map(text, items(error.get("where"))) if line]):
        parts += [el("h3", "Where the other ranks were"), _lines(where)]
    if facts.stacks:
        stopped = [(str(attempt), "\n".join(lines)) for attempt, lines in sorted(facts.stacks.items(), reverse=True)]
        heading = "Where the ranks were that had to be stopped"
        parts += [el("h3", heading), table(heading, ("attempt", "ranks"), stopped[:_MOST_ROWS], texts=[1])]
    title = "Failure" if error else "Ranks that were stopped" if not facts.log_tail else "The end"
    return Section("failure", title, join(parts)) if parts else None


def _failed_rank(one: Mapping[str, Any]) -> Html:
    rank, host, where = whole(one.get("rank")), text(one.get("host")), failed_at(one)
    role = {"culprit": " (failed first)", "victim": " (because of another rank)"}.get(str(one.get("role")), "")
    head = el("h3", f"Rank {'?' if rank is None else rank}", f" on {clip(host, 80)}" if host else "", role)
    why = el("p", text(one.get("summary")) or "No reason is known.", f" ({where})" if where else "")
    parts = [head, why]
    if traceback := text(one.get("traceback")):
        parts += [el("h4", "Traceback"), _lines(traceback.splitlines())]
    if last := [line for line in items(one.get("last_lines")) if isinstance(line, str)]:
        parts += [el("h4", "Last lines of its output"), _lines(last)]
    return join(parts)


def _lines(lines: Sequence[object]) -> Html:
    left_out = len(lines) - _MOST_LINES
    first = f"... {left_out:,} lines before\n" if left_out > 0 else ""
    shown = "\n".join(plain(str(line))[:2000] for line in lines[-_MOST_LINES:])
    return el("pre", first, shown, tabindex="0")


# -- the time --------------------------------------------------------------------------------------------------------


def time_use(parts: Sequence[Part] | None) -> Section:
    """Return the bar of where the time went. ``parts``: None if the run does not say."""
    heading = "Where the time went"
    total = sum(part.seconds for part in parts or ())
    if not parts or total <= 0:
        return Section("time", heading, _note("The files of this run do not say when its attempts trained."))
    shown = [part for part in parts if part.seconds >= 0.0005 * total or part.kind == "training"]
    lead = el("p", el("strong", f"Goodput {goodput(parts) or 0:.0%}"), f" of {duration(total)}.", class_="lead")
    lines = [
        (
            join([el("span", class_=f"key part-{part.kind}", aria_hidden="true"), part.label]),
            duration(part.seconds),
            f"{part.seconds / total:.1%}",
            part.meaning,
        )
        for part in shown
    ]
    how = _how(
        "Goodput is the part of the wall time in which the run trained and made progress that lasted. The parts add up "
        "to the wall time: from the beginning of the run to its end, or until now if it is still running. If the run "
        "was continued, the time between counts, too.",
        "The beginnings and ends of attempts are in run.json. A moment counts once: as hung, else as repeated, else as "
        "a wait. Repeated work begins after the last report of rank 0 that the next attempts did not repeat. The waits "
        "are those of the rank that waited most in its attempt, as ranks that train together wait for it. If several "
        "ranks wait in turn, more time is lost than is shown here; it then counts as training.",
    )
    numbers = table(heading, ("part", "time", "share", "meaning"), lines, numbers=(1, 2), texts=[3])
    return Section("time", heading, join([lead, time_bar(parts), numbers, how]))


def attempts(facts: RunFacts, spans: Sequence[Span], clock: Clock) -> Section | None:
    """Return the timeline and the table of the attempts."""
    if not spans:
        return None
    start = spans[0].attempt.started
    lines = []
    for span in spans[-_MOST_ROWS:]:
        one = span.attempt
        hosts = ", ".join(f"{clip(host, 40)} ({rank_list(ranks)})" for host, ranks in list(one.hosts.items())[:8])
        more = f" and {len(one.hosts) - 8:,} more" if len(one.hosts) > 8 else ""
        how = one.failure or ("running" if span.is_running else "finished" if facts.state == FINISHED else "ended")
        begin = one.checkpoint or ("unknown" if one.first_step is None else "scratch")
        begin += f" (step {one.first_step:,})" if one.first_step else ""
        lines.append(
            (
                str(one.number),
                f"+{duration(one.started - start)}",
                duration(span.until - one.started),
                clip(begin, 80),
                clip(how, 300),
                hosts + more,
            )
        )
    drawn = timeline(spans, facts.checkpoints, facts.hangs, clock.position)
    pauses = [_note(f"A pause of {duration(end - begin)} is drawn shorter.") for begin, end in clock.pauses[:5]]
    keys = _keys(
        ("lane-starting", "starting"),
        ("lane-training", "training"),
        ("key-checkpoint", "checkpoint"),
        ("key-failure", "failure"),
        *([("lane-hung", "hung")] if facts.hangs else []),
    )
    head = ("attempt", "began", "lasted", "from", "ended", "hosts (ranks)")
    shown = table("The attempts", head, lines, numbers=(1, 2), texts=(4, 5))
    left_out = len(spans) - _MOST_ROWS
    if left_out > 0:
        shown = join([shown, _note(f"The table has the last {_MOST_ROWS} of {len(spans):,} attempts.")])
    box = el("div", drawn, _axis(duration(0), duration(spans[-1].until - start)), class_="lanes")
    return Section("attempts", "Attempts on each host", join([keys, box, *pauses, shown]))


def _axis(first: str, last: str) -> Html:
    return el("p", el("span", first), el("span", "time"), el("span", last), class_="time-axis", aria_hidden="true")


def _keys(*keys: tuple[str, str]) -> Html:
    entries = (el("li", el("span", class_=f"key {kind}", aria_hidden="true"), label) for kind, label in keys)
    return el("ul", *entries, class_="keys")


# -- the curves ------------------------------------------------------------------------------------------------------


def curves(facts: RunFacts, reports: Reports) -> tuple[Section, list[dict[str, Any]]]:
    """Return the section of the metrics, and the data of its plots for the script."""
    heading = "Metrics of rank 0"
    if not reports.curves:
        why = "Rank 0 reported no numbers." if reports.reports else "There are no reports."
        return Section("metrics", heading, _note(why)), []
    parts = sum(len(curve) for curve in reports.curves.values())
    most = max(16, min(_MOST_POINTS, _POINTS // parts))
    figures, plots = [], []
    for n, (name, curve) in enumerate(reports.curves.items()):
        figures.append(_figure(n, name, curve))
        plots.append(_plot(name, curve, most))
    notes = [el("noscript", _note("Your browser runs no scripts. The curves need them; the texts below do not."))]
    if any(len(curve) > 1 for curve in reports.curves.values()):
        notes.append(_note("Dashed lines mark steps at which a later attempt began. Work that it repeated is lighter."))
    if reports.more_metrics:
        more = count(len(reports.more_metrics), "further metric")
        notes.append(_note(f"Only {MOST_METRICS} metrics are drawn. metrics.jsonl has {more}."))
    starts = sorted({one.first_step for one in facts.attempts[1:] if one.first_step})
    data = [{**plot, "starts": starts[-50:]} for plot in plots]
    how = _how(
        "The step of a report is the number of reports that rank 0 had made until then over the whole run. A report "
        "that was repeated after a restart has the same step as before.",
        "Of neighbouring points, the lowest and the highest are drawn, so that no peak is lost. Values have six "
        "digits. Red marks at the edge stand for values that are not numbers (bottom), or infinite (top or bottom). Of "
        f"the repeated parts, those of the first {MOST_REPEATED} attempts are drawn.",
    )
    return Section("metrics", heading, join([*notes, el("div", *figures, class_="plots"), how])), data


def _figure(n: int, name: str, curve: Mapping[int, Envelope]) -> Html:
    kept = curve.get(KEPT) or next(iter(curve.values()))
    summary = _summary(kept)
    low = kept.lowest
    button = None
    if low is not None and low[1] > 0 and kept.highest != low:
        button = el("button", "log scale", type="button", aria_pressed="false", data_log=n)
    shown = clip(name, 120)
    head = el("div", el("h3", shown, id=f"plot-{n}"), button, class_="plot-head")
    place = el("div", class_="plot", id=f"canvas-{n}", role="img", aria_label=f"Curve of {shown}. {summary}")
    return el("figure", head, place, el("figcaption", summary), aria_labelledby=f"plot-{n}")


def _summary(curve: Envelope) -> str:
    parts = [count(curve.count, "value")]
    if curve.first and curve.last and curve.lowest and curve.highest:
        parts.append(f"first {figure(curve.first[1])}, last {figure(curve.last[1])}")
        parts.append(f"lowest {figure(curve.lowest[1])} at step {curve.lowest[0]:,}")
        parts.append(f"highest {figure(curve.highest[1])} at step {curve.highest[0]:,}")
    if curve.nonfinite:
        mark = curve.marks[0]
        parts.append(f"{curve.nonfinite:,} not finite, the first ({mark.value}) at step {mark.step:,}")
    return "; ".join(parts) + "."


def _plot(name: str, curve: Mapping[int, Envelope], most: int) -> dict[str, Any]:
    """Return the data of a plot: its parts as steps and values, the one that counts last."""
    parts = []
    for part in sorted(curve, reverse=True):
        envelope = curve[part]
        points: dict[int, float | None] = {step: float(f"{value:.6g}") for step, value in envelope.points(most)}
        gaps = {mark.step: None for mark in envelope.marks if envelope.count <= most}
        ordered = sorted((points | gaps).items())
        parts.append({"kept": part == KEPT, "x": [x for x, _ in ordered], "y": [y for _, y in ordered]})
    marks = [[mark.step, mark.value] for mark in curve[KEPT].marks] if KEPT in curve else []
    return {"name": clip(name, 60), "parts": parts, "marks": marks}


# -- the ranks -------------------------------------------------------------------------------------------------------


def pace(reports: Reports) -> Section | None:
    """Return the heat map of report intervals, and the slowest ranks."""
    heading = "Pace of the ranks"
    if reports.pace.ranks < 2:
        return None
    ratios = reports.pace.ratios()
    slowest = slow_ranks(ratios)
    if not slowest:
        return Section("pace", heading, _note("The ranks have made too few reports to compare them."))
    slow = [rank for rank in slowest if rank.ratio >= _SLOW]
    drawn = rows(ratios)
    if slow:
        names = ", ".join(f"rank {rank.rank} ({rank.ratio:.2g} times)" for rank in slow[:5])
        more = f" and {len(slow) - 5:,} more" if len(slow) > 5 else ""
        verdict = f"Slower than the median of the ranks, on average: {names}{more}."
    else:
        verdict = f"No rank is much slower than the others; the slowest is rank {slowest[0].rank}"
        verdict += f", with {slowest[0].ratio:.2f} times the usual interval on average."
    bounds = (f"under {LEVELS[0]:g}", "usual", *(f"{bound:g} times or more" for bound in LEVELS[1:]))
    keys = _keys(*((f"heat-{n}", label) for n, label in enumerate(bounds)), ("heat-none", "no report"))
    label = f"Report intervals of {count(len(ratios), 'rank')} over time. {verdict}"
    lines = [
        (str(one.rank), f"{one.ratio:.2f}", f"{one.worst:.2f}", *_waits(reports, one.rank))
        for one in slowest[:_SLOWEST]
    ]
    head = ("rank", "mean interval", "longest", "waited for data", "blocked by checkpoints")
    together = drawn[0].ranks[1] - drawn[0].ranks[0] + 1
    grouped = _note(f"A row stands for {together} ranks, and shows the slowest of them.") if together > 1 else None
    how = _how(
        "The run is cut into 96 slots, on the same time axis as the attempts above. A cell is the mean time between "
        "two reports of a rank in its slot, divided by the median of all ranks in that slot.",
        "Ranks that wait for each other in every step, as with DistributedDataParallel, report at the pace of the "
        "slowest. Then no row stands out. Compare how long ranks waited for data, or py-spy.",
    )
    box = el("div", heat_map(drawn, label=label), _axis("beginning", "end"), class_="lanes")
    numbers = table("The slowest ranks (1 is the median)", head, lines, numbers=range(5))
    return Section("pace", heading, join([el("p", verdict, class_="lead"), keys, box, grouped, numbers, how]))


def _waits(reports: Reports, rank: int) -> tuple[str, str]:
    sums = [there.waits.get(rank, [0.0, 0.0]) for there in reports.attempts.values()]
    data, checkpoint = sum(each[0] for each in sums), sum(each[1] for each in sums)
    return duration(data) if data else "-", duration(checkpoint) if checkpoint else "-"


# -- checkpoints and settings ----------------------------------------------------------------------------------------


def checkpoints(facts: RunFacts) -> Section:
    """Return the table of the checkpoints."""
    heading = "Checkpoints"
    if not facts.checkpoints:
        return Section("checkpoints", heading, _note("There are none."))
    used: dict[str, list[int]] = {}
    for attempt in facts.attempts:
        if attempt.checkpoint is not None:
            used.setdefault(attempt.checkpoint, []).append(attempt.number)
    kept = sum(saved.kept for saved in facts.checkpoints)
    newest = facts.checkpoints[-_MOST_ROWS:]
    older = [saved for saved in facts.checkpoints[:-_MOST_ROWS] if saved.kept or saved.name in used]
    chosen = [*older[-_MOST_ROWS:], *newest]
    total = len(facts.checkpoints)
    notes = [el("p", f"{count(total, 'checkpoint')}, {kept:,} of them in the run directory.")]
    if len(chosen) < total:
        notes.append(_note(f"The table has {len(chosen)} of them: the newest, and older ones that were kept or used."))
    if not facts.has_events:
        notes.append(_note("This run has no events.jsonl, so deleted checkpoints are not listed."))
    lines = [_checkpoint(saved, used.get(saved.name, []), facts.started) for saved in reversed(chosen)]
    head = ("checkpoint", "step", "after", "size", "took", "state", "metrics")
    tables = [
        table(heading, head, part, numbers=(1, 2, 3, 4), texts=[6])
        for part in (lines[:_NEWEST], lines[_NEWEST:])
        if part
    ]
    older_ones = [el("details", el("summary", "Older checkpoints"), *tables[1:])] if tables[1:] else []
    return Section("checkpoints", heading, join([*notes, tables[0], *older_ones]))


def _checkpoint(saved: SavedCheckpoint, used: list[int], started: float | None) -> tuple[object, ...]:
    state = "kept" if saved.kept else "deleted"
    if used:
        state += f"; attempt{'s' if len(used) > 1 else ''} {rank_list(used)} began from it"
    flat = {name: value for name, value in flatten(saved.metrics).items() if number(value) is not None}
    metrics = ", ".join(f"{name}={figure(value)}" for name, value in list(flat.items())[:4])
    return (
        clip(saved.name, 80),
        "?" if saved.step is None else f"{saved.step:,}",
        "?" if saved.time is None or started is None else duration(saved.time - started),
        "?" if saved.bytes is None else size(saved.bytes),
        "?" if saved.seconds is None else duration(saved.seconds),
        state,
        clip(metrics, 160) or "-",
    )


_SHOWN_ELSEWHERE = {"attempts", "status", "name", "agents"}


def settings(facts: RunFacts) -> Section | None:
    """Return everything else in run.json: the configs, versions, the command."""
    manifest = dict(facts.manifest)
    if not manifest:
        return None
    for field in ("started", "updated"):
        if (at := number(manifest.get(field))) is not None:
            manifest[field] = moment(at)
    if isinstance(argv := manifest.pop("argv", None), list):
        manifest["command"] = shlex.join(map(str, argv))
    simple = {n: v for n, v in manifest.items() if n not in _SHOWN_ELSEWHERE and not isinstance(v, dict)}
    groups = [(n, v) for n, v in manifest.items() if isinstance(v, dict) and n not in _SHOWN_ELSEWHERE]
    parts = [_fields("run", simple.items())]
    for name, fields in sorted(groups, key=lambda pair: pair[0] != "train_loop_config"):
        parts.append(el("details", el("summary", plain(name)), _fields(name, flatten(fields).items())))
    return Section("settings", "Settings and versions", join(parts))


def _fields(caption: str, fields: Iterable[tuple[str, Any]]) -> Html:
    every = list(fields)
    lines = [(clip(name, 200), value if isinstance(value, Html) else _value(value)) for name, value in every]
    left_out = len(lines) - _MOST_SETTINGS
    note = _note(f"run.json has {left_out:,} more.") if left_out > 0 else None
    return join([table(caption, ("name", "value"), lines[:_MOST_SETTINGS]), note])


def _value(value: object) -> str:
    shown = value if isinstance(value, str) else json.dumps(value)
    return shown if len(shown) <= 1000 else f"{shown[:1000]}…"
