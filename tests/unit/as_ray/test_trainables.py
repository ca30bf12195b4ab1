"""The function of a trial, which ``RunConfig(stop=...)`` ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distrain.api import current
from distrain.as_ray.tune.trainables import Function, report

if TYPE_CHECKING:
    from collections.abc import Callable


def enough(trial_id: str, metrics: dict[str, Any]) -> bool:
    return trial_id == "mine" and metrics["nested/i"] == 2


@pytest.mark.parametrize(
    ("stop", "reports"),
    [(None, 9), ({"training_iteration": 4}, 4), ({"nested/i": 1, "loss": 99}, 2), (enough, 3)],
)
def test_a_trial_ends_after_the_report_that_is_enough(
    stop: dict[str, float] | Callable[..., bool] | None, reports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    context = SimpleNamespace(get_trial_id=lambda: "mine")
    session = SimpleNamespace(report=lambda metrics, *args, **named: reported.append(metrics), context=context)
    monkeypatch.setattr(current, "session", session)

    def train(config: dict[str, Any]) -> None:
        for i in range(9):
            report({"nested": {"i": i}, "loss": -i})

    assert Function(train, stop)({}) is None
    assert len(reported) == reports


def test_stop_is_for_trials_by_all_names_of_the_config(tmp_path: Any) -> None:
    import ray.air  # type: ignore[import-not-found, unused-ignore]
    import ray.air.config
    import ray.train.torch
    import ray.tune

    configs = ray.air.RunConfig, ray.air.config.RunConfig, ray.train.RunConfig, ray.tune.RunConfig
    assert [config(stop={"loss": 3}).stop for config in configs] == [{"loss": 3}] * 4
    config = ray.air.RunConfig("name", str(tmp_path), stop=enough)
    assert (config.name, config.storage_path, config.stop) == ("name", str(tmp_path), enough)
    with pytest.raises(TypeError, match=r"RunConfig.stop must be a dict or a function or None, got 3"):
        ray.air.RunConfig(stop=3)
    with pytest.raises(TypeError, match=r"RunConfig\(stop=...\) is not for trainers: exit the loop in train_func"):
        ray.train.torch.TorchTrainer(enough, run_config=config)
