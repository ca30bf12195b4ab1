"""The lines of the footer about the ranks: a mark for each, and which need attention. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from distrain.decisions.failures import name_ranks
from distrain.system.text import duration

if TYPE_CHECKING:
    from distrain.console.run_status import RunStatus

_MARKS = {
    "failed": ("✗", "bold red"),
    "memory": ("▲", "bold red"),
    "GPU": ("◆", "bold red"),
    "silent": ("○", "bold red"),
    "slow": ("◐", "yellow"),
    "at work": ("●", "green"),
    "starting": ("·", "dim"),
    "stopped": ("■", "dim"),
    "ended": ("✓", "dim"),
}
"""By the state of a rank: its mark and the style of it. Those that need attention come first."""
_ATTENTION = ("failed", "memory", "GPU", "silent", "slow")
_MOST_TROUBLES = 2


def rank_lines(status: RunStatus, now: float, width: int) -> list[Text]:
    """Return a mark for each rank if they fit, the ranks that need attention, and the numbers of the others."""
    if not status.ranks:
        return []
    states = _states(status, now)
    marks, text = Text("ranks "), _in_words(status, states, now)
    for state in states:
        marks.append(*_MARKS[state])
    if marks.cell_len + 2 + text.cell_len < width:
        return [marks + "  " + text]
    return [marks, text] if marks.cell_len < width else [Text("ranks ") + text]


def attention_lines(status: RunStatus, now: float) -> list[Text]:
    """Return the ranks that need attention, and what is wrong with memory and GPUs of the first of them."""
    states = [state if state in _ATTENTION else "" for state in _states(status, now)]
    return [*([_in_words(status, states, now)] if any(states) else []), *trouble_lines(status)]


def trouble_lines(status: RunStatus) -> list[Text]:
    """Return what is wrong with memory and GPUs of the first ranks that have such troubles."""
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
        return "silent" if number in silent else "slow" if number in slow else "at work"

    return [state(number) for number in range(len(status.ranks))]


def _in_words(status: RunStatus, states: list[str], now: float) -> Text:
    ranks = {state: [rank for rank, its in enumerate(states) if its == state] for state in _MARKS}
    parts = [
        Text(f"{name_ranks(ranks[state])} {state}{_detail(status, state, ranks[state], now)}", style=_MARKS[state][1])
        for state in _ATTENTION
        if ranks[state]
    ]
    others = [f"{len(those):,} {state}" for state, those in ranks.items() if those and state not in _ATTENTION]
    return Text("  ").join([*parts, Text(", ".join(others), style="dim")] if others else parts)


def _detail(status: RunStatus, state: str, ranks: list[int], now: float) -> str:
    """Return for how long ranks have been silent, and in which line the only one of them is that others wait for."""
    silent = status.silent(now) if state == "silent" else {}
    since = f" for {duration(min(silent[rank] for rank in ranks))}" if silent else ""
    place = status.slow_place(ranks[0]) if state in ("silent", "slow") and len(ranks) == 1 else ""
    return f"{since}, in {place}" if place else since
