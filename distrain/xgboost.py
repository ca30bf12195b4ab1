"""XGBoost on distrain: its workers, connected, and a callback that reports. Runs in: coordinator, worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import xgboost
from xgboost.tracker import RabitTracker

from distrain import lightgbm
from distrain.api.backend import BackendConfig
from distrain.api.ray_names import checks_arguments
from distrain.api.trainer_options import showing_options
from distrain.coordinator.run.trainer import DataParallelTrainer
from distrain.worker.session import session_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.api.context import TrainContext

__all__ = ["RayTrainReportCallback", "XGBoostConfig", "XGBoostTrainer"]

_trackers: list[RabitTracker] = []
"""The tracker in the process of rank 0."""


@dataclass(frozen=True, kw_only=True)
class XGBoostConfig(BackendConfig):
    """The backend that connects the workers, through a tracker of XGBoost in rank 0.

    xgboost_communicator: an argument of Ray without effect.

    ::

        XGBoostTrainer(train_func, xgboost_config=XGBoostConfig())
    """

    framework: ClassVar[str] = "xgboost"

    xgboost_communicator: str = "rabit"

    def setup(self, context: TrainContext) -> None:
        """Connect the workers, if there are several."""
        if context.world_size == 1:
            return
        host, _, port = context.get_coordinator_address("xgboost").rpartition(":")
        if context.world_rank == 0:
            _trackers.append(RabitTracker(context.world_size, host, int(port), sortby="task"))
            _trackers[0].start()
        session_of("xgboost").collective("the start of XGBoost's tracker", b"")
        task = f"{context.world_rank:06d}"
        xgboost.collective.init(dmlc_tracker_uri=host, dmlc_tracker_port=int(port), dmlc_task_id=task)

    def teardown(self, context: TrainContext) -> object:
        """Disconnect. The tracker lives on until every rank has finished."""
        if context.world_size > 1:
            xgboost.collective.finalize()
        return _trackers or None


@checks_arguments
class XGBoostTrainer(DataParallelTrainer):
    """Run a function that calls ``xgboost.train()`` on workers that train one model, each with rows of its own.

    xgboost_config: the backend.
    See :class:`~distrain.DataParallelTrainer` for the other parameters.

    ::

        def train_func():
            frame = distrain.get_dataset_shard("train").materialize().to_pandas()
            rows = xgboost.DMatrix(frame.drop(columns="y"), frame["y"])
            xgboost.train({"max_depth": 4}, rows, evals=[(rows, "train")], callbacks=[RayTrainReportCallback()])

        trainer = XGBoostTrainer(train_func, scaling_config=distrain.ScalingConfig(num_workers=2))
    """

    @showing_options
    def __init__(
        self, train_loop_per_worker: Callable[..., Any], *, xgboost_config: XGBoostConfig | None = None, **options: Any
    ) -> None:
        super().__init__(train_loop_per_worker, backend_config=xgboost_config or XGBoostConfig(), **options)


@dataclass(eq=False)
class RayTrainReportCallback(lightgbm.RayTrainReportCallback, xgboost.callback.TrainingCallback):  # type: ignore[misc, unused-ignore]
    """Report every round, and the model as a checkpoint, as :class:`distrain.lightgbm.RayTrainReportCallback` does.

    Metrics have names such as ``"train-rmse"``, and the model's file is ``model.ubj``.

    ::

        xgboost.train({}, rows, evals=[(rows, "train")], callbacks=[RayTrainReportCallback(frequency=10)])
    """

    CHECKPOINT_NAME: ClassVar[str] = "model.ubj"
    PACKAGE: ClassVar[str] = "xgboost"

    _last: tuple[dict[str, Any], bool] = ({}, False)
    """The metrics of the last round, and whether they were reported with the model."""

    def after_iteration(self, model: xgboost.Booster, epoch: int, evals_log: dict[str, Any]) -> bool:
        """Report a round."""
        found = {f"{rows}-{name}": values[-1] for rows, log in evals_log.items() for name, values in log.items()}
        self._last = found, self._is_due(epoch + 1)
        self._report(found, model, stores=self._is_due(epoch + 1))
        return False

    def after_training(self, model: xgboost.Booster) -> xgboost.Booster:
        """Report the model."""
        found, is_stored = self._last
        if self.checkpoint_at_end and not is_stored:
            self._report(found, model, stores=True)
        return model
