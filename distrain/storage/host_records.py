"""Findings of the user's runs and checks about hosts, in one small file. Runs in: coordinator.

::

    $XDG_STATE_HOME/distrain/hosts.json, else ~/.local/state/distrain/hosts.json
        troubles    what was wrong in the last days: time, host, what (one of TROUBLES), text, run
        checks      by host: kind and results of its latest deep checks
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.storage.files import write_atomically
from distrain.system.log import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

KEPT_S = 7 * 86400.0
"""Seconds for which a trouble is remembered."""
TROUBLES = {"lost": 1, "GPU": 1, "slow": 1, "failed": 3}
"""How often a trouble of this kind makes a host a bad one. slow: as measured in a deep check or in a run. failed: one
of its ranks was the culprit, and not by an exception of the user's code."""
_MOST_TROUBLES, _MOST_CHECKS = 1000, 20


@dataclass(slots=True)
class HostRecords:
    """Troubles and deep checks of hosts, the oldest first."""

    troubles: list[dict[str, Any]] = field(default_factory=list)
    checks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add_trouble(self, host: str, what: str, text: str, run: str) -> None:
        """Add a trouble of now."""
        self.troubles.append({"host": host, "time": time.time(), "what": what, "text": text, "run": run})

    def add_check(self, host: str, kind: str, results: dict[str, float]) -> None:
        """Add a deep check."""
        self.checks[host] = [*self.checks.get(host, []), {"kind": kind, "results": results}][-_MOST_CHECKS:]

    def forgive(self, hosts: Collection[str]) -> None:
        """Forget the troubles of these hosts."""
        self.troubles = [one for one in self.troubles if one["host"] not in hosts]

    def bad_hosts(self) -> dict[str, dict[str, Any]]:
        """Return the last trouble of each host whose troubles make it a bad one."""
        counts = Counter((one["host"], one["what"]) for one in self.troubles)
        return {one["host"]: one for one in self.troubles if counts[one["host"], one["what"]] >= TROUBLES[one["what"]]}


def read_records() -> HostRecords:
    """Return what is known. A damaged file is ignored, with a warning: nothing depends on it."""
    path = _path()
    try:
        records = HostRecords(**json.loads(path.read_bytes()))
        records.troubles = [one for one in records.troubles if one["time"] > time.time() - KEPT_S]
    except FileNotFoundError:
        return HostRecords()
    except (OSError, ValueError, KeyError, TypeError) as error:
        warn_once(f"{path} is damaged, and ignored: {error}; delete it")
        return HostRecords()
    return records


def change_records(change: Callable[[HostRecords], None]) -> None:
    """Change what is known. A file that cannot be written is a warning."""
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            records = read_records()
            change(records)
            del records.troubles[:-_MOST_TROUBLES]
            write_atomically(path, json.dumps(asdict(records)).encode(), sync=False)
    except OSError as error:
        warn_once(f"what was found out about hosts is not kept in {path}: {error}")


def _path() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return Path(state if os.path.isabs(state) else os.path.expanduser("~/.local/state"), "distrain", "hosts.json")
