"""Scripts of Hydra under ``distrain run``: all ranks share one output directory. Runs in: worker."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distrain.api.context import TrainContext


def set_defaults(context: TrainContext) -> None:
    """Have ``@hydra.main`` use a directory in the run directory, unless the script's config or command line names one.

    Ranks other than rank 0 keep no copy of the config and no log file.
    """
    try:
        from hydra import conf  # noqa: F401 - it stores the defaults
        from hydra.core.config_store import ConfigStore
    except ImportError:  # the script says so itself, if it needs Hydra
        return
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
