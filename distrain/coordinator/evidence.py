"""The evidence folder of each attempt: what shows why it hung or failed. Runs in: coordinator.

::

    evidence/attempt_0/stacks/rank_1.txt            what every thread was doing
    evidence/attempt_0/flight_recorder/rank_1.json  the last collectives, from torch's flight recorder
    evidence/attempt_0/profile/rank_1.json.gz       a trace of torch's operations, from `distrain profile`
    evidence/attempt_0/memory/rank_1.pickle         GPU memory at an OutOfMemoryError; open it in pytorch.org/memory_viz
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.coordinator.store.run_store import RunStore

_SUFFIXES = {"stacks": ".txt", "flight_recorder": ".json", "memory": ".pickle"}


class Evidence:
    """Write the evidence of the current attempt to the run directory."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self.begin(-1)

    def begin(self, attempt: int) -> None:
        """Begin the folder of an attempt. It is made when there is something to keep."""
        self.folder = self._store.paths.evidence(attempt)

    def keep(self, what: str, rank: int, body: bytes, suffix: str = "") -> Path:
        """Write one kind of evidence of a rank, and return its path. Unknown kinds raise KeyError.

        suffix: the end of the file's name, if the kind has several.
        """
        path = self.folder / what / f"rank_{rank}{suffix or _SUFFIXES[what]}"
        complaint = f"cannot keep the {what.replace('_', ' ')} of rank {rank}"
        self._store.write_optional_file(path, body, complaint)
        return path
