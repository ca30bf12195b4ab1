"""TorchTrainer. Runs in: coordinator, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.api.ray_names import checks_arguments
from distrain.api.trainer_options import TrainerOptions, config_argument, showing_options
from distrain.coordinator.run.trainer import DataParallelTrainer
from distrain.torch.config import TorchConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack


@checks_arguments
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

    @showing_options
    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        torch_config: TorchConfig | None = None,
        torch_backend: TorchConfig | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        config = config_argument(TorchConfig, "torch", torch_config, torch_backend)
        super().__init__(train_loop_per_worker, backend_config=config, **options)
