"""``fit()`` inside ``@hydra.main``: its config, its output directory, its overrides. Runs in: coordinator.

Nothing here imports Hydra: without it there is nothing to do.
"""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distrain.api.config import RunConfig


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config; of a DictConfig, one without interpolations, which workers could not resolve.

    Workers have neither Hydra's own values (``${hydra:...}``) nor the script's resolvers.
    """
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not isinstance(config, omegaconf.DictConfig):
        return dict(config)
    whole: Any = copy.deepcopy(config)
    omegaconf.OmegaConf.resolve(whole)
    whole._set_parent(None)  # a part of a config would bring all the rest with it
    return whole  # type: ignore[no-any-return]


def as_plain(config: Any) -> Any:
    """Return a config, as dicts and lists if it is OmegaConf's."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not isinstance(config, omegaconf.DictConfig):
        return config
    return omegaconf.OmegaConf.to_container(config)


def beside_output(run: RunConfig) -> RunConfig:
    """Return the config of a run whose directory lies beside Hydra's output directory, unless it says where."""
    if run.storage_path is not None or run.storage_filesystem is not None or (job := _job()) is None:
        return run
    return replace(run, storage_path=os.path.dirname(job.runtime.output_dir))


def facts() -> dict[str, Any]:
    """Return what a run's record says about Hydra; ``{}`` outside of ``@hydra.main``."""
    job = _job()
    if job is None:
        return {}
    return {"hydra": {"output_dir": job.runtime.output_dir, "overrides": list(job.overrides.task)}}


def _job() -> Any:
    """Return Hydra's settings of the job that runs in this process."""
    module = sys.modules.get("hydra.core.hydra_config")
    return module.HydraConfig.get() if module is not None and module.HydraConfig.initialized() else None
