"""TorchTrainer. Runs in: coordinator, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.api.backend import config_argument
from distrain.coordinator.trainer import DataParallelTrainer
from distrain.system.ray_names import without
from distrain.torch.config import TorchConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from distrain.api.config import DataConfig, RunConfig, ScalingConfig, ValidationConfig
    from distrain.storage.checkpoint import Checkpoint

__all__ = ["TorchTrainer"]


@without("preprocessor")
class TorchTrainer(DataParallelTrainer):
    """Run a PyTorch training function on a group of workers that share a process group.

    torch_config: settings of the process group; ``torch_backend`` is an old name for it.
    See :class:`~distrain.DataParallelTrainer` for the other parameters.

    ::

        def train_func(config):
            model = prepare_model(torch.nn.Linear(8, 2))
            ...
            distrain.report({"loss": 0.5})

        trainer = TorchTrainer(train_func, scaling_config=distrain.ScalingConfig(num_workers=2))
        result = trainer.fit()
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        resume_from_checkpoint: Checkpoint | str | Path | None = None,
        metadata: Mapping[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        torch_backend: TorchConfig | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=config_argument(TorchConfig, "torch", torch_config, torch_backend),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            resume_from_checkpoint=resume_from_checkpoint,
            metadata=metadata,
            validation_config=validation_config,
        )
