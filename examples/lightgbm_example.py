"""Train LightGBM on two workers, each with a part of the rows.

    pip install 'distrain[frameworks]'
    python examples/lightgbm_example.py

Every worker of LightGBM listens at an address that distrain reserves, and knows those of all. A worker is killed in
between, and the run continues from the last checkpoint, which is a file of LightGBM.
"""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np

import distrain
from distrain import Checkpoint, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

MODEL_FILE = "model.txt"
PARAMETERS = {"objective": "regression", "metric": "rmse", "num_leaves": 15, "learning_rate": 0.3, "verbose": -1}
KILLED_IN_ROUND = 7
ROUNDS_PER_CHECKPOINT = 5


def make_rows(seed: int, number: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    features = np.random.default_rng(seed).uniform(-1, 1, (number, 4))
    return features, features[:, 0] * features[:, 1] + np.sin(3 * features[:, 2])


def network() -> dict[str, Any]:
    """Return LightGBM's parameters that connect the workers."""
    context = distrain.get_context()
    addresses = context.get_worker_addresses("lightgbm")
    own_port = addresses[context.get_world_rank()].rpartition(":")[2]
    return {
        "tree_learner": "data",  # each worker has rows of its own
        "pre_partition": True,
        "num_machines": len(addresses),
        "machines": ",".join(addresses),
        "local_listen_port": int(own_port),
    }


class Reporter:
    """Reports every round, and the model after some rounds. Rank 0 brings it, as all ranks have the same."""

    def __init__(self, kill: bool) -> None:
        self.kill = kill

    def __call__(self, env: lightgbm.callback.CallbackEnv) -> None:
        done, rank = env.model.current_iteration(), distrain.get_context().get_world_rank()
        [(_, _, rmse, _)] = env.evaluation_result_list
        if self.kill and done == KILLED_IN_ROUND and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as folder:
            env.model.save_model(Path(folder, MODEL_FILE))
            brings = rank == 0 and done % ROUNDS_PER_CHECKPOINT == 0
            checkpoint = Checkpoint.from_directory(folder) if brings else None
            distrain.report({"round": done, "rmse": rmse}, checkpoint=checkpoint)


def train_func(config: dict[str, Any]) -> None:
    checkpoint, model = distrain.get_checkpoint(), None
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            model = lightgbm.Booster(model_file=Path(folder, MODEL_FILE))
    done = 0 if model is None else model.current_iteration()
    print(f"begins after round {done}")
    rows = lightgbm.Dataset(*make_rows(seed=distrain.get_context().get_world_rank()), free_raw_data=False)
    trained = lightgbm.train(
        {**PARAMETERS, **network()},
        rows,
        num_boost_round=config["rounds"] - done,
        valid_sets=[rows],
        valid_names=["train"],
        init_model=model,
        callbacks=[Reporter(kill=model is None)],
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
    with result.checkpoint.as_directory() as folder:
        model = lightgbm.Booster(model_file=Path(folder, MODEL_FILE))
    features, targets = make_rows(seed=99)
    error = model.predict(features) - targets
    print(f"{model.current_iteration()} rounds; rmse on other rows: {np.sqrt((error**2).mean()):.4f}")


if __name__ == "__main__":
    main()
