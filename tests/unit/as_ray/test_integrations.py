"""Ray's callbacks for experiment trackers, which become distrain's trackers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from distrain import RunConfig, UserCallback
from distrain.trackers import Mlflow, TensorBoard, Wandb

if TYPE_CHECKING:
    from pathlib import Path


def test_callbacks_of_ray_become_trackers_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.air.integrations.mlflow import MLflowLoggerCallback
    from ray.air.integrations.wandb import WandbLoggerCallback
    from ray.tune.logger import JsonLoggerCallback, TBXLoggerCallback

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "key").write_text("secret\n")
    own = UserCallback()
    run = RunConfig(
        callbacks=[
            WandbLoggerCallback(project="p", api_key_file=str(tmp_path / "key"), log_config=True, tags=["a"], dir="d"),
            own,
            MLflowLoggerCallback(experiment_name="e", save_artifact=True),
            TBXLoggerCallback(),
            JsonLoggerCallback(),
        ]
    )
    assert run.trackers == [
        Wandb(project="p", tags=["a"], directory="d"),
        Mlflow(experiment="e", checkpoints=True),
        TensorBoard(),
    ]
    assert [one is own for one in run.callbacks or ()] == [True, False]
    assert os.environ.pop("WANDB_API_KEY") == "secret"


def test_other_objects_are_no_callbacks_as_before() -> None:
    with pytest.raises(TypeError, match=r"must be a list of distrain\.UserCallback or"):
        RunConfig(callbacks=[print])  # type: ignore[list-item]


def test_setup_in_train_func_names_what_to_use_instead() -> None:
    from ray.air.integrations import mlflow, wandb

    instead = r"--tracker, or call wandb\.init\(\) or mlflow\.start_run\(\) on rank 0"
    for module, name in ((wandb, "setup_wandb"), (mlflow, "setup_mlflow")):
        with pytest.raises(AttributeError, match=instead):
            getattr(module, name)
