"""Pictures as SVG: where the time went, the attempts on each host, the pace of the ranks. Pure. Runs in: anywhere.

They stretch to the width of the page. Style sheets give the colours. No picture has an attribute ``style``, as the page
forbids these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain.page.markup import Html, clip, el, join
from distrain.page.pace import level
from distrain.system.text import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.page.contents import Attempt, Hang, SavedCheckpoint
    from distrain.page.pace import Row
    from distrain.page.time_use import Part

_WIDE = 1000
"""Units of the drawings from left to right."""
MOST_HOSTS = 40
_MANY_TICKS = 60
"""Checkpoints beyond which their ticks are thin."""
_LANE = 22
"""Pixels of a host's lane."""


def svg(width: float, height: float, pixels: int, *content: object, label: str) -> Html:
    """Return a drawing of this height in pixels that is as wide as its place."""
    return el(
        "svg",
        *content,
        viewBox=f"0 0 {width:g} {height:g}",
        preserveAspectRatio="none",
        width="100%",
        height=pixels,
        role="img",
        aria_label=label,
    )


def _rect(x: float, y: float, width: float, height: float, kind: str, *, title: str = "") -> Html:
    shape = {"x": f"{x:.2f}", "y": f"{y:g}", "width": f"{max(width, 0):.2f}", "height": f"{height:g}", "class_": kind}
    return el("rect", el("title", title), **shape) if title else el("rect", **shape)


def _line(x: float, top: float, bottom: float, kind: str) -> Html:
    place = {"x1": f"{x:.2f}", "x2": f"{x:.2f}", "y1": f"{top:g}", "y2": f"{bottom:g}"}
    return el("line", **place, class_=kind, vector_effect="non-scaling-stroke")


# -- where the time went ---------------------------------------------------------------------------------------------


def time_bar(parts: Sequence[Part]) -> Html:
    """Return one bar whose parts are as long as their times."""
    total = sum(part.seconds for part in parts) or 1.0
    shapes, x = [], 0.0
    for part in parts:
        width = part.seconds / total * _WIDE
        if width > 0:
            title = f"{part.label}: {duration(part.seconds)} ({part.seconds / total:.1%})"
            shapes.append(_rect(x, 0, width, 10, f"part-{part.kind}", title=title))
        x += width
    shown = [part for part in parts if part.seconds >= 0.0005 * total]
    label = "; ".join(f"{part.label} {part.seconds / total:.1%}" for part in shown)
    return svg(_WIDE, 10, 36, *shapes, label=f"Where the time went: {label}")


# -- the attempts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """An attempt with the end that is known for it."""

    attempt: Attempt
    until: float
    is_running: bool = False


def timeline(
    spans: Sequence[Span],
    checkpoints: Sequence[SavedCheckpoint],
    hangs: Sequence[Hang],
    position: Callable[[float], float],
) -> Html:
    """Return a lane for each host, with its attempts, checkpoints, hangs and failures."""
    hosts = list(dict.fromkeys(host for span in spans for host in span.attempt.hosts))
    failed = {span.attempt.failed_host for span in spans}
    shown = sorted(hosts, key=lambda host: host not in failed)[:MOST_HOSTS]
    places = sorted({round(position(saved.time), 3) for saved in checkpoints if saved.time is not None})
    tick = "lane-checkpoint" if len(places) <= _MANY_TICKS else "lane-checkpoint dense"
    lanes: list[Html] = []
    for host in sorted(shown, key=hosts.index):
        shapes = [shape for span in spans if host in span.attempt.hosts for shape in _attempt_shapes(span, position)]
        for hang in hangs:
            x = position(hang.since) * _WIDE
            shapes.append(_rect(x, 2, position(hang.until) * _WIDE - x, 18, "lane-hung", title="hung"))
        ticks = "".join(f"M{place * _WIDE:g} 13v7" for place in places)
        shapes.append(el("path", d=ticks, class_=tick, vector_effect="non-scaling-stroke"))
        shapes += [
            _line(min(position(span.until) * _WIDE, _WIDE - 2), 0, _LANE, "lane-failure")
            for span in spans
            if span.attempt.failure and host in span.attempt.hosts and span.attempt.failed_host in (host, None)
        ]
        count = sum(host in span.attempt.hosts for span in spans)
        label = f"{host}: {count} of {len(spans)} attempts"
        lanes.append(
            el(
                "div",
                el("span", clip(host, 40), class_="lane-name", title=host),
                svg(_WIDE, _LANE, _LANE, *shapes, label=label),
                class_="lane",
            )
        )
    if len(hosts) > len(shown):
        lanes.append(el("p", f"{len(hosts) - len(shown):,} other hosts are not drawn.", class_="note"))
    return join(lanes)


def _attempt_shapes(span: Span, position: Callable[[float], float]) -> list[Html]:
    attempt = span.attempt
    start, end = position(attempt.started) * _WIDE, position(span.until) * _WIDE
    middle = end if attempt.training is None else min(max(start, position(attempt.training) * _WIDE), end)
    title = f"attempt {attempt.number}: {duration(span.until - attempt.started)}"
    return [
        _rect(start, 2, max(middle - start, 1 if attempt.training is None else 0), 18, "lane-starting", title=title),
        _rect(middle, 2, end - middle, 18, "lane-training", title=title),
    ]


# -- the pace of the ranks -------------------------------------------------------------------------------------------


def heat_map(rows: Sequence[Row], *, label: str) -> Html:
    """Return a row of coloured slots for each rank, or for each few ranks."""
    pixels = max(2, min(18, 480 // max(1, len(rows))))
    slots = len(rows[0].cells) if rows else 1
    shapes: dict[int, list[str]] = {}
    for y, row in enumerate(rows):
        start = 0
        levels = [None if cell is None else level(cell) for cell in row.cells]
        while start < slots:
            end = start
            while end < slots and levels[end] == levels[start]:
                end += 1
            if (colour := levels[start]) is not None:
                shapes.setdefault(colour, []).append(f"M{start} {y}h{end - start}v1h{start - end}z")
            start = end
    paths = [el("path", d="".join(shapes[colour]), class_=f"heat-{colour}") for colour in sorted(shapes)]
    every = max(1, -(-14 // pixels))
    names = [
        el("text", _ranks(row), x=44, y=y * pixels + pixels / 2, text_anchor="end", dominant_baseline="central")
        for y, row in enumerate(rows)
        if y % every == 0 and (y == 0 or y + every <= len(rows) or every == 1)
    ]
    height = pixels * len(rows)
    axis = el("svg", *names, width=48, height=height, aria_hidden="true", class_="axis")
    return el("div", axis, svg(slots, max(1, len(rows)), height, *paths, label=label), class_="heat")


def _ranks(row: Row) -> str:
    return str(row.ranks[0]) if row.ranks[0] == row.ranks[1] else f"{row.ranks[0]}+"
