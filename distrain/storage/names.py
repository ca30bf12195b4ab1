"""The names of the files in a run directory, and the states in its run.json. Runs in: anywhere."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_STORAGE = os.environ.get("DISTRAIN_STORAGE_PATH") or "~/distrain_results"
MANIFEST = "run.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
REQUESTS = ".requests"
ERROR_TEXT = "error.json"
ERROR_PICKLE = "error.pkl"
RETURN_VALUE = "return_value.pkl"
NOTES = "notes.json"
LOCK = ".lock"
LOGS = "logs"
EVIDENCE = "evidence"
TRACKERS = "trackers"
TENSORBOARD = "tensorboard"
EVIDENCE_SUFFIXES = {
    "stacks": ".txt", "flight_recorder": ".json", "memory": ".pickle",
    "profile": ".txt", "samples": ".collapsedstack.txt", "trace": ".json.gz",
}  # fmt: skip
"""The kinds of evidence of a rank, and how the names of their files end."""
METADATA_FILE = ".metadata.json"
DICT_FILE = "dict_checkpoint.pkl"
"""The file of a checkpoint that was made of a dict."""
STATUSES = ("running", "finished", "failed", "stopped")


def numbered(name: str) -> Iterator[str]:
    """Yield a name, then ``name-2``, ``name-3`` and so on, without end."""
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def evidence_file(attempt: int, what: str, rank: int) -> str:
    """Return the name of a piece of evidence below the run directory. Unknown kinds raise KeyError."""
    return f"{EVIDENCE}/attempt_{attempt}/{what}/rank_{rank}{EVIDENCE_SUFFIXES[what]}"


def checkpoint_name(index: int) -> str:
    """Return the usual name of a checkpoint's directory."""
    return f"checkpoint_{index:06d}"
