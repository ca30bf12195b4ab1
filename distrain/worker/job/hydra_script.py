"""Scripts of Hydra under ``distrain run``: all ranks share one output directory. Runs in: worker."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from distrain.api.context import TrainContext


def share_directory(context: TrainContext) -> None:
    """Have ``@hydra.main`` use a directory in the run directory, if the script imports Hydra. Rank 0 writes there."""
    sys.meta_path.insert(0, _Finder(context))


class _Finder:
    """It finds ``hydra.main``, and changes Hydra's defaults when that is imported."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name != "hydra.main":
            return None
        sys.meta_path.remove(self)
        if spec := PathFinder.find_spec(name, path):
            assert spec.loader is not None
            execute = spec.loader.exec_module

            def execute_and_set_defaults(module: ModuleType) -> None:
                execute(module)
                set_defaults(self._context)

            spec.loader.exec_module = execute_and_set_defaults  # type: ignore[method-assign]
        return spec


def set_defaults(context: TrainContext) -> None:
    """Change the defaults of Hydra, so that the script's config and the command line win.

    Ranks other than rank 0 keep no copy of the config and no log file.
    """
    from hydra import conf  # noqa: F401 - it stores the defaults
    from hydra.core.config_store import ConfigStore

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # otherwise an exception ends as sys.exit(1)
    run = context.get_trial_dir()
    folder = f"{run}/hydra" if os.path.isdir(run) else f"outputs/{context.run_name}"  # this host has no run directory
    store = ConfigStore.instance()
    directories = {"run": {"dir": folder}, "sweep": {"dir": folder, "subdir": "${hydra.job.num}"}}
    store.store("distrain", directories, group="hydra/output", package="hydra")
    settings, chosen = store.repo["hydra"]["config.yaml"].node, {"output": "distrain"}
    if context.world_rank:
        settings.output_subdir = None
        chosen["job_logging"] = "stdout"
    for default in settings.defaults:
        default.update({group: chosen[group] for group in default if group in chosen})
