"""TorchTrainer. Runs in: coordinator; without torch."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from distrain.absent import without
from distrain.torch.config import TorchConfig
from distrain.trainer import DataParallelTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from distrain.checkpoint import Checkpoint
    from distrain.config import RunConfig, ScalingConfig, ValidationConfig

__all__ = ["TorchTrainer"]


@without("dataset_config", "datasets", "preprocessor")
class TorchTrainer(DataParallelTrainer):
    """Run a PyTorch training function on a group of workers that share a process group.

    torch_config: settings of the process group; ``torch_backend`` is an old name for it.
    Everything else: see :class:`~distrain.DataParallelTrainer`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        resume_from_checkpoint: Checkpoint | str | Path | None = None,
        metadata: Mapping[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        torch_backend: TorchConfig | None = None,
    ) -> None:
        if torch_backend is not None:
            if torch_config is not None:
                raise TypeError("torch_backend is another name of torch_config; give one of them")
            warnings.warn("torch_backend is an old name; use torch_config", DeprecationWarning, stacklevel=3)
            torch_config = torch_backend
        if torch_config is not None and not isinstance(torch_config, TorchConfig):
            raise TypeError(
                f"torch_config must be a TorchConfig, got {torch_config!r:.80} ({type(torch_config).__name__})"
            )
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=torch_config or TorchConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            resume_from_checkpoint=resume_from_checkpoint,
            metadata=metadata,
            validation_config=validation_config,
        )
