"""A user's script with torchrunx: TASK WORKERS."""

import os
import sys

import torchrunx
from benchmark_tasks import BACKEND, TASKS, run_once_or_twice


def main() -> None:
    task, workers = sys.argv[1:]
    # By default, torchrunx passes on only some environment variables.
    names = ("BENCHMARK_OUT", "BENCHMARK_DEVICE", "OMP_NUM_THREADS", "HOME")
    launcher = torchrunx.Launcher(
        hostnames=["localhost"],
        workers_per_host=int(workers),
        backend=BACKEND,
        extra_env_vars={name: os.environ[name] for name in names if name in os.environ},
    )
    run_once_or_twice(task, lambda: launcher.run(TASKS[task]))


if __name__ == "__main__":
    main()
