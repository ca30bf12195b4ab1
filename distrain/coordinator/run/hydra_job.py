"""``fit()`` inside ``@hydra.main``: its config and its output directory. Runs in: coordinator.

Nothing here imports Hydra: without it there is nothing to do.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distrain.api.config import RunConfig


def resolved(config: Mapping[str, Any]) -> Any:
    """Return a copy of a config. Interpolations in DictConfigs are resolved, as workers could not do so.

    Workers have neither Hydra's own values (``${hydra:...}``) nor the script's resolvers.
    """
    found = _each(config, lambda node, omegaconf: omegaconf.create(omegaconf.to_container(node, resolve=True)))
    return dict(config) if found is config else found


def as_plain(config: Any) -> Any:
    """Return a config with dicts and lists in place of OmegaConf's."""
    return _each(config, lambda node, omegaconf: omegaconf.to_container(node))


def _each(value: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """Convert the configs of OmegaConf in a value."""
    module = sys.modules.get("omegaconf")
    if module is not None and module.OmegaConf.is_config(value):
        return convert(value, module.OmegaConf)
    return {name: _each(item, convert) for name, item in value.items()} if isinstance(value, dict) else value


def beside_output(run: RunConfig) -> RunConfig:
    """Return the config of a run whose directory lies beside Hydra's output directory, unless it says where."""
    module = sys.modules.get("hydra.core.hydra_config")
    says_where = run.storage_path is not None or run.storage_filesystem is not None
    if says_where or module is None or not module.HydraConfig.initialized():
        return run
    return replace(run, storage_path=os.path.dirname(module.HydraConfig.get().runtime.output_dir))
