"""What one process of a drill is to run, and what its ranks are to do there. Runs in: coordinator, worker."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

REPORTS, STEPS = "reports", "steps"
"""What is counted: calls of report(), or training steps of a script that does not report."""


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """What each rank does.

    seed: of the random numbers of all attempts; each rank adds its number.
    unit: ``reports`` or ``steps``.
    at: the number of these after which ``rank`` acts, in an attempt that has not resumed.
    act: ``kill`` (its own process), ``kill host``, ``kill before report`` (of its next checkpoint), ``pause`` until the
        drill kills everything, or nothing.
    fenced: directories of the user in which nothing must be written. allowed: a directory in which everything may be.
    """

    seed: int = 0
    unit: str = REPORTS
    at: int = 0
    rank: int = 0
    act: str = ""
    fenced: tuple[str, ...] = ()
    allowed: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """What a process runs.

    kind: ``command`` (arguments of ``distrain run``), ``script`` (it calls fit() itself) or ``trainer`` (the path of a
        pickled one). arguments: the words of the command line.
    storage: the storage path of the run, whose name is ``run``.
    workers: the number of workers, or None for the script's own.
    """

    kind: str
    arguments: tuple[str, ...]
    storage: str
    workers: int | None
    probe: ProbeOrder

    def write(self, path: Path) -> None:
        """Write the order into a file."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Order:
        """Read what :meth:`write` has written."""
        data: dict[str, Any] = json.loads(path.read_text())
        probe = data["probe"] | {"fenced": tuple(data["probe"]["fenced"])}
        return cls(**data | {"arguments": tuple(data["arguments"]), "probe": ProbeOrder(**probe)})
