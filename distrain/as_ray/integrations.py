"""Ray's integrations of experiment trackers: callbacks become distrain's trackers. Runs in: coordinator, worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from distrain.session import get_context
from distrain.system.imports import require
from distrain.trackers.mlflow import Mlflow
from distrain.trackers.wandb import Wandb

_WITHOUT_EFFECT = ("excludes", "log_config", "upload_timeout", "registry_uri", "log_params_on_trial_end")
"""Arguments of Ray that choose what is logged about it; distrain's trackers log the config and all metrics."""
_RENAMED = {
    "dir": "directory", "experiment_name": "experiment", "save_artifact": "checkpoints",
    "upload_checkpoints": "checkpoints",
}  # fmt: skip
"""Arguments of Ray, and what distrain's trackers call them."""


# -- callbacks -------------------------------------------------------------------------------------------------------


def wandb_callback(
    project: str | None = None, *, api_key_file: str | None = None, api_key: str | None = None, **options: Any
) -> Wandb:
    """Return the tracker that does what ``WandbLoggerCallback`` does in Ray."""
    _set_wandb_key(api_key, api_key_file)
    return Wandb(project=project, **_of_tracker(options))


def mlflow_callback(tracking_uri: str | None = None, *, tracking_token: str | None = None, **options: Any) -> Mlflow:
    """Return the tracker that does what ``MLflowLoggerCallback`` does in Ray."""
    _set_mlflow_token(tracking_token)
    return Mlflow(tracking_uri=tracking_uri, **_of_tracker(options))


def _of_tracker(options: dict[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(name, name): value for name, value in options.items() if name not in _WITHOUT_EFFECT}


# -- calls in train_func ---------------------------------------------------------------------------------------------


def setup_wandb(config: dict[str, Any] | None = None, *, rank_zero_only: bool = True, **options: Any) -> Any:
    """Call ``wandb.init()`` on rank 0, named after the run; other ranks get a run that logs nothing."""
    wandb, context = require("wandb"), get_context()
    if rank_zero_only and context.get_world_rank() != 0:
        return wandb.init(mode="disabled")
    _set_wandb_key(options.pop("api_key", None), options.pop("api_key_file", None))
    names = {"id": context.get_trial_id(), "name": context.get_trial_name(), "group": context.get_experiment_name()}
    return wandb.init(config=config, **{"resume": "allow", **names, **options})


def setup_mlflow(config: dict[str, Any] | None = None, *, rank_zero_only: bool = True, **options: Any) -> Any:
    """Start an MLflow run on rank 0, and return the module mlflow; other ranks get one that logs nothing."""
    mlflow, context = require("mlflow"), get_context()
    if rank_zero_only and context.get_world_rank() != 0:
        return MagicMock()
    _set_mlflow_token(options.pop("tracking_token", None))
    if uri := options.pop("tracking_uri", None):
        mlflow.set_tracking_uri(uri)
    name = options.pop("experiment_name", None) or context.get_experiment_name()
    if "experiment_id" not in options:
        mlflow.set_experiment(name)
    mlflow.start_run(**{"run_name": name, **options})
    mlflow.log_params(config or {})
    return mlflow


def _set_wandb_key(key: str | None, file: str | None) -> None:
    if file is not None:
        key = Path(file).expanduser().read_text().strip()
    if key is not None:
        os.environ["WANDB_API_KEY"] = key


def _set_mlflow_token(token: str | None) -> None:
    if token is not None:
        os.environ["MLFLOW_TRACKING_TOKEN"] = token
