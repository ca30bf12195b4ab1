"""Ray's integrations of experiment trackers: callbacks become distrain's trackers. Runs in: coordinator, worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distrain.session import get_context
from distrain.system.imports import require
from distrain.trackers.mlflow import Mlflow
from distrain.trackers.wandb import Wandb

_WITHOUT_EFFECT = ("excludes", "log_config", "upload_timeout", "registry_uri", "log_params_on_trial_end")
"""Arguments of Ray that choose what is logged about it; distrain's trackers log the config and all metrics."""


# -- callbacks -------------------------------------------------------------------------------------------------------


def wandb_callback(
    project: str | None = None,
    group: str | None = None,
    api_key_file: str | None = None,
    api_key: str | None = None,
    upload_checkpoints: bool = False,
    **options: Any,
) -> Wandb:
    """Return the tracker that does what ``WandbLoggerCallback`` does in Ray."""
    _set_wandb_key(api_key, api_key_file)
    options = _with_effect(options)
    if folder := options.pop("dir", None):
        options["directory"] = folder
    return Wandb(project=project, group=group, checkpoints=upload_checkpoints, **options)


def mlflow_callback(
    tracking_uri: str | None = None,
    *,
    experiment_name: str | None = None,
    tags: dict[str, str] | None = None,
    tracking_token: str | None = None,
    save_artifact: bool = False,
    **options: Any,
) -> Mlflow:
    """Return the tracker that does what ``MLflowLoggerCallback`` does in Ray."""
    _set_mlflow_token(tracking_token)
    options = _with_effect(options)
    return Mlflow(
        tracking_uri=tracking_uri, experiment=experiment_name, tags=tags, checkpoints=save_artifact, **options
    )


def _with_effect(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}


# -- calls in train_func ---------------------------------------------------------------------------------------------


def setup_wandb(
    config: dict[str, Any] | None = None,
    api_key: str | None = None,
    api_key_file: str | None = None,
    rank_zero_only: bool = True,
    **options: Any,
) -> Any:
    """Call ``wandb.init()`` on rank 0, named after the run; other ranks get a run that logs nothing."""
    wandb, context = require("wandb"), get_context()
    if rank_zero_only and context.get_world_rank() != 0:
        return wandb.init(mode="disabled")
    _set_wandb_key(api_key, api_key_file)
    names = {
        "id": options.pop("trial_id", None) or context.get_trial_id(),
        "name": options.pop("trial_name", None) or context.get_trial_name(),
    }
    options.setdefault("group", context.get_experiment_name())
    options.setdefault("project", os.environ.get("WANDB_PROJECT_NAME"))
    return wandb.init(config=config, **{"resume": "allow", **names, **options})


def setup_mlflow(
    config: dict[str, Any] | None = None,
    tracking_uri: str | None = None,
    registry_uri: str | None = None,
    experiment_id: str | None = None,
    experiment_name: str | None = None,
    tracking_token: str | None = None,
    run_name: str | None = None,
    tags: dict[str, str] | None = None,
    rank_zero_only: bool = True,
    **options: Any,
) -> Any:
    """Start an MLflow run on rank 0, and return the module mlflow; other ranks get one that logs nothing."""
    mlflow, context = require("mlflow"), get_context()
    if rank_zero_only and context.get_world_rank() != 0:
        return _Nothing()
    _set_mlflow_token(tracking_token)
    if tracking_uri:
        mlflow.set_tracking_uri(tracking_uri)
    if registry_uri:
        mlflow.set_registry_uri(registry_uri)
    name = experiment_name or context.get_experiment_name()
    mlflow.set_experiment(experiment_id=experiment_id) if experiment_id else mlflow.set_experiment(name or "Default")
    mlflow.start_run(run_name=run_name or name, tags=tags)
    mlflow.log_params(config or {})
    return mlflow


class _Nothing:
    """A module whose functions do nothing."""

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __call__(self, *args: object, **options: object) -> None:
        """Do nothing."""


def _set_wandb_key(key: str | None, file: str | None) -> None:
    if file is not None:
        key = Path(file).expanduser().read_text().strip()
    if key is not None:
        os.environ["WANDB_API_KEY"] = key


def _set_mlflow_token(token: str | None) -> None:
    if token is not None:
        os.environ["MLFLOW_TRACKING_TOKEN"] = token
