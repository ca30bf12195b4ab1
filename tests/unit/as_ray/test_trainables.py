"""The function of a trial, which ``RunConfig(stop=...)`` ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distrain.api import current
from distrain.as_ray.tune.tuner import _Function, report


@pytest.mark.parametrize(
    ("stop", "reports"),
    [({}, 9), ({"training_iteration": 4}, 4), ({"nested/i": 1, "loss": 99}, 2)],
)
def test_a_trial_ends_after_the_report_that_is_enough(
    stop: dict[str, float], reports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    session = SimpleNamespace(report=lambda metrics, *args, **named: reported.append(metrics))
    monkeypatch.setattr(current, "session", session)

    def train(config: dict[str, Any]) -> None:
        for i in range(9):
            report({"nested": {"i": i}, "loss": -i})

    assert _Function(train, stop)({}) is None
    assert len(reported) == reports


def test_stop_is_for_trials_by_all_names_of_the_config(tmp_path: Any) -> None:
    import ray.air  # type: ignore[import-not-found, unused-ignore]
    import ray.air.config
    import ray.train.torch
    import ray.tune

    configs = ray.air.RunConfig, ray.air.config.RunConfig, ray.train.RunConfig, ray.tune.RunConfig
    assert [config(stop={"loss": 3}).stop for config in configs] == [{"loss": 3}] * 4
    config = ray.air.RunConfig("name", storage_path=str(tmp_path), stop={"loss": 3})
    assert (config.name, config.storage_path, config.stop) == ("name", str(tmp_path), {"loss": 3})
    with pytest.raises(TypeError, match=r"RunConfig.stop must be a dict or None, got 3"):
        ray.air.RunConfig(stop=3)
    with pytest.raises(TypeError, match=r"RunConfig\(stop=...\) is not for trainers: exit the loop in train_func"):
        ray.train.torch.TorchTrainer(print, run_config=config)
