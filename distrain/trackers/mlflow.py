"""MLflow. Runs in: coordinator."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distrain.api.tracker import Report, TrackedRun, Tracker
from distrain.storage.retention import flatten
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distrain.storage.checkpoint import Checkpoint

_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""MLflow takes no more of them at once."""
_LONGEST_PARAM, _LONGEST_NAME = 6000, 200
_BAD_PLACE = re.compile(r"[^\w\-. /]|(?<![^/])[./]|/$|^$")
"""Parts that MLflow refuses in names, which it takes for relative paths: such characters, and parts like ``..``."""
_ID = "distrain.id"
_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


@dataclass(kw_only=True)
class Mlflow(Tracker):
    """Log to MLflow. Credentials come from the environment, as MLflow documents.

    tracking_uri: the server, or a URI such as ``sqlite:///mlflow.db``; by default MLflow's own.
    experiment: the name of the experiment, which is created if there is none; by default MLflow's ``Default``.
    tags: further tags of the MLflow run.
    checkpoints: log the files of each checkpoint as artifacts.

    >>> Mlflow(tracking_uri="sqlite:///mlflow.db", experiment="mnist").experiment
    'mnist'
    """

    tracking_uri: str | None = None
    experiment: str | None = None
    tags: Mapping[str, str] | None = None
    checkpoints: bool = False

    package: ClassVar[str | None] = "mlflow"

    def start(self, run: TrackedRun) -> None:
        self._metric = require("mlflow.entities").Metric
        self._client = require("mlflow").MlflowClient(tracking_uri=self.tracking_uri)
        self._pending: list[Any] = []
        self._names: dict[str, str] = {}
        """The original of each name that MLflow knows."""
        if "run_id" not in run.state:
            run.state["run_id"] = self._create(run)
        self._run_id = run.state["run_id"]
        self._client.update_run(self._run_id, status="RUNNING")
        self._log_params(run.config)

    def _create(self, run: TrackedRun) -> str:
        name = self.experiment or "Default"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {**{f"distrain.{name}": value for name, value in run.tags.items()}, _ID: run.id, **(self.tags or {})}
        return str(self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id)

    def _log_params(self, config: Mapping[str, Any]) -> None:
        """Log the config. MLflow does not allow a param to change, so the first value of each is kept."""
        param = require("mlflow.entities").Param
        known = self._client.get_run(self._run_id).data.params
        flat = {self._clean(name): str(value)[:_LONGEST_PARAM] for name, value in flatten(config).items()}
        self._send("params", [param(name, value) for name, value in flat.items() if name not in known], _MOST_PARAMS)

    def log(self, report: Report) -> None:
        moment = int(report.time * 1000)
        self._pending += [
            self._metric(self._clean(name), value, moment, report.step) for name, value in report.metrics.items()
        ]

    def flush(self) -> None:
        """Send the metrics. A database ignores those that it has already."""
        self._send("metrics", self._pending, _MOST_METRICS)
        self._pending = []

    def _send(self, kind: str, items: list[Any], most: int) -> None:
        """Send params or metrics, so many at once."""
        for first in range(0, len(items), most):
            self._client.log_batch(self._run_id, **{kind: items[first : first + most]})

    def _clean(self, name: str) -> str:
        """Return a name with ``_`` for what MLflow does not allow, cut if it is long, or longer if that is taken."""
        cleaned = _BAD_PLACE.sub("_", name)[:_LONGEST_NAME]
        while self._names.setdefault(cleaned, name) != name:
            cleaned += "_"
        return cleaned

    def checkpoint(self, checkpoint: Checkpoint, step: int) -> None:
        with checkpoint.as_directory() as folder:
            self._client.log_artifacts(self._run_id, str(folder), artifact_path=Path(str(checkpoint.path)).name)

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run_id, _STATUSES.get(status, "FAILED"))
