"""The pickled work of a run. Runs in: coordinator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The pickled work, the modules to import before the fork, and a warning about its size, if there is one."""

    blob: bytes
    preload: tuple[str, ...] = ()
    warning: str | None = None
