"""Findings of the user's runs and checks about hosts: one small file for each host. Runs in: coordinator.

::

    $XDG_STATE_HOME/distrain/hosts, else ~/.local/state/distrain/hosts
        {host}.jsonl        a line for each record, the newest last: time, what, and more by its kind
        .lock               locked by a process that adds a record

``what`` is ``check`` (a deep check; with kind and results), ``forgiven`` (earlier troubles are forgotten), or one of
:data:`TROUBLES` (with text and run).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from distrain.storage.files import write_atomically
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KEPT_S = 7 * 86400.0
"""Seconds for which a trouble is remembered."""
_MOST_RECORDS = 50
TROUBLES = {"lost": 1, "GPU": 1, "slow": 1, "slow rank": 3, "failed": 3}
"""How often a trouble of this kind makes a host a bad one. slow: as measured in a deep check or in a run. slow rank:
in a run, where the user's code may be the cause. failed: one of its ranks was the culprit, and not by an exception of
the user's code."""


class HostRecords:
    """The files. folder: None for the usual place."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or _usual_folder()

    def add(self, host: str, what: str, **fields: Any) -> None:
        """Add a record to those of a host, of which the newest 50 are kept. Raise OSError."""
        line = json.dumps({"time": time.time(), "what": what, **fields}).encode() + b"\n"
        with self._locked():
            path = self._path(host)
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            if lines and not lines[-1].endswith(b"\n"):  # torn by a full disk
                lines.pop()
            write_atomically(path, b"".join([*lines[1 - _MOST_RECORDS :], line]), sync=False)

    def hosts(self) -> list[str]:
        """Return the names of all hosts that have records."""
        found = self.folder.glob("*.jsonl") if self.folder.is_dir() else ()
        return sorted(unquote(path.stem) for path in found)

    def of(self, host: str) -> list[dict[str, Any]]:
        """Return the records of a host, the oldest first. Damaged lines are left out with a warning."""
        found, damaged = [], 0
        with contextlib.suppress(OSError):  # no run depends on it
            for line in self._path(host).read_bytes().splitlines():
                try:
                    record = json.loads(line)
                    found.append({**record, "time": float(record["time"]), "what": str(record["what"])})
                except (ValueError, KeyError, TypeError):
                    damaged += 1
        if damaged:
            warn(f"{self._path(host)} is damaged: {damaged} of its lines are ignored; delete it")
        return found

    def checks(self, host: str, kind: str) -> list[Mapping[str, float]]:
        """Return the results of earlier deep checks of a host, while it was of this kind."""
        return [one["results"] for one in self.of(host) if one["what"] == "check" and one.get("kind") == kind]

    def troubles(self, host: str) -> list[dict[str, Any]]:
        """Return the troubles of the last days that were not forgiven, the oldest first."""
        found: list[dict[str, Any]] = []
        for record in self.of(host):
            if record["what"] == "forgiven":
                found.clear()
            elif record["what"] in TROUBLES and record["time"] > time.time() - KEPT_S:
                found.append(record)
        return found

    def latest_trouble(self, host: str) -> dict[str, Any] | None:
        """Return the last trouble of a host whose troubles make it a bad one, else None."""
        found = self.troubles(host)
        counts = {what: sum(one["what"] == what for one in found) for what in TROUBLES}
        counted = [one for one in found if counts[one["what"]] >= TROUBLES[one["what"]]]
        return counted[-1] if counted else None

    def _path(self, host: str) -> Path:
        return self.folder / f"{quote(host, safe='@:')}.jsonl"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _usual_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return Path(state if os.path.isabs(state) else os.path.expanduser("~/.local/state"), "distrain", "hosts")
