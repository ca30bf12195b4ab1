"""Findings of the user's runs and checks about hosts, in one small file. Runs in: coordinator.

::

    $XDG_STATE_HOME/distrain/hosts.json, else ~/.local/state/distrain/hosts.json
        troubles    what was wrong in the last days: time, host, what (one of TROUBLES), text, run
        checks      by host: kind and results of its latest deep checks

A trouble makes a host a bad one: it was lost, its GPU has failed, or it was slow, as measured in a deep check or in a
run. The end of a rank is not a trouble: crashes, hangs and lack of memory are usually caused by what it runs. Entries
of a newer version are ignored, but kept.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.storage.files import write_atomically
from distrain.storage.lock_probe import lock_alone
from distrain.system.log import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

KEPT_S = 7 * 86400.0
"""Seconds for which a trouble is remembered."""
TROUBLES = ("lost", "GPU", "slow")
_NUMBER = (int, float)
_TROUBLE = {"host": str, "time": _NUMBER, "what": str, "text": str, "run": str}
_LOCK_S = 10.0  # to wait for another process that is changing the file
_MOST_TROUBLES, _MOST_CHECKS = 1000, 20


@dataclass(slots=True)
class HostRecords:
    """Troubles and deep checks of hosts, the oldest first. others: entries of a newer version, to be kept."""

    troubles: list[dict[str, Any]] = field(default_factory=list)
    checks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

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
        return {one["host"]: one for one in self.troubles if one["what"] in TROUBLES}


def read_records() -> HostRecords:
    """Return what is known. Damaged and unknown entries are ignored, with a warning: nothing depends on them."""
    path = _path()
    try:
        others = dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return HostRecords()
    except (OSError, ValueError, TypeError, RecursionError) as error:
        warn_once(f"{path} is damaged, and ignored: {error}; delete it")
        return HostRecords()
    troubles, checks = others.pop("troubles", []), others.pop("checks", {})
    known = [one for one in troubles if _fits(one, _TROUBLE)] if isinstance(troubles, list) else []
    checked = {host: of for host, of in checks.items() if _are_checks(of)} if isinstance(checks, dict) else {}
    if others or checked != checks or known != troubles or any(one["what"] not in TROUBLES for one in known):
        warn_once(f"{path} has entries that this version of distrain does not know; it ignores them")
    now = time.time()  # a wrong clock may have written a time in the future
    return HostRecords([one for one in known if now - KEPT_S < one["time"] < now + KEPT_S], checked, others)


def _are_checks(of: Any) -> bool:
    kinds = {"kind": str, "results": dict}
    return isinstance(of, list) and all(
        _fits(one, kinds) and _fits(one["results"], dict.fromkeys(one["results"], _NUMBER)) for one in of
    )


def _fits(value: Any, kinds: Mapping[str, Any]) -> bool:
    """Return whether a value from the file is an object whose fields are of these kinds."""
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in kinds.items())


def change_records(change: Callable[[HostRecords], None]) -> None:
    """Change what is known. A file that cannot be written is a warning."""
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            lock_alone(lock.fileno(), time.monotonic() + _LOCK_S)
            records = read_records()
            change(records)
            del records.troubles[:-_MOST_TROUBLES]
            known = asdict(records)
            write_atomically(path, json.dumps({**known.pop("others"), **known}).encode(), sync=False)
    except OSError as error:
        warn_once(f"what was found out about hosts is not kept in {path}: {error}")


def _path() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return Path(state if os.path.isabs(state) else os.path.expanduser("~/.local/state"), "distrain", "hosts.json")
