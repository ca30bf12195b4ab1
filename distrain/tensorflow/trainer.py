"""TensorflowTrainer. Runs in: coordinator, without TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.api.backend import config_argument
from distrain.coordinator.trainer import DataParallelTrainer
from distrain.system.ray_names import without
from distrain.tensorflow.config import TensorflowConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from distrain.api.config import DataConfig, RunConfig, ScalingConfig, ValidationConfig
    from distrain.storage.checkpoint import Checkpoint

__all__ = ["TensorflowTrainer"]


@without("preprocessor")
class TensorflowTrainer(DataParallelTrainer):
    """Run a TensorFlow training function on a group of workers, which find each other through TF_CONFIG.

    tensorflow_config: settings of the workers; ``tensorflow_backend`` is an old name for it.
    See :class:`~distrain.DataParallelTrainer` for the other parameters.

    ::

        def train_func(config):
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            with strategy.scope():
                model = make_model()
            model.fit(dataset, callbacks=[ReportCheckpointCallback()])

        trainer = TensorflowTrainer(train_func, scaling_config=distrain.ScalingConfig(num_workers=2))
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        tensorflow_config: TensorflowConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        resume_from_checkpoint: Checkpoint | str | Path | None = None,
        metadata: Mapping[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        tensorflow_backend: TensorflowConfig | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=config_argument(TensorflowConfig, "tensorflow", tensorflow_config, tensorflow_backend),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            resume_from_checkpoint=resume_from_checkpoint,
            metadata=metadata,
            validation_config=validation_config,
        )
