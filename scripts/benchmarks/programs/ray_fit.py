"""A user's script with Ray Train: TASK WORKERS REPORTS."""

import os
import sys
import time

import benchmark_tasks
import checkpoint_task
import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer


def measure_checkpoints() -> None:
    def path_of_committed() -> str | None:
        """Wait until all reported checkpoints are committed, and return the path of the latest."""
        reported = ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED)
        return reported[-1].checkpoint.path if reported else None

    checkpoint_task.measure_checkpoints(ray.train, path_of_committed)


def train_ddp() -> None:
    from ray.train.torch import prepare_model

    benchmark_tasks.train_ddp(prepare_model)


def main() -> None:
    task, workers, reports = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # Ray needs one CPU per worker; distrain needs none.
    ray.init(num_cpus=max(workers, os.cpu_count() or 1))
    benchmark_tasks.write("ray_ready", time.time())

    def measure_reports() -> None:
        benchmark_tasks.measure_reports(ray.train.report, reports)

    own_tasks = {"report": measure_reports, "checkpoint": measure_checkpoints, "ddp": train_ddp}
    tasks = {**benchmark_tasks.TASKS, **own_tasks}
    disk = os.environ.get("BENCHMARK_DISK", os.environ["BENCHMARK_OUT"])

    def fit() -> object:
        return TorchTrainer(
            tasks[task],
            torch_config=TorchConfig(backend=benchmark_tasks.BACKEND),
            scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=benchmark_tasks.WITH_GPUS),
            run_config=ray.train.RunConfig(storage_path=disk + "/runs"),
        ).fit()

    benchmark_tasks.run_once_or_twice(task, fit)
    ray.shutdown()


if __name__ == "__main__":
    main()
