"""A script for ``accelerate launch``: TASK is its argument."""

import sys

from accelerate import Accelerator
from benchmark_tasks import TASKS, WITH_GPUS, train_ddp

accelerator = Accelerator(cpu=not WITH_GPUS)
task = sys.argv[1]
if task == "ddp":
    train_ddp(accelerator.prepare_model)
else:
    TASKS[task]()
accelerator.end_training()
