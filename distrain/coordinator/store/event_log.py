"""events.jsonl: an observer that records facts. Runs in: coordinator."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from distrain.api.observer import AttemptBegan, BecameSlow, Committed, HangBegan, HangEnded, TroubleBegan, TroubleEnded

if TYPE_CHECKING:
    from distrain.api.observer import Fact
    from distrain.coordinator.store.run_store import RunStore

_OF_CHECKPOINTS = ("attempt", "name", "index", "step", "bytes", "seconds", "ranks")
"""Fields of a checkpoint that its event has."""


class EventLog:
    """Adds a line to events.jsonl for each fact that people look up later."""

    hears = (AttemptBegan, BecameSlow, Committed, HangBegan, HangEnded, TroubleBegan, TroubleEnded)

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._attempt = -1

    def hear(self, fact: Fact) -> None:
        add, attempt = self._store.append_event, self._attempt
        match fact:
            case AttemptBegan():
                self._attempt = fact.attempt
            case Committed():
                tier = {"tier": "memory"} if fact.is_in_memory else {}
                add("checkpoint", **{name: getattr(fact, name) for name in _OF_CHECKPOINTS}, **tier)
            case BecameSlow():
                add("slow", attempt=attempt, **asdict(fact))
            case TroubleBegan(host, trouble):
                add("trouble", attempt=attempt, host=host, **asdict(trouble))
            case TroubleEnded(host, trouble):
                which = {"rank": trouble.rank, "kind": trouble.kind, "problem": trouble.problem}
                add("trouble_over", attempt=attempt, host=host, **which)
            case HangBegan(text, since):
                add("hang_began", attempt=attempt, since=since, text=text)
            case HangEnded(since, text):
                add("hang", attempt=attempt, since=since, text=text)
