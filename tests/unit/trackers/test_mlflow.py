"""Names that MLflow refuses do not keep it from all others. MLflow itself is a fake: it is seldom installed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distrain.api.tracker import Report, TrackedRun
from distrain.trackers import Mlflow

if TYPE_CHECKING:
    from pathlib import Path


class RefusalError(Exception):
    error_code = "INVALID_PARAMETER_VALUE"


class Client:
    logged: dict[str, Any]

    def __init__(self, tracking_uri: str | None) -> None:
        type(self).logged = {}
        self.is_down = False

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="0")

    def create_run(self, experiment: str, **options: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(params={}))

    def update_run(self, run_id: str, status: str) -> None: ...

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        """Log all, or nothing, as MLflow does."""
        if self.is_down:
            error = RefusalError("the server is down")
            error.error_code = "TEMPORARILY_UNAVAILABLE"
            raise error
        for item in (*metrics, *params):
            if "//" in item.key:
                raise RefusalError(f"Invalid value {item.key}\n for a name")
        self.logged.update({item.key: item.value for item in (*metrics, *params)})


def entity(key: str, value: Any, *others: Any) -> Any:
    return SimpleNamespace(key=key, value=value)


def test_a_name_that_mlflow_refuses_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, contents in {
        "mlflow": {"MlflowClient": Client},
        "mlflow.entities": {"Metric": entity, "Param": entity},
        "mlflow.exceptions": {"MlflowException": RefusalError},
    }.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    tracker = Mlflow()
    config = {"lr": 0.1, "optim//beta": 0.9}
    tracker.start(TrackedRun(id="i", name="n", directory=tmp_path, location="l", config=config, tags={}))
    for step in (1, 2):
        metrics = {"loss": 0.5, "val//loss": 1.0, "acc(1)": 1.0, "acc[1]": 2.0}
        tracker.log(Report(step=step, time=0.0, attempt=0, metrics=metrics))
        tracker.flush()
    assert Client.logged == {"lr": "0.1", "loss": 0.5, "acc_1_": 1.0, "acc_1__": 2.0}
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(", but all else")[0] for line in lines] == [
        f"distrain: MLflow does not get {name}" for name in ("'optim//beta'", "'val//loss'")
    ]
    tracker._client.is_down = True
    tracker.log(Report(step=3, time=0.0, attempt=0, metrics={"loss": 0.5}))
    with pytest.raises(RefusalError, match="the server is down"):
        tracker.flush()
