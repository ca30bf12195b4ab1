"""JaxTrainer. Runs in: coordinator, without JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.api.backend import config_argument
from distrain.api.ray_names import checks_arguments
from distrain.api.trainer_options import TrainerOptions, showing_options
from distrain.coordinator.run.trainer import DataParallelTrainer
from distrain.jax.config import JaxConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack


@checks_arguments
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

    @showing_options
    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        jax_config: JaxConfig | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        config = config_argument(JaxConfig, "jax", jax_config)
        super().__init__(train_loop_per_worker, backend_config=config, **options)
