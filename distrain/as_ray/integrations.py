"""Ray's integrations of experiment trackers: callbacks become distrain's trackers. Runs in: coordinator, worker."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import distrain
from distrain.system.imports import require

_WITHOUT_EFFECT = ("excludes", "log_config", "upload_timeout", "registry_uri", "log_params_on_trial_end")
"""Arguments of Ray that choose what is logged about it; distrain's trackers log the config and all metrics."""
_RENAMED = {
    "dir": "directory", "experiment_name": "experiment", "save_artifact": "checkpoints",
    "upload_checkpoints": "checkpoints",
}  # fmt: skip
"""Arguments of Ray, and what distrain's trackers call them."""


def _tracker(kind: Any, **options: Any) -> Any:
    """Return a tracker that does what a callback does in Ray."""
    given = _without_secrets(options)
    return kind(**{_RENAMED.get(name, name): value for name, value in given.items() if name not in _WITHOUT_EFFECT})


wandb_callback = partial(_tracker, distrain.trackers.Wandb)
mlflow_callback = partial(_tracker, distrain.trackers.Mlflow)


def setup_wandb(config: dict[str, Any] | None = None, *, rank_zero_only: bool = True, **options: Any) -> Any:
    """Call ``wandb.init()`` on rank 0, named after the run; other ranks get a run that logs nothing."""
    wandb, context = require("wandb"), distrain.get_context()
    if rank_zero_only and context.get_world_rank() != 0:
        return wandb.init(mode="disabled")
    names = {"id": context.get_trial_id(), "name": context.get_trial_name(), "group": context.get_experiment_name()}
    return wandb.init(config=config, **{"resume": "allow", **names, **_without_secrets(options)})


def setup_mlflow(config: dict[str, Any] | None = None, *, rank_zero_only: bool = True, **options: Any) -> Any:
    """Start an MLflow run on rank 0, and return the module mlflow; other ranks get one that logs nothing."""
    mlflow, context = require("mlflow"), distrain.get_context()
    if rank_zero_only and context.get_world_rank() != 0:
        return MagicMock()
    options = _without_secrets(options)
    if uri := options.pop("tracking_uri", None):
        mlflow.set_tracking_uri(uri)
    name = options.pop("experiment_name", None) or context.get_experiment_name()
    mlflow.set_experiment(name)
    mlflow.start_run(**{"run_name": name, **options})
    mlflow.log_params(config or {})
    return mlflow


def _without_secrets(options: dict[str, Any]) -> dict[str, Any]:
    """Return Ray's arguments without keys and tokens, which are set as environment variables."""
    options = dict(options)
    file = options.pop("api_key_file", None)
    key = options.pop("api_key", None) if file is None else Path(file).expanduser().read_text().strip()
    token = options.pop("tracking_token", None)
    secrets = {"WANDB_API_KEY": key, "MLFLOW_TRACKING_TOKEN": token}
    os.environ.update({name: secret for name, secret in secrets.items() if secret is not None})
    return options
