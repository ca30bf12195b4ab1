"""TensorflowTrainer. Runs in: coordinator; without TensorFlow."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from distrain.absent import without
from distrain.tensorflow.config import TensorflowConfig
from distrain.trainer import DataParallelTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from distrain.checkpoint import Checkpoint
    from distrain.config import RunConfig, ScalingConfig, ValidationConfig

__all__ = ["TensorflowTrainer"]


@without("dataset_config", "datasets", "preprocessor")
class TensorflowTrainer(DataParallelTrainer):
    """Run a TensorFlow training function on a group of workers, each of which finds all of them in TF_CONFIG.

    tensorflow_config: settings of the workers; ``tensorflow_backend`` is an old name for it.
    Everything else: see :class:`~distrain.DataParallelTrainer`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        tensorflow_config: TensorflowConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        resume_from_checkpoint: Checkpoint | str | Path | None = None,
        metadata: Mapping[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        tensorflow_backend: TensorflowConfig | None = None,
    ) -> None:
        if tensorflow_backend is not None:
            if tensorflow_config is not None:
                raise TypeError("tensorflow_backend is another name of tensorflow_config; give one of them")
            warnings.warn("tensorflow_backend is an old name; use tensorflow_config", DeprecationWarning, stacklevel=3)
            tensorflow_config = tensorflow_backend
        if tensorflow_config is not None and not isinstance(tensorflow_config, TensorflowConfig):
            raise TypeError(
                f"tensorflow_config must be a TensorflowConfig, got {tensorflow_config!r:.80} "
                f"({type(tensorflow_config).__name__})"
            )
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=tensorflow_config or TensorflowConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            resume_from_checkpoint=resume_from_checkpoint,
            metadata=metadata,
            validation_config=validation_config,
        )
