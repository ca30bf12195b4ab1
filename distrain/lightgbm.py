"""LightGBM on distrain: its addresses, and a callback that reports. Runs in: worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

from distrain.session import get_context, report
from distrain.storage.checkpoint import Checkpoint
from distrain.system.imports import require
from distrain.system.scratch import temporary_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["RayTrainReportCallback", "get_network_params"]

_trainings = count()


def get_network_params() -> dict[str, Any]:
    """Return the parameters that connect the workers in one training. It is a collective: every rank calls it.

    ::

        parameters = {"tree_learner": "data", "pre_partition": True, **get_network_params()}
    """
    addresses = get_context().get_worker_addresses(f"lightgbm {next(_trainings)}")  # a port is not free again at once
    port = addresses[get_context().get_world_rank()].rpartition(":")[2]
    return {"num_machines": len(addresses), "machines": ",".join(addresses), "local_listen_port": int(port)}


@dataclass(eq=False)
class RayTrainReportCallback:
    """Report every round, and the model as a checkpoint: that of rank 0, as all ranks have the same.

    metrics: those to report, such as ``"train-l2"``, or a dict of them by the names to report; by default all.
    filename: of the model in a checkpoint.
    frequency: report a checkpoint every so many rounds; 0: none.
    checkpoint_at_end: report one after the last round.
    results_postprocessing_fn: takes the metrics, and returns those to report.

    ::

        lightgbm.train(parameters, rows, valid_sets=[rows], callbacks=[RayTrainReportCallback(frequency=10)])
    """

    CHECKPOINT_NAME: ClassVar[str] = "model.txt"
    PACKAGE: ClassVar[str] = "lightgbm"

    metrics: str | Sequence[str] | Mapping[str, str] | None = None
    filename: str | None = None
    frequency: int = 0
    checkpoint_at_end: bool = True
    results_postprocessing_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str | None = None) -> Any:
        """Return the model of a checkpoint.

        ::

            model = RayTrainReportCallback.get_model(result.checkpoint)
        """
        with checkpoint.as_directory() as folder:
            return require(cls.PACKAGE).Booster(model_file=os.path.join(folder, filename or cls.CHECKPOINT_NAME))

    def __call__(self, env: Any) -> None:
        """Report a round of LightGBM."""
        found: dict[str, Any] = {}
        for rows, name, value, _, *deviation in env.evaluation_result_list or ():
            found[f"{rows}-{name}-mean" if deviation else f"{rows}-{name}"] = value
            found |= {f"{rows}-{name}-stdv": each for each in deviation}
        is_last = self.checkpoint_at_end and env.iteration + 1 == env.end_iteration
        self._report(found, env.model, stores=is_last or self._is_due(env.iteration + 1))

    def _is_due(self, rounds: int) -> bool:
        return self.frequency > 0 and rounds % self.frequency == 0

    def _report(self, found: Mapping[str, Any], model: Any, *, stores: bool) -> None:
        names = [self.metrics] if isinstance(self.metrics, str) else self.metrics or list(found)
        pairs = names.items() if isinstance(names, dict) else zip(names, names, strict=True)
        metrics = {own: found[name] for own, name in pairs}
        metrics = self.results_postprocessing_fn(metrics) if self.results_postprocessing_fn else metrics
        if not stores or get_context().get_world_rank() != 0:
            report(metrics)
            return
        with temporary_directory("distrain-model-") as folder:
            model.save_model(os.path.join(folder, self.filename or self.CHECKPOINT_NAME))
            report(metrics, checkpoint=Checkpoint(folder))
