"""Settings for workers that distrain starts, which have no effect on other ranks. Runs in: coordinator."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.api.config import RunConfig, ScalingConfig
    from distrain.coordinator.ranks.outer_launcher import OuterLauncher

_FOR_RESTARTS = ("max_failures", "retry_same_failure", "backoff_s", "on_nan", "nan_metric", "max_rollbacks")
"""Settings of the FailureConfig that distrain honours without workers, but not for another launcher."""
_FOR_WORKERS = ("hang_timeout_s", "host_lease_s", "host_wait_s", "on_slow", "peer_failure_grace_s")


def describe_ignored_settings(scaling: ScalingConfig, run: RunConfig, launcher: OuterLauncher | None) -> str | None:
    """Return a line that names the given settings that have no effect, or None.

    launcher: has started the ranks; None if train_func runs in this process.
    """
    restarts = _FOR_RESTARTS if launcher else ()
    of_workers: list[tuple[str, Any, Sequence[str]]] = [
        ("ScalingConfig", scaling, ("start_method", "ssh_args", "numa_binding", "checks")),
        ("FailureConfig", run.failure_config, (*restarts, *_FOR_WORKERS)),
        ("LoggingConfig", run.logging_config, ("ranks",)),
        ("ShippingConfig", run.shipping_config, ("include", "limit_bytes", "env_from")),
    ]
    given = [
        f"{label}.{name}" for label, config, names in of_workers for name in names if not _is_default(config, name)
    ]
    if not given:
        return None
    why = f"{launcher.name} has started the ranks" if launcher else "train_func runs in this process"
    return f"{', '.join(given)}: no effect because {why}"


def _is_default(config: Any, name: str) -> bool:
    [field] = [field for field in fields(config) if field.name == name]
    value = getattr(config, name)
    return bool(value == field.default or (field.default == () and not value))  # argparse makes lists
