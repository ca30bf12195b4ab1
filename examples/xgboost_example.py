"""Train XGBoost on two workers, each with a part of the rows.

    pip install 'distrain[frameworks]'
    python examples/xgboost_example.py

XGBoost's workers find each other through a tracker in rank 0. A worker is killed in between, and the run continues from
the last checkpoint, which is a file of XGBoost.
"""

import os
import signal
from typing import Any

import numpy as np
import xgboost

import distrain
from distrain import FailureConfig, RunConfig, ScalingConfig
from distrain.xgboost import RayTrainReportCallback, XGBoostTrainer

PARAMETERS = {"objective": "reg:squarederror", "max_depth": 4, "eta": 0.3}
KILLED_IN_ROUND = 7
ROUNDS_PER_CHECKPOINT = 5


def make_rows(seed: int, number: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    features = np.random.default_rng(seed).uniform(-1, 1, (number, 4))
    return features, features[:, 0] * features[:, 1] + np.sin(3 * features[:, 2])


class Killer(xgboost.callback.TrainingCallback):
    """Kills the worker of rank 1."""

    def after_iteration(self, model: xgboost.Booster, epoch: int, evals_log: dict[str, Any]) -> bool:
        if model.num_boosted_rounds() == KILLED_IN_ROUND and distrain.get_context().get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return False  # do not stop


def train_func(config: dict[str, Any]) -> None:
    checkpoint = distrain.get_checkpoint()
    model = RayTrainReportCallback.get_model(checkpoint) if checkpoint else None
    done = 0 if model is None else model.num_boosted_rounds()
    print(f"begins after round {done}")
    rows = xgboost.DMatrix(*make_rows(seed=distrain.get_context().get_world_rank()))
    reporter = RayTrainReportCallback(metrics={"rmse": "train-rmse"}, frequency=ROUNDS_PER_CHECKPOINT)
    xgboost.train(
        PARAMETERS,
        rows,
        num_boost_round=config["rounds"] - done,
        evals=[(rows, "train")],
        verbose_eval=False,
        xgb_model=model,
        callbacks=[reporter] if model else [reporter, Killer()],
    )


def main() -> None:
    result = XGBoostTrainer(
        train_func,
        train_loop_config={"rounds": 30},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    ).fit()
    print(f"a worker was killed in round {KILLED_IN_ROUND}, and the run went on: rmse {result.metrics['rmse']:.4f}")
    model = RayTrainReportCallback.get_model(result.checkpoint)
    features, targets = make_rows(seed=99)
    error = model.predict(xgboost.DMatrix(features)) - targets
    print(f"{model.num_boosted_rounds()} rounds; rmse on other rows: {np.sqrt((error**2).mean()):.4f}")


if __name__ == "__main__":
    main()
