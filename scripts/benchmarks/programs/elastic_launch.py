"""The Python interface of torchrun, which can run twice in one process: TASK WORKERS."""

import sys

from benchmark_tasks import TASKS, in_process_group, run_once_or_twice
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main() -> None:
    task, workers = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(workers),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="benchmark",
        max_restarts=0,
    )
    run_once_or_twice(task, lambda: elastic_launch(config, in_process_group)(TASKS[task]))


if __name__ == "__main__":
    main()
