"""PyTorch Lightning on distrain: the names of ``ray.train.lightning``, and distrain's own. Runs in: worker.

Workers carry torchrun's environment variables, so a plain ``Trainer(strategy="ddp", devices=workers_per_host)`` works,
too. This module makes ``devices="auto"`` mean this worker's device, reports epochs and their checkpoints, and refuses a
Trainer that would train alone. It uses ``lightning.pytorch`` or ``pytorch_lightning``: the one that the user's process
has imported already (or that DISTRAIN_LIGHTNING names), else the one that is installed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from distrain.api import current
from distrain.session import get_context, report
from distrain.storage.checkpoint import Checkpoint
from distrain.system.imports import require
from distrain.system.scratch import kept_for_peer, temporary_directory
from distrain.torch.device import get_device

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


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_CHOICE = "DISTRAIN_LIGHTNING"


def _installed_lightning() -> Any:
    """Return ``lightning.pytorch`` or ``pytorch_lightning``, whose classes do not mix.

    Workers use the one that the user's process has found.
    """
    chosen = os.environ.get(_CHOICE)
    for name in sorted(_PACKAGES, key=lambda name: (name != chosen, name not in sys.modules)):
        if find_spec(name.partition(".")[0]) is not None:
            if name in sys.modules:
                os.environ.setdefault(_CHOICE, name)
            import_module(f"{name}.plugins.environments")
            return sys.modules[name]
    return require(_PACKAGES[0])  # which says how to install it


if not TYPE_CHECKING:
    pl = _installed_lightning()


class TrainReportCallback(pl.Callback):  # type: ignore[misc]
    """Report metrics and a checkpoint with the file ``checkpoint.ckpt`` after every training epoch.

    The metrics are those that the module logs, ``epoch`` and ``step``. All ranks report, and save together, as sharded
    strategies need it. One rank of each host adds the files of its host to the checkpoint; with DDP that is one file,
    of rank 0. ::

        strategy, callbacks = TrainDDPStrategy(), [TrainReportCallback()]
        trainer = pl.Trainer(max_epochs=1, strategy=strategy, callbacks=callbacks, enable_checkpointing=False)

    Raises RuntimeError if the Trainer does not train on all workers.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        prepare_trainer(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = {**trainer.callback_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}
        context = get_context()
        with contextlib.ExitStack() as stack:
            is_first = context.get_world_rank() == 0
            made = stack.enter_context(temporary_directory("distrain-lightning-")) if is_first else ""
            folder = trainer.strategy.broadcast(made)
            if context.get_local_rank() == 0 and not is_first:
                stack.enter_context(kept_for_peer(folder))
            trainer.save_checkpoint(os.path.join(folder, self.CHECKPOINT_NAME), weights_only=False)
            has_files = context.get_local_rank() == 0 and os.path.isdir(folder)  # those of all ranks of this host
            report(metrics, checkpoint=Checkpoint.from_directory(folder) if has_files else None)
            trainer.strategy.barrier("distrain.lightning")  # all ranks have read the files before they are deleted


class _InWorker:
    """A strategy for processes that distrain has started: it launches none, and each has its device."""

    def __init__(self, **options: Any) -> None:
        if _CHOICE not in os.environ and all(name in sys.modules for name in _PACKAGES):
            other = next(name for name in _PACKAGES if name != pl.__name__)
            warnings.warn(
                f"distrain.lightning works with {pl.__name__}; if your Trainer comes from {other}, import {other} "
                f"before distrain.lightning, or set {_CHOICE}={other}",
                UserWarning,
                stacklevel=2,
            )
        super().__init__(**options)

    @property
    def parallel_devices(self) -> Any:
        """The devices that the Trainer or the user has set; before that, the CPU for a worker without a GPU.

        accelerator="auto" would take a GPU that does not belong to this worker. A strategy may be made outside of a
        worker, and sent to it.
        """
        if self._parallel_devices is None and current.session is not None and get_device().type == "cpu":
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
        """Set no launcher: it would compare ``devices`` times ``num_nodes`` with the number of workers."""


class TrainDDPStrategy(_InWorker, pl.strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy, with its arguments, for any ``devices`` and ``num_nodes`` of the Trainer.

    ::

        trainer = pl.Trainer(max_epochs=1, strategy=TrainDDPStrategy(find_unused_parameters=True))
    """


class TrainFSDPStrategy(_InWorker, pl.strategies.FSDPStrategy):  # type: ignore[misc]
    """Lightning's FSDPStrategy, with its arguments, for any ``devices`` and ``num_nodes`` of the Trainer.

    ::

        strategy = TrainFSDPStrategy(sharding_strategy="SHARD_GRAD_OP")
    """


class TrainDeepSpeedStrategy(_InWorker, pl.strategies.DeepSpeedStrategy):  # type: ignore[misc]
    """Lightning's DeepSpeedStrategy, with its arguments, for any ``devices`` and ``num_nodes`` of the Trainer.

    It needs the package deepspeed. ::

        strategy = TrainDeepSpeedStrategy(stage=2)
    """


def prepare_trainer(trainer: pl.Trainer) -> pl.Trainer:
    """Return the Trainer if it trains on all workers. Raises RuntimeError otherwise.

    ::

        trainer = prepare_trainer(pl.Trainer(max_epochs=1, strategy=TrainDDPStrategy()))
    """
    context = get_context()
    if (trainer.world_size, trainer.global_rank) != (context.get_world_size(), context.get_world_rank()):
        raise RuntimeError(
            f"rank {context.get_world_rank()}: this Lightning Trainer believes that it is rank {trainer.global_rank} "
            f"of {trainer.world_size}, but there are {context.get_world_size()} workers, so each would train alone; "
            "give it strategy=distrain.lightning.TrainDDPStrategy()"
        )
    return trainer


RayDDPStrategy = TrainDDPStrategy
RayFSDPStrategy = TrainFSDPStrategy
RayDeepSpeedStrategy = TrainDeepSpeedStrategy
RayTrainReportCallback = TrainReportCallback
RayLightningEnvironment = pl.plugins.environments.TorchElasticEnvironment  # which Lightning finds by itself
