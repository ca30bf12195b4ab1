"""Ray's callbacks for experiment trackers, which become distrain's trackers."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import MagicMock, call

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


@pytest.mark.parametrize("rank", [0, 1])
def test_setup_starts_a_run_on_rank_0(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.air.integrations.mlflow import setup_mlflow
    from ray.air.integrations.wandb import setup_wandb

    names = {"get_trial_id": "i", "get_trial_name": "t", "get_experiment_name": "e", "get_world_rank": rank}
    context = SimpleNamespace(**{name: lambda value=value: value for name, value in names.items()})
    wandb, mlflow = MagicMock(), MagicMock()
    monkeypatch.setattr("distrain.get_context", lambda: context, raising=False)
    monkeypatch.setattr("distrain.as_ray.integrations.require", {"wandb": wandb, "mlflow": mlflow}.get)
    setup_wandb({"lr": 1}, project="p")
    started = {"config": {"lr": 1}, "resume": "allow", "id": "i", "name": "t", "group": "e", "project": "p"}
    wandb.init.assert_called_once_with(**(started if rank == 0 else {"mode": "disabled"}))
    with setup_mlflow({"lr": 1}, run_name="r", tags={"a": "b"}).start_run(nested=True):
        pass
    assert mlflow.set_experiment.called == (rank == 0)
    assert (call(run_name="r", tags={"a": "b"}) in mlflow.start_run.mock_calls) == (rank == 0)
