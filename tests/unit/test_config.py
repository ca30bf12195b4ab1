"""Every bad value is a TypeError or ValueError that names the field; every good one is kept."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from distrain.api.config import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig

BAD_TYPES: list[tuple[type, str, Any]] = [
    (FailureConfig, "nan_metric", 3),
    (ScalingConfig, "num_workers", True),
    (ScalingConfig, "use_gpu", 1),
    (ScalingConfig, "resources_per_worker", {"CPU": True}),
    (ScalingConfig, "accelerator_type", 100),
    (ScalingConfig, "hosts", ["a:4", 4]),
    (ScalingConfig, "hostfile", 4),
    (ScalingConfig, "transport", 4),
    (ScalingConfig, "ssh_args", [22]),
    (LoggingConfig, "log_level", 20),
    (LoggingConfig, "ranks", 0),
    (RunConfig, "callbacks", [print]),
    (RunConfig, "trackers", "tensorboard"),
    (RunConfig, "on_end", ["notify-send", "done"]),
    (RunConfig, "logging_config", "INFO"),
    (RunConfig, "worker_runtime_env", {"env_vars": {"A": 1}}),
    (FailureConfig, "retry_same_failure", 1),
    (FailureConfig, "hang_timeout_s", True),
    (FailureConfig, "host_lease_s", "15"),
    (FailureConfig, "host_wait_s", None),
    (FailureConfig, "max_failures", False),
    (CheckpointConfig, "num_to_keep", True),
    (CheckpointConfig, "checkpoint_score_attribute", ("eval", "loss")),
    (CheckpointConfig, "checkpoint_ranks", [True]),
    (RunConfig, "name", 3),
    (RunConfig, "storage_path", b"/tmp"),
    (RunConfig, "storage_filesystem", "s3"),
    (RunConfig, "log_dir", 3),
    (RunConfig, "failure_config", {"max_failures": 3}),
    (RunConfig, "checkpoint_config", FailureConfig()),
    (RunConfig, "shipping_config", {"enabled": False}),
    (RunConfig, "stop_signals", "SIGTERM"),
    (FailureConfig, "peer_failure_grace_s", "5"),
]

BAD_VALUES: list[tuple[type, str, Any]] = [
    (ScalingConfig, "num_workers", (3, 2)),
    (ScalingConfig, "num_workers", (1, 2, 3)),
    (LoggingConfig, "log_level", "LOUD"),
    (LoggingConfig, "ranks", [-1]),
    (RunConfig, "name", "ü" * 121),
    (RunConfig, "progress", "loud"),
    (RunConfig, "debug_rank", -1),
    (ScalingConfig, "resources_per_worker", {"TPU": 1}),
    (ScalingConfig, "resources_per_worker", {"memory": math.inf}),
    (ScalingConfig, "resources_per_worker", {"GPU": 1.5}),
    (ScalingConfig, "start_method", "fork"),
    (FailureConfig, "on_nan", "warn"),
    (FailureConfig, "max_rollbacks", -2),
    (FailureConfig, "on_divergence", "restart"),
    (FailureConfig, "divergence_every", 0),
    (CheckpointConfig, "memory_every", 0),
    (CheckpointConfig, "storage_every_s", -1),
    (ScalingConfig, "numa_binding", "socket"),
    (ScalingConfig, "interface", "ib0, eth1"),
    (ScalingConfig, "grow", "checkpoint"),
    (ScalingConfig, "hosts", ["a:4", "a:2"]),
    (FailureConfig, "max_failures", -2),
    (FailureConfig, "backoff_s", -1),
    (FailureConfig, "hang_report_s", math.nan),
    (FailureConfig, "host_lease_s", 0.5),
    (CheckpointConfig, "num_to_keep", 0),
    (CheckpointConfig, "checkpoint_score_attribute", "eval/loss"),
    (CheckpointConfig, "checkpoint_score_order", "lowest"),
    (CheckpointConfig, "checkpoint_ranks", []),
    (CheckpointConfig, "checkpoint_ranks", [0, -1]),
    (CheckpointConfig, "missing_rank_s", -1),
    (RunConfig, "name", ""),
    (RunConfig, "name", "a/b"),
    (RunConfig, "log_dir", ""),
    (RunConfig, "log_dir", "gs://bucket/logs"),
    (RunConfig, "stop_grace_s", -0.1),
    (RunConfig, "stop_signals", ["SIGKILL"]),
]

GOOD_VALUES: list[tuple[type, str, Any]] = [
    (ScalingConfig, "num_workers", 0),
    (ScalingConfig, "num_workers", (1, 8)),
    (RunConfig, "worker_runtime_env", {"env_vars": None, "pip": None, "working_dir": ""}),
    (RunConfig, "name", "x" * 240),
    (ScalingConfig, "resources_per_worker", {"CPU": 0.5, "memory": 1e9}),
    (ScalingConfig, "interface", "ib0,enp5s0f0np0.100"),
    (FailureConfig, "max_failures", -1),
    (CheckpointConfig, "checkpoint_ranks", "all"),
    (CheckpointConfig, "checkpoint_ranks", (0, 1)),
    (RunConfig, "name", "a name. with-everything_"),
    (RunConfig, "storage_path", "~/runs"),
    (RunConfig, "stop_grace_s", None),
    (RunConfig, "stop_signals", ["SIGTERM", "SIGUSR1"]),
]


def named(case: tuple[type, str, Any]) -> str:
    return f"{case[0].__name__}.{case[1]}={case[2]!r}"


@pytest.mark.parametrize(("config", "field", "value"), BAD_TYPES, ids=map(named, BAD_TYPES))
def test_a_bad_type_is_a_type_error_that_names_the_field(config: type, field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{config.__name__}.*{field}.* must be "):
        config(**{field: value})


@pytest.mark.parametrize(("config", "field", "value"), BAD_VALUES, ids=map(named, BAD_VALUES))
def test_a_bad_value_is_a_value_error_that_names_the_field(config: type, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{config.__name__}.*{field}"):
        config(**{field: value})


@pytest.mark.parametrize(("config", "field", "value"), GOOD_VALUES, ids=map(named, GOOD_VALUES))
def test_a_good_value_is_kept(config: type, field: str, value: Any) -> None:
    assert getattr(config(**{field: value}), field) == value


def test_every_field_has_a_bad_value_here() -> None:
    """A new field needs a check, and a row above."""
    tested = {(config, field) for config, field, _ in BAD_TYPES + BAD_VALUES}
    for config in (ScalingConfig, FailureConfig, CheckpointConfig, RunConfig):
        assert {(config, field.name) for field in dataclasses.fields(config)} <= tested


def test_none_means_the_default_config() -> None:
    config = RunConfig(failure_config=None, checkpoint_config=None)  # type: ignore[arg-type]
    assert config.failure_config == FailureConfig()
    assert config.checkpoint_config == CheckpointConfig()


@pytest.mark.parametrize(
    ("use_gpu", "resources", "gpus"),
    [(False, None, 0), (True, None, 1), (True, {"CPU": 2}, 1), (True, {"GPU": 0.5}, 0.5), (True, {"GPU": 4}, 4)],
)
def test_gpus_per_worker(use_gpu: bool, resources: dict[str, float] | None, gpus: float) -> None:
    assert ScalingConfig(use_gpu=use_gpu, resources_per_worker=resources).gpus_per_worker == gpus


def test_growth_needs_a_range_of_workers() -> None:
    with pytest.raises(ValueError, match=r"num_workers=\(min, max\) instead of 4"):
        ScalingConfig(num_workers=4, grow="checkpoint")
    assert ScalingConfig(num_workers=(2, 4), grow="checkpoint").max_workers == 4


def test_use_gpu_with_no_gpu_each_is_refused() -> None:
    with pytest.raises(ValueError, match="drop one of the two"):
        ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0})


def test_gpus_without_use_gpu_are_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="set use_gpu=True"):
        ScalingConfig(resources_per_worker={"GPU": 1})


# -- names of Ray ----------------------------------------------------------------------------------------------------


def test_of_rays_runtime_environment_the_variables_are_used_and_the_rest_is_said() -> None:
    with pytest.warns(UserWarning, match="worker_runtime_env: no effect for conda, pip") as warned:
        run = RunConfig(worker_runtime_env={"env_vars": {"A": "1"}, "pip": ["requests"], "conda": "base"})
    assert run.env_vars == {"A": "1"}
    assert [warning.filename for warning in warned] == [__file__]


def test_an_accelerator_among_the_resources_is_the_accelerator_type() -> None:
    """As Ray has it. Two products are an error."""
    t4 = {"accelerator_type:T4": 0.001}
    both = [
        ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 2, **t4}, accelerator_type=a) for a in (None, "T4")
    ]
    assert both == [ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 2}, accelerator_type="T4")] * 2
    assert ScalingConfig(resources_per_worker=dict.fromkeys(t4, 0)).accelerator_type is None
    with pytest.raises(ValueError, match="names a GPU; set use_gpu=True"):
        ScalingConfig(resources_per_worker=t4)
    for options in {"accelerator_type": "A100"}, {"resources_per_worker": {"accelerator_type:L4": 1, **t4}}:
        with pytest.raises(ValueError, match=r"unknown resource; .*, and accelerator_type="):
            ScalingConfig(**{"use_gpu": True, "resources_per_worker": t4, **options})


# -- the best checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss", "val_loss", "eval/lossMean", "val_WER", "top1_error", "rmse", "valid-ppl"])
def test_for_a_metric_that_should_be_low_an_order_is_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'order="min" keeps the lowest ones, .*="max" the highest'):
        CheckpointConfig(num_to_keep=3, checkpoint_score_attribute=name)
    for order in ("min", "max"):
        chosen = CheckpointConfig(checkpoint_score_attribute=name, checkpoint_score_order=order)  # type: ignore[arg-type]
        assert dataclasses.replace(chosen, num_to_keep=1).checkpoint_score_order == order
    lines: list[str] = []
    monkeypatch.setenv("DISTRAIN_AS_RAY", "1")
    monkeypatch.setattr("distrain.api.config.warn_once", lines.append)
    assert CheckpointConfig(checkpoint_score_attribute=name).checkpoint_score_order == "max"
    assert f"the highest {name} are kept, as in Ray" in lines[0]
