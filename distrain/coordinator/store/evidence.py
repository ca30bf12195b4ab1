"""The evidence folder of each attempt: what shows why it hung or failed. Runs in: coordinator.

::

    evidence/attempt_0/stacks/rank_1.txt            what every thread was doing, or only the main one
    evidence/attempt_0/flight_recorder/rank_1.json  the last collectives, from torch's flight recorder
    evidence/attempt_0/profile/rank_1.txt           the hottest lines, from `distrain profile`
    evidence/attempt_0/samples/rank_1.collapsedstack.txt, trace/rank_1.json.gz: the files that it names
    evidence/attempt_0/memory/rank_1.pickle         GPU memory at an OutOfMemoryError; open it in pytorch.org/memory_viz
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain import wire
from distrain.decisions.events import AttemptStarts
from distrain.decisions.health.hangs import Keep
from distrain.decisions.hearing import does, hears
from distrain.storage.names import evidence_file

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.coordinator.store.run_store import RunStore

_MOST_SNAPSHOTS = 8
"""Ranks of an attempt whose GPU memory is kept. Often all run out of memory at the same time, and look alike."""


class Evidence:
    """Write the evidence of the current attempt to the run directory."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._attempt, self._snapshots, self.is_empty = -1, 0, True

    @hears(AttemptStarts)
    def on_attempt(self, _: str, starts: AttemptStarts) -> None:
        """Begin the folder of an attempt. It is made when there is something to keep."""
        self._attempt, self._snapshots, self.is_empty = starts.attempt, 0, True

    def folder(self) -> Path:
        """Return the folder of the attempt."""
        return self._store.paths.evidence(self._attempt)

    @hears(wire.Dump)
    def on_dump(self, _: str, dump: wire.Dump) -> None:
        """Keep what a rank has sent. Of its stacks, the hang monitor chooses those to keep."""
        if dump.what not in ("last_collectives", "stacks"):
            self.keep(dump)

    def path(self, what: str, rank: int) -> Path:
        """Return the path of one kind of evidence of a rank. Unknown kinds raise KeyError."""
        return self._store.paths.root / evidence_file(self._attempt, what, rank)

    @does(Keep)
    def keep(self, piece: Keep | wire.Dump) -> None:
        """Write one kind of evidence of a rank. GPU memory is kept of some ranks only."""
        what, rank = piece.what, piece.rank
        self.is_empty = False
        if what == "memory":
            self._snapshots += 1
            if self._snapshots > _MOST_SNAPSHOTS:
                return
        complaint = f"cannot keep the {what.replace('_', ' ')} of rank {rank}"
        self._store.write_optional_file(self.path(what, rank), piece.body, complaint)
