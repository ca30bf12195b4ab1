"""The memory that processes of a host share (/dev/shm), when it was full. Runs in: agent, worker."""

from __future__ import annotations

import os
import re
import shutil

from distrain.system.text import binary_size, is_full_disk

BUS_ERROR = "is killed by signal: Bus error"
"""The words of torch when a worker of a DataLoader has died of SIGBUS."""
_FOLDER = "/dev/shm"  # noqa: S108
_TORCH = re.compile(rf"unable to (allocate shared memory|write to file </)|{BUS_ERROR}")


def shared_memory_problem(text: str) -> str | None:
    """Return what to do about an exception with this text, if it means that /dev/shm was full. Otherwise None."""
    if not os.path.isdir(_FOLDER):
        return None
    size, used, free = shutil.disk_usage(_FOLDER)
    is_full = free < 0.05 * size
    if not (_TORCH.search(text) or (is_full_disk(text) and (is_full or _FOLDER in text))):
        return None
    return (
        f"{_FOLDER} {'is full' if is_full else 'may have been full'}: {binary_size(used)} of its {binary_size(size)} "
        "are used now; give the container more (docker run --shm-size=8g; in Kubernetes an emptyDir with medium: "
        "Memory), or use fewer DataLoader workers, a smaller prefetch_factor or smaller batches"
    )
