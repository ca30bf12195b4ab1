"""JaxTrainer. Runs in: coordinator, without JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.api.backend import config_argument
from distrain.coordinator.trainer import DataParallelTrainer
from distrain.jax.config import JaxConfig
from distrain.system.ray_names import without

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from distrain.api.config import DataConfig, RunConfig, ScalingConfig, ValidationConfig
    from distrain.storage.checkpoint import Checkpoint

__all__ = ["JaxTrainer"]


@without()
class JaxTrainer(DataParallelTrainer):
    """Run a JAX training function in processes that ``jax.distributed`` connects.

    Each worker is one process of JAX, with the GPUs that ``ScalingConfig(use_gpu=True)`` gives it, or one device of the
    CPU. In train_func, ``jax.devices()`` has the devices of all workers, ``jax.local_devices()`` those of this one.

    jax_config: settings of the workers.
    See :class:`~distrain.DataParallelTrainer` for the other parameters.

    ::

        def train_func(config):
            mesh = jax.sharding.Mesh(jax.devices(), ("data",))
            ...
            distrain.report({"loss": float(loss)})

        trainer = JaxTrainer(train_func, scaling_config=distrain.ScalingConfig(num_workers=2))
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        jax_config: JaxConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        resume_from_checkpoint: Checkpoint | str | Path | None = None,
        metadata: Mapping[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=config_argument(JaxConfig, "jax", jax_config),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            resume_from_checkpoint=resume_from_checkpoint,
            metadata=metadata,
            validation_config=validation_config,
        )
