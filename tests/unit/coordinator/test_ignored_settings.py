"""Settings that need workers of distrain are named if there are none."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from distrain import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, ShippingConfig
from distrain.coordinator.ranks.ignored_settings import _FOR_RESTARTS, describe_ignored_settings
from distrain.coordinator.ranks.outer_launcher import OuterLauncher

TORCHRUN = OuterLauncher(
    name="torchrun", rank=0, world_size=2, local_rank=0, local_world_size=2, node_rank=0, address="127.0.0.1", port=1
)
HONOURED = {
    ScalingConfig: {"num_workers", "use_gpu", "resources_per_worker", "accelerator_type", "interface"},
    FailureConfig: {"hang_report_s", "on_divergence", "divergence_every"},
    RunConfig: {
        *("log_dir", "stop_grace_s", "stop_signals"),
        *("name", "storage_path", "storage_filesystem", "failure_config", "checkpoint_config", "worker_runtime_env"),
        *("logging_config", "shipping_config", "progress", "verbose", "callbacks", "trackers", "on_end"),
    },
    LoggingConfig: {"log_level"},
    ShippingConfig: {"enabled"},
}
NAMED_ELSEWHERE = {"hosts", "hostfile", "transport", "trainer_resources", "placement_strategy", "debug_rank"}
"""Refused, or named by another line."""
OTHER_VALUES: dict[str, Any] = {
    "start_method": "spawn", "ssh_args": "-v", "numa_binding": "node", "grow": "checkpoint", "hang_timeout_s": 30.0,
    "host_lease_s": 30.0, "host_wait_s": 1.0, "ranks": [0], "include": ["a"],
    "limit_bytes": 5, "fetch_limit_bytes": 5, "env_from": "needed.txt", "max_failures": 3, "retry_same_failure": True,
    "backoff_s": 1.0, "peer_failure_grace_s": 1.0,
    "on_nan": "rollback", "nan_metric": "x", "max_rollbacks": 1,
}  # fmt: skip


def described(config: type, launcher: OuterLauncher | None, **settings: Any) -> str | None:
    one = config(**settings, **({"num_workers": (1, 2)} if "grow" in settings else {}))
    run = one if config is RunConfig else RunConfig(**{  # type: ignore[arg-type]
        name: one
        for name, kind in (
            ("failure_config", FailureConfig), ("logging_config", LoggingConfig), ("shipping_config", ShippingConfig)
        )
        if kind is config
    })  # fmt: skip
    return describe_ignored_settings(one if config is ScalingConfig else ScalingConfig(), run, launcher)


@pytest.mark.parametrize("launcher", [None, TORCHRUN], ids=["no workers", "torchrun"])
@pytest.mark.parametrize("config", HONOURED, ids=lambda config: config.__name__)
def test_every_setting_is_honoured_or_named(config: type, launcher: OuterLauncher | None) -> None:
    assert described(config, launcher) is None
    assert described(ShippingConfig, launcher, include=[]) is None, "as the command line has it"
    for name in {field.name for field in fields(config)} - HONOURED[config] - NAMED_ELSEWHERE:
        line = described(config, launcher, **{name: OTHER_VALUES[name]})
        if launcher is None and name in _FOR_RESTARTS:
            assert line is None
        else:
            why = "train_func runs in this process" if launcher is None else "torchrun has started the ranks"
            assert line == f"{config.__name__}.{name}: no effect because {why}"
