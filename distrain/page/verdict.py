"""The end of a run, or its state, in one sentence. Pure: no I/O, no clock. Runs in: anywhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distrain.page.contents import items, mapping, text, whole
from distrain.page.markup import clip
from distrain.storage.runs.listing import ABORTED, FAILED, FINISHED, KILLED, RUNNING
from distrain.system.text import LIBRARY_FILE, count, duration

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from distrain.page.contents import RunFacts

_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)
_LONGEST_REASON = 240
STATES = {
    FINISHED: ("finished", "good"),
    FAILED: ("failed", "bad"),
    ABORTED: ("stopped", "warn"),
    RUNNING: ("running", "live"),
    KILLED: ("killed", "bad"),
}
"""A word for each state, and how it looks."""
UNKNOWN = ("unknown", "warn")
"""The state in words of a run without a usable run.json."""


def verdict(facts: RunFacts, *, seconds: float | None, progress: tuple[float, float | None] | None) -> str:
    """Return one sentence. ``seconds``: how long the run took; ``progress``: the last step and the number of steps."""
    after = "" if seconds is None else f" after {duration(seconds)}"
    restarts = max(0, len(facts.attempts) - 1)
    with_restarts = f", after {count(restarts, 'restart')}" if restarts else ""
    if facts.state == FINISHED:
        return f"Finished{after}{with_restarts}{_last_checkpoint(facts)}."
    if facts.state == RUNNING:
        so_far = "" if seconds is None else f" for {duration(seconds)}"
        at = "" if progress is None else f", at step {_steps(progress)}"
        return f"Running{so_far}{at}{with_restarts}{_last_checkpoint(facts)}."
    if facts.state == KILLED:
        why = "the process that called fit() was killed, or its machine crashed"
        return f"Ended without a word{after}: {why}{with_restarts}{_last_checkpoint(facts)}."
    if facts.state not in STATES:
        return "It is not known what became of this run, because run.json is missing or damaged."
    verb, why = ("Stopped" if facts.state == ABORTED else "Failed"), _reason(facts)
    return f"{verb}{after}{f': {why}' if why else ''}{with_restarts}{_last_checkpoint(facts)}."


def _steps(progress: tuple[float, float | None]) -> str:
    step, total = progress
    return f"{step:,.0f} of {total:,.0f} ({step / total:.0%})" if total else f"{step:,.0f}"


def _last_checkpoint(facts: RunFacts) -> str:
    if not facts.checkpoints:
        return "" if facts.state == FINISHED else "; there is no checkpoint"
    last = facts.checkpoints[-1]
    step = "" if last.step is None else f" (step {last.step:,})"
    return f"; the last checkpoint is {clip(last.name, 60)}{step}"


def _reason(facts: RunFacts) -> str:
    """Return which rank failed, where and why."""
    failures = [mapping(failure) for failure in items(facts.error.get("failures"))]
    if failures:
        first = failures[0]
        host = text(first.get("host"))
        who = f"rank {whole(first.get('rank'))}" + (f" on {clip(host, 60)}" if host else "")
        why = clip(text(first.get("summary")) or "no reason is known", _LONGEST_REASON)
        if where := failed_at(first):
            return f"{who} failed at {where} with {why}".rstrip(".")
        return f"{who} {why}".rstrip(".")
    message = text(facts.error.get("message"))
    if message:
        return clip(message.splitlines()[0], _LONGEST_REASON).rstrip(".")
    ends = [attempt.failure for attempt in facts.attempts if attempt.failure]
    return clip(ends[-1], _LONGEST_REASON).rstrip(".") if ends else ""


def failed_at(failure: Mapping[str, Any]) -> str:
    """Return the innermost line of the user's code in the traceback of a failure, such as ``train.py:88``, or ""."""
    frames = list(_FRAME.finditer(text(failure.get("traceback")) or ""))
    own = [frame for frame in frames if not LIBRARY_FILE.search(frame["file"])] or frames
    return f"{own[-1]['file'].rpartition('/')[2]}:{own[-1]['line']}" if own else ""
