"""Ray's integrations of experiment trackers: callbacks become distrain's trackers. Runs in: coordinator."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import distrain

_WITHOUT_EFFECT = ("excludes", "log_config", "upload_timeout", "registry_uri", "log_params_on_trial_end")
"""Arguments of Ray that choose what is logged about it; distrain's trackers log the config and all metrics."""
_RENAMED = {
    "dir": "directory", "experiment_name": "experiment", "save_artifact": "checkpoints",
    "upload_checkpoints": "checkpoints",
}  # fmt: skip
"""Arguments of Ray, and what distrain's trackers call them."""


def _tracker(kind: Any, **options: Any) -> Any:
    """Return a tracker that does what a callback does in Ray. Keys and tokens are set as environment variables."""
    file = options.pop("api_key_file", None)
    key = options.pop("api_key", None) if file is None else Path(file).expanduser().read_text().strip()
    secrets = {"WANDB_API_KEY": key, "MLFLOW_TRACKING_TOKEN": options.pop("tracking_token", None)}
    os.environ.update({name: secret for name, secret in secrets.items() if secret is not None})
    return kind(**{_RENAMED.get(name, name): value for name, value in options.items() if name not in _WITHOUT_EFFECT})


wandb_callback = partial(_tracker, distrain.trackers.Wandb)
mlflow_callback = partial(_tracker, distrain.trackers.Mlflow)
