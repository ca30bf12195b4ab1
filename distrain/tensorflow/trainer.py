"""TensorflowTrainer. Runs in: coordinator, without TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.api.backend import config_argument
from distrain.api.ray_names import checks_arguments
from distrain.api.trainer_options import TrainerOptions, showing_options
from distrain.coordinator.run.trainer import DataParallelTrainer
from distrain.tensorflow.config import TensorflowConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack


@checks_arguments
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

    @showing_options
    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        tensorflow_config: TensorflowConfig | None = None,
        tensorflow_backend: TensorflowConfig | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        config = config_argument(TensorflowConfig, "tensorflow", tensorflow_config, tensorflow_backend)
        super().__init__(train_loop_per_worker, backend_config=config, **options)
