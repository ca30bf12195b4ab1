"""run.json: the settings, hosts, times and outcome of a run and its attempts. Runs in: coordinator."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from distrain.decisions.blame import culprit_first
from distrain.decisions.events import AllTrain, AttemptEnded, AttemptStarts, WorkersStart
from distrain.decisions.hearing import hears
from distrain.storage.paths import read_manifest
from distrain.system.stacks import raised_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distrain.coordinator.store.run_store import RunStore

_DIED = "the process that called fit() died"
"""Failure of an attempt whose end no process recorded."""


class RunManifest:
    """The manifest of one run in its directory. Times are seconds since 1970.

    Attributes: ``before``, the manifest that an earlier ``fit()`` of this run has left, ``{}`` if there is none;
    ``exit_code``, with which `distrain run` ends. known: returns the facts that do not change, once they are known.
    """

    def __init__(
        self, store: RunStore, *, run_id: str, configs: Mapping[str, Any], known: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.before = read_manifest(store.paths.root)
        self._store = store
        self._run_id = run_id
        self.skip_to: dict[str, Any] = self.before.get("skip_to", {})
        """After a rollback without a checkpoint: up to where rows are left out while the run has none."""
        self.exit_code: int | None = None
        self._configs = configs
        self._known = known
        self._started = time.time()
        self._attempts: list[dict[str, Any]] = [
            {**attempt, "failure": _DIED} if attempt.get("ended", 0) is None else attempt
            for attempt in self.before.get("attempts", [])
        ]
        self.first_attempt: int = self._attempts[-1]["attempt"] + 1 if self._attempts else 0
        """Number of the first attempt of this ``fit()``. Attempts of an earlier one keep their numbers."""

    @property
    def stale_id(self) -> str | None:
        """The id of processes that the earlier ``fit()`` may have left, because its own process died."""
        return self.before.get("run_id") if self.before.get("status") == "running" else None

    def write(self, status: str) -> None:
        """Write the manifest now. Raises OSError.

        status: running, finished, failed or stopped.
        """
        self._store.write_manifest(self._contents(status))

    def _contents(self, status: str) -> dict[str, Any]:
        return {
            "name": self._store.location.name,
            "run_id": self._run_id,
            "status": status,
            "exit_code": self.exit_code,
            "started": self.before.get("started", self._started),
            "continued": self._started if self.before else None,
            "updated": time.time(),
            "attempts": [dict(attempt) for attempt in self._attempts],
            **({"skip_to": self.skip_to} if self.skip_to else {}),
            **self._known(),
            **self._configs,
        }

    @hears(AttemptStarts)
    def on_attempt(self, _: str, starts: AttemptStarts) -> None:
        """Note the hosts of an attempt."""
        attempt, plan = starts.attempt, starts.plan
        hosts = {host: [rank.rank for rank in plan.on(host)] for host in plan.hosts}
        begun = {"attempt": attempt, "started": time.time(), "training": None, "ended": None, "hosts": hosts}
        self._attempts.append({**begun, "checkpoint": None, "first_step": 0, "failure": None})
        self._store.write_manifest_later(self._contents("running"))

    @hears(WorkersStart)
    def on_workers_start(self, _: str, starts: WorkersStart) -> None:
        """Note the checkpoint from which the attempt begins."""
        now, latest = self._attempts[-1], self._store.ledger.latest
        if latest is not None:
            now["checkpoint"], now["first_step"] = latest.path.name, latest.step

    @hears(AllTrain)
    def on_all_train(self, _: str, event: AllTrain) -> None:
        """Note that every rank has begun train_func."""
        self._attempts[-1]["training"] = time.time()
        self._store.write_manifest_later(self._contents("running"))

    @hears(AttemptEnded)
    def on_attempt_end(self, _: str, ended: AttemptEnded) -> None:
        """Note the end of an attempt, to be written with the next attempt or at the end of the run."""
        self._attempts[-1]["ended"] = time.time()
        if ended.why is not None:
            self._attempts[-1]["planned_end" if ended.is_planned else "failure"] = ended.why
            if ended.is_planned:
                self._store.append_event("growth", attempt=ended.attempt, why=ended.why)
        elif ended.failures:
            culprit = culprit_first(ended.failures)[0]
            place = f" ({at})" if (at := raised_at(culprit.traceback)) else ""
            self._attempts[-1]["failure"] = f"rank {culprit.rank} on {culprit.host}: {culprit.summary}{place}"
