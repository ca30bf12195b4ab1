"""The callbacks of XGBoost and LightGBM, on rank 0: what they report, and with which model."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distrain import lightgbm

FEATURES, TARGETS = np.arange(20.0).reshape(10, 2), np.arange(10.0)


def train_xgboost(rounds: int, callback: Any) -> None:
    xgboost = import_module("xgboost")
    rows = xgboost.DMatrix(FEATURES, TARGETS)
    parameters = {"eval_metric": ["rmse", "mae"], "max_depth": 2, "nthread": 1}
    xgboost.train(parameters, rows, rounds, evals=[(rows, "train")], verbose_eval=False, callbacks=[callback])


def train_lightgbm(rounds: int, callback: Any) -> None:
    rows = import_module("lightgbm").Dataset(FEATURES, TARGETS)
    parameters = {
        "metric": ["rmse", "mae"],
        "objective": "regression",
        "verbose": -1,
        "min_data_in_leaf": 1,
        "num_threads": 1,
    }
    import_module("lightgbm").train(
        parameters, rows, rounds, valid_sets=[rows], valid_names=["train"], callbacks=[callback]
    )


CASES: list[tuple[dict[str, Any], list[int], list[str]]] = [
    ({}, [5], []),
    ({"frequency": 2}, [2, 4, 5], []),
    ({"frequency": 5}, [5], []),
    ({"frequency": 2, "checkpoint_at_end": False}, [2, 4], []),
    ({"checkpoint_at_end": False, "metrics": "train-rmse"}, [], ["train-rmse"]),
    ({"metrics": {"loss": "train-rmse"}, "filename": "own.json"}, [5], ["loss"]),
    ({"metrics": ["train-rmse"], "results_postprocessing_fn": lambda found: {"n": len(found)}}, [5], ["n"]),
]
"""Options; the rounds that are reported with a model, of five; the names of the metrics, by default those of all."""


@pytest.mark.parametrize("package", ["xgboost", "lightgbm"])
def test_rounds_and_models_are_reported(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package)
    module = import_module(f"distrain.{package}")
    every = {"xgboost": ["train-rmse", "train-mae"], "lightgbm": ["train-rmse", "train-l1"]}[package]
    train = {"xgboost": train_xgboost, "lightgbm": train_lightgbm}[package]
    rounds_of = {"xgboost": "num_boosted_rounds", "lightgbm": "current_iteration"}[package]
    for options, with_models, names in CASES:
        metrics, models = [], []

        def record(found: dict[str, Any], checkpoint: Any = None, options: Any = options) -> None:
            metrics.append(found)
            if checkpoint is not None:
                model = module.RayTrainReportCallback.get_model(checkpoint, options.get("filename"))
                models.append(getattr(model, rounds_of)())

        monkeypatch.setattr(lightgbm, "report", record)
        monkeypatch.setattr(lightgbm, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 0))
        train(5, module.RayTrainReportCallback(**options))
        assert models == with_models, options
        assert {tuple(found) for found in metrics} == {tuple(names or every)}
        monkeypatch.setattr(lightgbm, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 1))
        train(5, module.RayTrainReportCallback(**options))
        assert models == with_models, "of rank 0 alone"
