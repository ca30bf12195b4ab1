"""Train until the benchmark ends the run, and write down each rank's first all_reduce.

Under torchrun: no argument. As a user's script with a TorchTrainer: WORKERS MAX_FAILURES.
"""

import os
import sys
import time
from pathlib import Path

from benchmark_tasks import WITH_GPUS, device, in_process_group, write

STEP_S = 0.005


def train() -> None:
    import torch
    from torch import distributed

    rank, first = distributed.get_rank(), True
    end = Path(os.environ["BENCHMARK_OUT"], "recovered.json")
    while True:
        over = torch.tensor(float(end.exists()), device=device())
        distributed.all_reduce(over)  # so all ranks end in the same step
        if first:
            restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])  # distrain sets it too
            write(f"first_{rank}_{time.time_ns()}", {"pid": os.getpid(), "restarts": restarts})
            first = False
        if over:
            return
        time.sleep(STEP_S)


def fit(workers: int, max_failures: int) -> None:
    import distrain
    from distrain.torch import TorchTrainer

    trainer = TorchTrainer(
        train,
        scaling_config=distrain.ScalingConfig(num_workers=workers, use_gpu=WITH_GPUS),
        run_config=distrain.RunConfig(
            storage_path=os.environ["BENCHMARK_OUT"] + "/runs",
            failure_config=distrain.FailureConfig(max_failures=max_failures),
        ),
    )
    try:
        trainer.fit()
    except distrain.TrainingFailedError:
        write("raised", time.time())


if __name__ == "__main__":
    if sys.argv[1:]:
        fit(*map(int, sys.argv[1:]))
    else:
        in_process_group(train)
