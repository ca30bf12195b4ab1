"""The lines that show how far a run is: at the bottom of a terminal, or in a notebook. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

from rich.text import Text

from distrain.system.text import amount, count, duration, name_ranks, printable, rate

if TYPE_CHECKING:
    from distrain.decisions.run_status import RunStatus

_Bar: TypeAlias = "tuple[int, str]"
_BAR_CELLS = 30
_FEWEST_BAR_CELLS = 5
_GAP = "   "
_MARKS = {
    "failed": ("✗", "bold red"),
    "memory": ("▲", "bold red"),
    "GPU": ("◆", "bold red"),
    "diverged": ("≠", "bold red"),
    "silent": ("○", "bold red"),
    "stuck": ("◍", "bold red"),
    "waiting": ("◌", "yellow"),
    "slow": ("◐", "yellow"),
    "at work": ("●", "green"),
    "starting": ("·", "dim"),
    "stopped": ("■", "dim"),
    "ended": ("✓", "dim"),
}
"""By the state of a rank: its mark and the style of it. Those that need attention come first."""
_ATTENTION = ("failed", "memory", "GPU", "diverged", "silent", "stuck", "slow")
_MOST_TROUBLES = 2
_MOST_METRICS = 50


def footer(
    status: RunStatus, now: float, *, width: int, interrupt: str | None, stops: bool = True, bar: _Bar | None = None
) -> list[Text]:
    """Return the lines of the footer, none of them wider than ``width``.

    now: time.monotonic.
    interrupt: how the user stops the run, such as ``Ctrl-C``; None once it is over. stops: False if that only detaches.
    bar: a progress bar of the user's, and the rank that it comes from.
    """
    lines = [_title(status, now), _progress(status, now, width), _metrics(status), _bar(bar), _checkpoint(status, now)]
    lines += [_ranks(status, now, width), _hang(status, now), *_troubles(status)]
    lines += [_advice(status, interrupt, stops=stops)]
    shown = [line for line in lines if line is not None]
    for line in shown:
        line.plain = printable(line.plain)
        line.truncate(width - 1, overflow="ellipsis")
    return shown


def _joined(*parts: str | Text | None) -> Text:
    dot = Text.assemble((" · ", "dim"))
    return dot.join(Text(part) if isinstance(part, str) else part for part in parts if part)


def _title(status: RunStatus, now: float) -> Text:
    return _joined(
        Text(status.shown_phase, style="bold"),
        duration(now - status.started),
        count(len(status.ranks), "worker") if status.ranks else None,
        count(status.hosts, "host") if status.hosts > 1 else None,
        Text(count(status.restarts, "restart"), style="yellow") if status.restarts else None,
        status.name,
    )


def _progress(status: RunStatus, now: float, width: int) -> Text | None:
    """Return how far the run is. The bar shrinks if the line is too wide."""
    if not status.reports:
        return None
    done, total = status.progress or (status.reports, 0.0)
    share = done / total if total else 1.0
    late_s = status.late_s(now)
    speed = status.rate() if late_s is None and status.shown_phase == "running" else None
    left = status.left_s() if speed else None
    text = _joined(
        f"{amount(done)}/{amount(total)}" if status.progress else count(status.reports, "report"),
        f"{share:.0%}" if status.progress else None,
        rate(speed) if speed else None,
        f"{duration(left)} left" if left else None,
        None if late_s is None else Text(f"no report for {duration(late_s)}", style="yellow"),
    )
    room = min(_BAR_CELLS, width - 2 - text.cell_len)
    return _drawn(share, room) + " " + text if status.progress and room >= _FEWEST_BAR_CELLS else text


def _drawn(share: float, cells: int) -> Text:
    done = min(cells, max(0, round(cells * share)))
    return Text.assemble(("━" * done, "green"), ("╌" * (cells - done), "dim"))


def _metrics(status: RunStatus) -> Text | None:
    numbers = [(name, value) for name, value in status.metrics.items() if isinstance(value, (int, float))]
    metrics = [_metric(name, value) for name, value in numbers[:_MOST_METRICS]]
    return Text(_GAP).join(metrics) if metrics else None


def _metric(name: str, value: float) -> Text:
    is_wrong = isinstance(value, float) and not math.isfinite(value)
    return Text.assemble(f"{name} ", (amount(value), "bold red" if is_wrong else ""))


def _bar(bar: _Bar | None) -> Text | None:
    return None if bar is None else Text.assemble((f"rank {bar[0]}: ", "dim"), Text.from_ansi(bar[1].strip()))


def _checkpoint(status: RunStatus, now: float) -> Text | None:
    if status.checkpoint is None:
        return None
    return Text(f"{status.checkpoint}, {duration(now - status.checkpoint_at)} ago")


def _ranks(status: RunStatus, now: float, width: int) -> Text | None:
    """Return a mark for each rank if they fit, the ranks that need attention, and the numbers of the others."""
    if not status.ranks:
        return None
    states = _states(status, now)
    words = _in_words(status, states, now)
    marks = Text("  ") if len(states) + words.cell_len + len("ranks   ") < width else Text()
    return Text("ranks ") + Text.assemble(*(_MARKS[state] for state in states if marks)) + marks + words


def _hang(status: RunStatus, now: float) -> Text | None:
    """Return who is stuck, unless a person holds a rank: then others wait for that person."""
    return None if status.hang is None or status.is_debugged else Text(status.hang.text_at(now), style="bold red")


def _troubles(status: RunStatus) -> list[Text]:
    """Return what is wrong with the first ranks that have troubles."""
    troubles = status.troubles()[:_MOST_TROUBLES]
    return [Text(f"rank {one.rank} on {status.ranks[one.rank].host}: {one.text}", style="red") for one in troubles]


def _states(status: RunStatus, now: float) -> list[str]:
    silent, slow = status.silent(now), set(status.slow())
    troubled = {one.rank: one.kind for one in reversed(status.troubles())}

    def state(number: int) -> str:
        rank = status.ranks[number]
        if rank.end is not None:
            return rank.end
        if number in troubled:
            return troubled[number]
        if rank.begun is None:
            return "starting"
        if status.hang is not None and not status.is_debugged:
            return "stuck" if number in status.hang.culprits else "waiting"
        return "silent" if number in silent else "slow" if number in slow else "at work"

    return [state(number) for number in range(len(status.ranks))]


def _in_words(status: RunStatus, states: list[str], now: float) -> Text:
    ranks = {state: [rank for rank, its in enumerate(states) if its == state] for state in _MARKS}
    parts = [
        Text(f"{name_ranks(ranks[state])} {state}{_detail(status, state, ranks[state], now)}", style=_MARKS[state][1])
        for state in _ATTENTION
        if ranks[state]
    ]
    others = [_count(state, len(those)) for state, those in ranks.items() if those and state not in _ATTENTION]
    return Text("  ").join([*parts, Text(", ".join(others), style="dim")] if others else parts)


def _count(state: str, ranks: int) -> str:
    """Return how many ranks are in a state. Those that wait are the others of a hang."""
    return f"{count(ranks, 'other')} wait{'s' * (ranks == 1)}" if state == "waiting" else f"{ranks:,} {state}"


def _detail(status: RunStatus, state: str, ranks: list[int], now: float) -> str:
    """Return for how long ranks have been silent, and in which line the only one of them is that others wait for."""
    silent = status.silent(now) if state == "silent" else {}
    since = f" for {duration(min(silent[rank] for rank in ranks))}" if silent else ""
    place = status.slow_place(ranks[0]) if state in ("silent", "slow") and len(ranks) == 1 else ""
    return f"{since}, in {place}" if place else since


def _advice(status: RunStatus, interrupt: str | None, *, stops: bool) -> Text | None:
    """Return the effect of the next interrupt."""
    if interrupt is None:
        return None
    if not stops:
        return Text(f"{interrupt}: detaches; the run continues", style="dim")
    if status.is_stopping:
        return Text(f"the run is being stopped; {interrupt} kills the workers now", style="yellow")
    effect = "stops the run"
    if status.saves_on_stop:
        effect = f"the workers have {status.grace_s:g} s to save a checkpoint, then the run ends"
    elif status.reports:
        effect = "stops the run; no checkpoint is saved because train_func has not called should_stop()"
    return Text(f"{interrupt}: {effect}", style="dim")
