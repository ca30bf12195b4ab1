"""Train XGBoost on two workers, each with a part of the rows.

    pip install 'distrain[frameworks]'
    python examples/xgboost_example.py

XGBoost's workers find each other through a tracker in rank 0, which listens at an address that distrain reserves. A
worker is killed in between, and the run continues from the last checkpoint, which is a file of XGBoost.
"""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from xgboost import collective
from xgboost.tracker import RabitTracker

import distrain
from distrain import Checkpoint, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

MODEL_FILE = "model.ubj"
PARAMETERS = {"objective": "reg:squarederror", "max_depth": 4, "eta": 0.3}
KILLED_IN_ROUND = 7
ROUNDS_PER_CHECKPOINT = 5


def make_rows(seed: int, number: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    features = np.random.default_rng(seed).uniform(-1, 1, (number, 4))
    return features, features[:, 0] * features[:, 1] + np.sin(3 * features[:, 2])


@contextlib.contextmanager
def connected_workers() -> Iterator[None]:
    """Connect the workers within the block."""
    context = distrain.get_context()
    rank, tracker = context.get_world_rank(), None
    host, _, port = context.get_coordinator_address("xgboost").rpartition(":")
    if rank == 0:
        tracker = RabitTracker(context.get_world_size(), host, int(port), sortby="task")
        tracker.start()
    distrain.collective.barrier()  # the tracker listens
    worker = {"dmlc_tracker_uri": host, "dmlc_tracker_port": int(port), "dmlc_task_id": f"{rank:06d}"}
    with collective.CommunicatorContext(**worker):
        yield
    if tracker is not None:
        tracker.wait_for()


class Reporter(xgboost.callback.TrainingCallback):
    """Reports every round, and the model after some rounds. Rank 0 brings it, as all ranks have the same."""

    def __init__(self, kill: bool) -> None:
        self.kill = kill

    def after_iteration(self, model: xgboost.Booster, epoch: int, evals_log: dict[str, Any]) -> bool:
        done, rank = model.num_boosted_rounds(), distrain.get_context().get_world_rank()
        metrics = {"round": done, "rmse": evals_log["train"]["rmse"][-1]}  # over the rows of all workers
        if self.kill and done == KILLED_IN_ROUND and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as folder:
            model.save_model(Path(folder, MODEL_FILE))
            brings = rank == 0 and done % ROUNDS_PER_CHECKPOINT == 0
            distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder) if brings else None)
        return False  # do not stop


def train_func(config: dict[str, Any]) -> None:
    checkpoint, model = distrain.get_checkpoint(), None
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            model = xgboost.Booster(model_file=Path(folder, MODEL_FILE))
    done = 0 if model is None else model.num_boosted_rounds()
    print(f"begins after round {done}")
    with connected_workers():
        rows = xgboost.DMatrix(*make_rows(seed=distrain.get_context().get_world_rank()))
        xgboost.train(
            PARAMETERS,
            rows,
            num_boost_round=config["rounds"] - done,
            evals=[(rows, "train")],
            verbose_eval=False,
            xgb_model=model,
            callbacks=[Reporter(kill=model is None)],
        )


def main() -> None:
    result = DataParallelTrainer(
        train_func,
        train_loop_config={"rounds": 30},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    ).fit()
    print(f"a worker was killed in round {KILLED_IN_ROUND}, and the run went on: rmse {result.metrics['rmse']:.4f}")
    with result.checkpoint.as_directory() as folder:
        model = xgboost.Booster(model_file=Path(folder, MODEL_FILE))
    features, targets = make_rows(seed=99)
    error = model.predict(xgboost.DMatrix(features)) - targets
    print(f"{model.num_boosted_rounds()} rounds; rmse on other rows: {np.sqrt((error**2).mean()):.4f}")


if __name__ == "__main__":
    main()
