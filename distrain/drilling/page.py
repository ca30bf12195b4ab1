"""The report of a drill for people: lines for a terminal, and one HTML file. Runs in: anywhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distrain.drilling.verdict import DrillReport

_GRACES = (("Azure and Google Cloud", 30), ("AWS", 120))
"""Seconds between the notice and the end of spot machines."""
_PAGE = """\
<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>drill of {name}</title>
<style>
:root {{ color-scheme: light dark; --good: light-dark(#17692f, #6fd08c); --bad: light-dark(#a4161a, #ff8a8a) }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ text-align: left; vertical-align: top; padding: .45rem .8rem .45rem 0; border-bottom: 1px solid #8884 }}
.good {{ color: var(--good) }} .bad {{ color: var(--bad) }} td:last-child, .number {{ overflow-wrap: anywhere }}
</style>
<h1>{name}: <span class="{sign}">{verdict}</span></h1>
<table><tr><th>disturbance<th>verdict<th>lost<th>until training<th>why
{rows}</table>
<ul>{notes}</ul></html>
"""


def findings(report: DrillReport, failures_per_day: float) -> list[str]:
    """Return the lines below the verdicts."""
    bad = sum(not one.is_good for one in report.verdicts)
    result = "resumes exactly, or within noise" if report.ok else f"does not resume exactly ({bad} of {len(report.verdicts)})"
    counted = f"{report.workers} workers, {report.until} {report.unit}, {report.seconds:.0f} s"
    lines = [f"{report.target} {result}: {counted}"]
    lines += [f"  see docs/drill.md#{name}" for name in report.cause_names]
    if (saving := report.saving) is not None:
        best_s = saving.best_interval_s(failures_per_day)
        per_day = "a failure a day" if failures_per_day == 1 else f"{failures_per_day:g} failures a day"
        now, then = (saving.loss(seconds, failures_per_day) for seconds in (saving.interval_s, best_s))
        lines.append(
            f"a checkpoint takes {_time(saving.cost_s)}, and training goes on {_time(saving.restart_s)} after a failure: "
            f"with {per_day}, save every {_time(best_s)} (Daly 2006), which costs {then:.2%} of the time; now every "
            f"{_time(saving.interval_s)}: {now:.2%}"
        )
    if report.saves_after_s is not None:
        fits = [f"{'fits' if report.saves_after_s < grace_s else 'is too slow for'} the {grace_s} s of {who}" for who, grace_s in _GRACES]
        lines.append(f"a preemption is over after {_time(report.saves_after_s)}, which {' and '.join(fits)}")
    return [*lines, *report.notes, *([f"files: {report.directory}"] if report.directory else [])]


def drill_page(report: DrillReport, failures_per_day: float) -> str:
    """Return the report as an HTML page that needs nothing else."""
    first, *notes = findings(report, failures_per_day)
    rows = "\n".join(
        f'<tr><td>{escape(one.disturbance)}<td class="{_sign(one.is_good)}">{escape(one.text)}'
        f"<td class=number>{'' if one.lost is None else one.lost}"
        f"<td class=number>{'' if one.times is None else _time(one.times.total_s)}"
        f"<td>{'<br>'.join(escape(str(cause)) for cause in one.causes)}"
        for one in report.verdicts
    )
    return _PAGE.format(
        name=escape(report.target),
        sign=_sign(report.ok),
        verdict=escape(first.removeprefix(report.target)),
        rows=rows,
        notes="".join(f"<li>{escape(note)}" for note in notes),
    )


def _sign(is_good: bool) -> str:
    return "good" if is_good else "bad"


def _time(seconds: float) -> str:
    """Return a duration in a fitting unit.

    >>> [_time(seconds) for seconds in (0.0123, 1.26, 75, 587, 9000)]
    ['12 ms', '1.3 s', '75 s', '10 min', '2.5 h']
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for size, unit, limit in ((1, "s", 120), (60, "min", 7200)):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:.1f} h"
