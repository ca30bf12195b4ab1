"""The names of the files in a run directory, and the states in its run.json. Runs in: anywhere."""

from __future__ import annotations

DEFAULT_STORAGE = "~/distrain_results"
MANIFEST = "run.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
CONSOLE = "console.log"
REQUESTS = ".requests"
ERROR_TEXT = "error.json"
LOCK = ".lock"
LOGS = "logs"
EVIDENCE = "evidence"
TRACKERS = "trackers"
STATUSES = ("running", "finished", "failed", "aborted")
