"""The process of one trial of a drill: the user's script, with a probe in each rank. Runs in: coordinator.

It is started by :mod:`distrain.drilling.trial` with the path of an order.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distrain.cli.run.command import run_command
from distrain.coordinator.run import fit
from distrain.drilling.command import execute
from distrain.drilling.isolation import confine, enter, inside_file
from distrain.drilling.probe import SessionProbe
from distrain.storage import names
from distrain.system.process import die_with_parent
from distrain.transfer.host_side.host_cache import delete

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
    failures, shipping, folder = run.failure_config, run.shipping_config, Path(order.folder)
    trial = replace(
        run,
        name="run",
        storage_path=order.storage,
        storage_filesystem=None,
        log_dir=None,
        callbacks=(),
        trackers=(),
        debug_rank=None,
        on_end="",
        failure_config=replace(
            failures, max_failures=(failures.max_failures or 3) if order.probe.act.startswith("kill") else 0
        ),
        # A file that no other host has, so all of them work in copies of the project, even if they share its directory.
        shipping_config=replace(shipping, include=(*shipping.include, *filter(Path.exists, [inside_file(folder)]))),
        checkpoint_config=replace(run.checkpoint_config, num_to_keep=None),
    )
    uses_torch = "torch" in work.backend.preload
    probe = SessionProbe(replace(order, trainer=None), uses_torch=uses_torch)
    scaling = replace(scaling, num_workers=order.workers or scaling.num_workers, grow=None)
    return replace(work, before=probe), scaling, trial


def run_trial(path: str, user_path: Sequence[str]) -> int:
    """Run an order and return the exit code. ``user_path``: as in :func:`distrain.cli.main.run_main`."""
    with open(path, "rb") as file:
        order: Order = pickle.load(file)  # noqa: S301 - made by the drill
        _isolate(order)
        order = pickle.load(file)  # noqa: S301 - the same, with the trainer, which imports the user's modules
    if not (order.trainer or order.arguments or order.command):  # the order only tries out whether this is possible
        return 0
    if order.command:
        return execute(order, path)
    die_with_parent(os.getppid())
    fit.prepare = partial(_prepared, order)
    names.DEFAULT_STORAGE = order.storage
    if order.trainer is not None:
        order.trainer.fit()
        return 0
    return run_command(order.arguments, user_path, prog="distrain run")


def _isolate(order: Order) -> None:
    """Return once this process cannot change the user's files. This may execute its program again."""
    folder = Path(order.folder)
    if order.copies:
        confine([order.folder], order.roots)
    elif not inside_file(folder).exists():
        is_new = not (folder / "changes").exists()
        enter(folder, order.roots)
        for path in order.fresh if is_new else ():
            delete(path)
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606
