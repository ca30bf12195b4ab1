"""Train LightGBM on two workers, each with a part of the rows.

    pip install 'distrain[frameworks]'
    python examples/lightgbm_example.py

Every worker of LightGBM listens at an address that distrain reserves, and knows those of all. A worker is killed in
between, and the run continues from the last checkpoint, which is a file of LightGBM.
"""

import os
import signal
from typing import Any

import lightgbm
import numpy as np

import distrain
from distrain import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from distrain.lightgbm import RayTrainReportCallback, get_network_params

PARAMETERS = {"objective": "regression", "metric": "rmse", "num_leaves": 15, "learning_rate": 0.3, "verbose": -1}
KILLED_IN_ROUND = 7
ROUNDS_PER_CHECKPOINT = 5


def make_rows(seed: int, number: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    features = np.random.default_rng(seed).uniform(-1, 1, (number, 4))
    return features, features[:, 0] * features[:, 1] + np.sin(3 * features[:, 2])


def kill(env: lightgbm.callback.CallbackEnv) -> None:
    """Kill the worker of rank 1."""
    if env.model.current_iteration() == KILLED_IN_ROUND and distrain.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def train_func(config: dict[str, Any]) -> None:
    checkpoint = distrain.get_checkpoint()
    model = RayTrainReportCallback.get_model(checkpoint) if checkpoint else None
    done = 0 if model is None else model.current_iteration()
    print(f"begins after round {done}")
    rows = lightgbm.Dataset(*make_rows(seed=distrain.get_context().get_world_rank()), free_raw_data=False)
    reporter = RayTrainReportCallback(metrics={"rmse": "train-rmse"}, frequency=ROUNDS_PER_CHECKPOINT)
    own_rows = {"tree_learner": "data", "pre_partition": True}  # each worker has rows of its own
    trained = lightgbm.train(
        {**PARAMETERS, **own_rows, **get_network_params()},
        rows,
        num_boost_round=config["rounds"] - done,
        valid_sets=[rows],
        valid_names=["train"],
        init_model=model,
        callbacks=[reporter] if model else [reporter, kill],
    )
    trained.free_network()


def main() -> None:
    result = DataParallelTrainer(
        train_func,
        train_loop_config={"rounds": 30},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    ).fit()
    print(f"a worker was killed in round {KILLED_IN_ROUND}, and the run went on: rmse {result.metrics['rmse']:.4f}")
    model = RayTrainReportCallback.get_model(result.checkpoint)
    features, targets = make_rows(seed=99)
    error = model.predict(features) - targets
    print(f"{model.current_iteration()} rounds; rmse on other rows: {np.sqrt((error**2).mean()):.4f}")


if __name__ == "__main__":
    main()
