"""The process of one trial of a drill: the user's script, with a probe in each rank. Runs in: coordinator.

It is started by :mod:`distrain.drilling.trial` with the path of an order.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distrain.cli.run import config_file
from distrain.cli.run.command import run_command
from distrain.coordinator import fit
from distrain.drilling.fence import fence
from distrain.drilling.probe import Probe
from distrain.storage import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.api.config import RunConfig, ScalingConfig
    from distrain.drilling.order import Order
    from distrain.worker.job.job import Work


def _prepared(
    order: Order, work: Work, scaling: ScalingConfig, run: RunConfig
) -> tuple[Work, ScalingConfig, RunConfig]:
    """Turn the first fit() of a script into the trial. A further one ends the process."""

    def end(*_: object) -> NoReturn:
        raise SystemExit(0)

    fit.prepare = end
    failures = run.failure_config
    trial = replace(
        run,
        name="run",
        storage_path=order.storage,
        storage_filesystem=None,
        log_dir=None,
        callbacks=(),
        trackers=(),
        debug_rank=None,
        failure_config=replace(failures, max_failures=failures.max_failures or 3),
        checkpoint_config=replace(run.checkpoint_config, num_to_keep=None),
    )
    probe = Probe(order.probe, uses_torch="torch" in work.backend.preload)
    return replace(work, before=probe), replace(scaling, num_workers=order.workers or scaling.num_workers), trial


def run_trial(path: str, user_path: Sequence[str]) -> int:
    """Run an order and return the exit code. ``user_path``: as in :func:`distrain.cli.main.run_main`."""
    order: Order = pickle.loads(Path(path).read_bytes())  # noqa: S301 - made by the drill
    fit.prepare = partial(_prepared, order)
    names.DEFAULT_STORAGE = order.storage
    config_file.directory = order.directory
    fence(order.probe.fenced, order.probe.allowed)
    if order.trainer is not None:
        order.trainer.fit()
        return 0
    return run_command(order.arguments, user_path, prog="distrain run")
