"""Names that MLflow would refuse are changed. MLflow itself is a fake: it is seldom installed."""

from __future__ import annotations

import posixpath
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from distrain.api.tracker import Report, TrackedRun
from distrain.trackers import Mlflow

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Client:
    logged: dict[str, Any]

    def __init__(self, tracking_uri: str | None) -> None:
        type(self).logged = {}

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="0")

    def create_run(self, experiment: str, **options: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(params={}))

    def update_run(self, run_id: str, status: str) -> None: ...

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        """Log all, or nothing. These are the conditions of its oldest versions."""
        for item in (*metrics, *params):
            assert re.fullmatch(r"[/\w.\- ]*", item.key)
            assert len(item.key) <= 250
            plain = posixpath.normpath(item.key)
            assert plain == item.key != "."
            assert not plain.startswith(("..", "/"))
        self.logged.update({item.key: item.value for item in (*metrics, *params)})


def entity(key: str, value: Any, *others: Any) -> Any:
    return SimpleNamespace(key=key, value=value)


def test_what_mlflow_refuses_in_names_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    contents: dict[str, dict[str, Any]] = {
        "mlflow": {"MlflowClient": Client},
        "mlflow.entities": {"Metric": entity, "Param": entity},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    tracker = Mlflow()
    config = {"lr": 0.1, "optim//beta": 0.9}
    tracker.start(TrackedRun(id="i", name="n", directory=tmp_path, location="l", config=config, tags={}))
    expected = {
        "loss": "loss",
        "val//loss": "val/_loss",
        "acc(1)": "acc_1_",
        "acc[1]": "acc_1__",
        "/loss": "_loss",
        "loss/": "loss_",
        "a/../b": "a/_./b",
        "a/./b": "a/_/b",
        "..": "_.",
        ".": "_",
        "": "__",
        "v1.5/top-5 é": "v1.5/top-5 é",
        "a:b": "a_b",
        "x" * 251: "x" * 200,
        "x" * 252: "x" * 200 + "_",
    }
    for step in (1, 2):
        metrics = {name: float(number) for number, name in enumerate(expected)}
        tracker.log(Report(step=step, time=0.0, attempt=0, metrics=metrics))
        tracker.flush()
    sent = {name: float(number) for number, name in enumerate(expected.values())}
    assert Client.logged == {"lr": "0.1", "optim/_beta": "0.9", **sent}
