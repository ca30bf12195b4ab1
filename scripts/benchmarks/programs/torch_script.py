"""A script for torchrun and ``distrain.launch``: TASK is its argument."""

import sys

from benchmark_tasks import TASKS, in_process_group

in_process_group(TASKS[sys.argv[1]])
