"""PyTorch Lightning on distrain: what ``ray.train.lightning`` has, under its names and under ours. Runs in: worker.

Workers carry torchrun's environment variables, so a plain ``Trainer(strategy="ddp", devices=workers_per_host)`` works
as well. What is here lets ``devices="auto"`` mean this worker's device, reports epochs and their checkpoints, and
refuses a Trainer that would train alone. Works with ``lightning.pytorch`` and with ``pytorch_lightning``: with the one
that is imported already in the user's process (or named by DISTRAIN_LIGHTNING), else with the one that is installed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from distrain.checkpoint import Checkpoint
from distrain.session import get_context, report
from distrain.system.ray_names import explain_absent_names
from distrain.torch.device import get_device
from distrain.worker.session import Session

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = [
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "TrainDDPStrategy",
    "TrainDeepSpeedStrategy",
    "TrainFSDPStrategy",
    "TrainReportCallback",
    "prepare_trainer",
]

explain_absent_names(__name__)


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_CHOICE = "DISTRAIN_LIGHTNING"


def _installed_lightning() -> Any:
    """``lightning.pytorch`` or ``pytorch_lightning``, whose classes do not mix. Workers go by what the user's process
    has found.
    """
    chosen = os.environ.get(_CHOICE)
    for name in sorted(_PACKAGES, key=lambda name: (name != chosen, name not in sys.modules)):
        if find_spec(name.partition(".")[0]) is not None:
            if name in sys.modules:
                os.environ.setdefault(_CHOICE, name)
            import_module(f"{name}.plugins.environments")
            return sys.modules[name]
    raise ModuleNotFoundError(
        "distrain.lightning needs PyTorch Lightning, which is not installed: pip install 'distrain[lightning]'",
        name="lightning",
    )


if not TYPE_CHECKING:
    pl = _installed_lightning()


class TrainReportCallback(pl.Callback):  # type: ignore[misc]
    """Report after every training epoch: the logged metrics, ``epoch`` and ``step``, and a checkpoint with the file
    ``checkpoint.ckpt``.

    All ranks report, and save together as sharded strategies need it; what the strategy wrote goes into the checkpoint
    once per host, which with DDP is one file of rank 0. Raises RuntimeError if the Trainer is not spread over all
    workers.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _check_that_workers_train_together(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = {**trainer.callback_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}
        is_first = get_context().get_world_rank() == 0
        folder = trainer.strategy.broadcast(tempfile.mkdtemp(prefix="distrain-lightning-") if is_first else "")
        try:
            trainer.save_checkpoint(os.path.join(folder, self.CHECKPOINT_NAME), weights_only=False)
            report(metrics, checkpoint=_part_of_this_rank(folder))
            trainer.strategy.barrier("distrain.lightning")  # nobody may still be reading what is deleted now
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _part_of_this_rank(folder: str) -> Checkpoint | None:
    """What the ranks of a host wrote into ``folder`` is brought by one of them."""
    if get_context().get_local_rank() != 0 or not os.path.isdir(folder):
        return None
    return Checkpoint.from_directory(folder)


class _InWorker:
    """A strategy of processes that distrain has started: there is nothing to launch, and each has its device."""

    def __init__(self, **options: Any) -> None:
        if _CHOICE not in os.environ and all(name in sys.modules for name in _PACKAGES):
            other = next(name for name in _PACKAGES if name != pl.__name__)
            warnings.warn(
                f"distrain.lightning works with {pl.__name__}; if your Trainer is that of {other}, import {other} "
                f"before distrain.lightning, or set {_CHOICE}={other}",
                UserWarning,
                stacklevel=2,
            )
        super().__init__(**options)

    @property
    def parallel_devices(self) -> Any:
        """The Trainer's, or the user's; before, a CPU for a worker that has no GPU, as accelerator="auto" would take
        one that this worker was not given. A strategy may be made outside of a worker, and sent to it.
        """
        if self._parallel_devices is None and Session.current is not None and get_device().type == "cpu":
            return [get_device()]
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Any) -> None:
        self._parallel_devices = devices

    @property
    def root_device(self) -> Any:
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        context = get_context()
        return {"num_replicas": context.get_world_size(), "rank": context.get_world_rank()}

    def _configure_launcher(self) -> None:
        """Without a launcher, nobody compares ``devices`` times ``num_nodes`` with the number of workers."""


class TrainDDPStrategy(_InWorker, pl.strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy, with its arguments, for any ``devices`` and ``num_nodes`` of the Trainer."""


class TrainFSDPStrategy(_InWorker, pl.strategies.FSDPStrategy):  # type: ignore[misc]
    """Lightning's FSDPStrategy, with its arguments, for any ``devices`` and ``num_nodes`` of the Trainer."""


class TrainDeepSpeedStrategy(_InWorker, pl.strategies.DeepSpeedStrategy):  # type: ignore[misc]
    """Lightning's DeepSpeedStrategy, with its arguments, for any ``devices`` and ``num_nodes`` of the Trainer."""


def prepare_trainer(trainer: pl.Trainer) -> pl.Trainer:
    """Return the Trainer if it is spread over all workers. Raises RuntimeError otherwise."""
    _check_that_workers_train_together(trainer)
    return trainer


def _check_that_workers_train_together(trainer: pl.Trainer) -> None:
    context = get_context()
    if (trainer.world_size, trainer.global_rank) != (context.get_world_size(), context.get_world_rank()):
        raise RuntimeError(
            f"rank {context.get_world_rank()}: this Lightning Trainer takes itself for rank {trainer.global_rank} of "
            f"{trainer.world_size}, but there are {context.get_world_size()} workers, so each would train alone; give "
            "it strategy=distrain.lightning.TrainDDPStrategy()"
        )


RayDDPStrategy = TrainDDPStrategy
RayFSDPStrategy = TrainFSDPStrategy
RayDeepSpeedStrategy = TrainDeepSpeedStrategy
RayTrainReportCallback = TrainReportCallback
RayLightningEnvironment = pl.plugins.environments.TorchElasticEnvironment  # which Lightning finds by itself
