"""The lines that show how far a run is: at the bottom of a terminal, or in a notebook. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.text import Text

from distrain.decisions.failures import name_ranks
from distrain.system.text import duration, number, rate

if TYPE_CHECKING:
    from distrain.console.run_status import RunStatus

_BAR_CELLS = 30
_FEWEST_ROWS = 12
"""Rows of a terminal below which the footer has only its most important lines."""
_MOST_TROUBLES = 2
_ARROWS = {1: " ↑", 0: "", -1: " ↓"}
_MARKS = {
    "at work": ("●", "green"),
    "starting": ("·", "dim"),
    "slow": ("◐", "yellow"),
    "silent": ("○", "bold red"),
    "ended": ("✓", "dim"),
    "memory": ("▲", "bold red"),
    "GPU": ("◆", "bold red"),
}
"""By the state of a rank: its mark and the style of it."""


def footer(status: RunStatus, now: float, *, width: int, rows: int, interrupt: str | None) -> list[Text]:
    """Return the lines of the footer, none of them wider than ``width``.

    now: time.monotonic.
    interrupt: how the user stops the run, such as ``Ctrl-C``; None once it is over.
    """
    lines = [_title(status, now), _progress(status), _metrics(status), _bar(status)]
    if rows >= _FEWEST_ROWS:
        lines += [_checkpoint(status, now), _ranks(status, now, width), *_troubles(status), _advice(status, interrupt)]
    shown = [line for line in lines if line is not None]
    for line in shown:
        line.truncate(width - 1, overflow="ellipsis")
    return shown


def _joined(*parts: str | Text | None) -> Text:
    dot = Text.assemble((" · ", "dim"))
    return dot.join(Text(part) if isinstance(part, str) else part for part in parts if part)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def _title(status: RunStatus, now: float) -> Text:
    hosts = _counted(status.hosts, "host") if status.hosts > 1 else None
    return _joined(
        Text(status.phase, style="bold"),
        duration(now - status.started),
        _counted(len(status.ranks), "worker") if status.ranks else None,
        hosts,
        Text(_counted(status.restarts, "restart"), style="yellow") if status.restarts else None,
        status.name,
    )


def _progress(status: RunStatus) -> Text | None:
    speed = status.rate()
    if status.progress is None:
        reports = status.ranks[0].reports if status.ranks else 0
        return _joined(_counted(reports, "report"), rate(speed) if speed else None) if reports else None
    done, total = status.progress
    share = done / total if total else 1.0
    cells = round(_BAR_CELLS * share)
    bar = Text.assemble(("━" * cells, "green"), ("━" * (_BAR_CELLS - cells), "dim"))
    left = status.left_s()
    text = _joined(
        f"{number(done)}/{number(total)}",
        f"{share:.0%}",
        rate(speed) if speed else None,
        f"{duration(left)} left" if left else None,
        _behind(status, done, total),
    )
    return bar + " " + text


def _behind(status: RunStatus, done: float, total: float) -> Text | None:
    """Return the rank that is furthest behind rank 0, if it is clearly behind."""
    steps = [(rank.step, place) for place, rank in enumerate(status.ranks) if rank.step is not None]
    least, place = min(steps, default=(done, 0))
    if done - least <= max(2, total / 50):
        return None
    return Text(f"rank {place} is at {number(least)}", style="yellow")


def _metrics(status: RunStatus) -> Text | None:
    if not status.metrics:
        return None
    shown = (
        f"{name} {number(value) + _ARROWS[status.trend(name)]}"
        for name, value in status.metrics.items()
        if isinstance(value, (int, float))
    )
    return Text("   ").join(map(Text, shown))


def _bar(status: RunStatus) -> Text | None:
    bar = status.bar()
    return None if bar is None else Text.assemble((f"rank {bar[0]}: ", "dim"), Text.from_ansi(bar[1].strip()))


def _checkpoint(status: RunStatus, now: float) -> Text | None:
    if status.checkpoint is None:
        return None
    return Text(f"{status.checkpoint}, {duration(now - status.checkpoint_at)} ago")


def _ranks(status: RunStatus, now: float, width: int) -> Text | None:
    """Return one mark for each rank if they fit, and which ranks need attention."""
    if not status.ranks:
        return None
    states = _states(status, now)
    counts = Counter(states)
    text = Text("ranks ")
    if len(states) <= width // 2:
        for state in states:
            text.append(*_MARKS[state])
        text.append("  ")
    for state in ("memory", "GPU", "silent", "slow"):
        if counts[state]:
            ranks = [rank for rank, its in enumerate(states) if its == state]
            text.append(f"{name_ranks(ranks)} {state}  ", style=_MARKS[state][1])
    others = ("at work", "starting", "ended")
    text.append(", ".join(f"{counts[state]:,} {state}" for state in others if counts[state]), style="dim")
    return text


def _troubles(status: RunStatus) -> list[Text]:
    """Return in words what is wrong with memory and GPUs of the first ranks. The line of the ranks names all."""
    troubles = status.troubles()[:_MOST_TROUBLES]
    return [Text(f"rank {one.rank} on {status.ranks[one.rank].host}: {one.text}", style="red") for one in troubles]


def _states(status: RunStatus, now: float) -> list[str]:
    silent, slow = set(status.silent(now)), set(status.slow())
    troubled = {one.rank: one.kind for one in reversed(status.troubles())}

    def state(number: int) -> str:
        rank = status.ranks[number]
        if rank.ended:
            return "ended"
        if number in troubled:
            return troubled[number]
        if rank.begun is None:
            return "starting"
        return "silent" if number in silent else "slow" if number in slow else "at work"

    return [state(number) for number in range(len(status.ranks))]


def _advice(status: RunStatus, interrupt: str | None) -> Text | None:
    """Return the effect of the next interrupt."""
    if status.advice:
        return Text(status.advice, style="dim")
    if interrupt is None:
        return None
    if status.is_stopping:
        return Text(f"the run is being stopped; {interrupt} kills the workers now", style="yellow")
    text = f"{interrupt}: the workers have {status.grace_s:g} s to save a checkpoint, then the run ends"
    return Text(text, style="dim")
