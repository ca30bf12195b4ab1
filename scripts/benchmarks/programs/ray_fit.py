"""A user's script with Ray Train: TASK WORKERS REPORTS."""

import os
import sys
import time

import benchmark_tasks
import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer


def train_ddp() -> None:
    from ray.train.torch import prepare_model

    benchmark_tasks.train_ddp(prepare_model)


def main() -> None:
    task, workers, reports = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # As many CPUs as the workers ask for; distrain asks for none.
    ray.init(num_cpus=max(workers, os.cpu_count() or 1))
    benchmark_tasks.write("ray_ready", time.time())

    def measure_reports() -> None:
        benchmark_tasks.measure_reports(ray.train.report, reports)

    tasks = {**benchmark_tasks.TASKS, "report": measure_reports, "ddp": train_ddp}

    def fit() -> object:
        return TorchTrainer(
            tasks[task],
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(storage_path=os.environ["BENCHMARK_OUT"] + "/runs"),
        ).fit()

    benchmark_tasks.run_once_or_twice(task, fit)
    ray.shutdown()


if __name__ == "__main__":
    main()
