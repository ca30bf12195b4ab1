"""Settings for workers that distrain starts, which have no effect on other ranks. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distrain.api.config import RunConfig, ScalingConfig
    from distrain.coordinator.ranks.outer_launcher import OuterLauncher

_FOR_RESTARTS = {"max_failures", "retry_same_failure", "backoff_s", "on_nan", "nan_metric", "max_rollbacks"}
"""Settings of the FailureConfig that distrain honours without workers, but not for another launcher."""
_FOR_WORKERS = {
    *("start_method", "ssh_args", "numa_binding", "grow", "ranks", "include", "limit_bytes", "env_from"),
    "fetch_limit_bytes",
    *("hang_timeout_s", "host_lease_s", "host_wait_s", "peer_failure_grace_s"),
}


def describe_ignored_settings(scaling: ScalingConfig, run: RunConfig, launcher: OuterLauncher | None) -> str | None:
    """Return a line that names the given settings that have no effect, or None.

    launcher: has started the ranks; None if train_func runs in this process.
    """
    ignored = _FOR_WORKERS | _FOR_RESTARTS if launcher else _FOR_WORKERS
    given = [
        f"{type(config).__name__}.{name}"
        for config in (scaling, run.failure_config, run.logging_config, run.shipping_config)
        for name, value in vars(config).items()
        if name in ignored and (value or None) != (getattr(type(config)(), name) or None)  # argparse makes empty lists
    ]
    if not given:
        return None
    why = f"{launcher.name} has started the ranks" if launcher else "train_func runs in this process"
    return f"{', '.join(given)}: no effect because {why}"
