"""A user's script with ``distrain.torch.TorchTrainer``: TASK WORKERS START_METHOD [import-torch]."""

import os
import sys

import benchmark_tasks
import checkpoint_task

import distrain
from distrain.torch import TorchTrainer

REPORTS = 10_000


def measure_reports() -> None:
    benchmark_tasks.measure_reports(distrain.report, REPORTS)


def measure_checkpoints() -> None:
    def path_of_committed() -> str | None:
        checkpoint = distrain.get_checkpoint()
        return checkpoint.path if checkpoint else None

    checkpoint_task.measure_checkpoints(distrain, path_of_committed)


def train_ddp() -> None:
    from distrain.torch import prepare_model

    benchmark_tasks.train_ddp(prepare_model)


def main() -> None:
    task, workers, start_method, *rest = sys.argv[1:]
    if rest == ["import-torch"]:  # as most scripts do
        import torch  # noqa: F401
    own_tasks = {"report": measure_reports, "checkpoint": measure_checkpoints, "ddp": train_ddp}
    tasks = {**benchmark_tasks.TASKS, **own_tasks}
    disk = os.environ.get("BENCHMARK_DISK", os.environ["BENCHMARK_OUT"])
    trainer = TorchTrainer(
        tasks[task],
        scaling_config=distrain.ScalingConfig(
            num_workers=int(workers), use_gpu=benchmark_tasks.WITH_GPUS, start_method=start_method
        ),
        run_config=distrain.RunConfig(storage_path=disk + "/runs"),
    )
    results = []
    benchmark_tasks.run_once_or_twice(task, lambda: results.append(trainer.fit()))
    if task == "report":
        with open(results[0].path + "/metrics.jsonl") as lines:
            benchmark_tasks.write("kept", {"kept": sum(1 for _ in lines), "made": (REPORTS + 1) * int(workers)})


if __name__ == "__main__":
    main()
