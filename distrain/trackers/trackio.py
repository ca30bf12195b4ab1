"""Trackio. Runs in: coordinator."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from distrain.api.tracker import Tracker
from distrain.system.imports import require

if TYPE_CHECKING:
    from distrain.api.tracker import Report, TrackedRun


_WRITE_S = 30.0
"""Seconds that Trackio's thread has to write reports."""
_LOOK_S = 0.05


@dataclass(kw_only=True)
class Trackio(Tracker):
    """Log to Trackio. Its run is called like the run of distrain, with a part of its id.

    project, space_id, group: as for ``trackio.init()``.
    ranks: 0, or ``"all"``: then metrics are called ``rank_3/loss``.

    >>> Trackio(project="mnist").project
    'mnist'
    """

    project: str = "distrain"
    space_id: str | None = None
    group: str | None = None
    ranks: Literal[0, "all"] = 0

    package: ClassVar[str | None] = "trackio"

    def start(self, run: TrackedRun) -> None:
        self._run = require("trackio").init(
            project=self.project,
            name=f"{run.name}-{run.id[:6]}",
            group=self.group,
            space_id=self.space_id,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # Where this process has died before its progress was saved, Trackio may know more reports.
        self._first_step = getattr(self._run, "_next_step", 0) if self.ranks == 0 else 0
        self._last_step = 0

    def log(self, report: Report) -> None:
        if report.step < self._first_step or not report.metrics:
            return
        prefix = "" if self.ranks == 0 else f"rank_{report.rank}/"
        self._run.log({f"{prefix}{name}": value for name, value in report.metrics.items()}, step=report.step)
        self._last_step = max(self._last_step, report.step)

    def flush(self) -> None:
        """Wait until Trackio's thread has written the reports to its database on this machine, if it uses one."""
        if not getattr(self._run, "_is_local", False):
            return
        database, deadline = require("trackio.sqlite_storage").SQLiteStorage, time.monotonic() + _WRITE_S
        while (database.get_last_step(self.project, run=self._run.name) or 0) < self._last_step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"Trackio has not written its reports within {_WRITE_S:g} s")
            time.sleep(_LOOK_S)

    def finish(self, status: str) -> None:
        self._run.finish()
