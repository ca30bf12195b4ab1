"""The memory that processes of a host share (/dev/shm), when it was full. Runs in: agent, worker."""

from __future__ import annotations

import os
import re

from distrain.system.text import binary_size, is_full_disk

_FOLDER = "/dev/shm"  # noqa: S108
_LEAST_FREE = 0.05
_TORCH = re.compile(r"unable to (allocate shared memory|write to file </)|is killed by signal: Bus error")
"""How torch says it: when it allocates, and when a worker of its DataLoader has died."""
_CURE = (
    "give the container a larger one (docker run --shm-size=8g; an emptyDir with medium: Memory in Kubernetes), or use "
    "fewer DataLoader workers, or a smaller prefetch_factor"
)


def shared_memory_after_bus_error() -> str:
    """Return the likely cause of a SIGBUS that has just ended a process."""
    size, free = _size()
    if not size:
        return ""
    if free < _LEAST_FREE * size:
        return f"{_FOLDER} is full: {_in_words(size, free)}; {_CURE}"
    return f"a crash in native code, or {_FOLDER} was full: {_in_words(size, free)} now"


def shared_memory_problem(text: str) -> str | None:
    """Return what to do about an exception with this text, if it means that /dev/shm was full. Otherwise None."""
    size, free = _size()
    is_full = is_full_disk(text) and (_FOLDER in text or free < _LEAST_FREE * size)
    if not size or not (is_full or _TORCH.search(text)):
        return None
    return (
        f"{_FOLDER}, by which processes of a host share memory, was too small or full: {_in_words(size, free)} now; "
        f"{_CURE}"
    )


def _in_words(size: int, free: int) -> str:
    return f"{binary_size(size - free)} of its {binary_size(size)} are used"


def _size() -> tuple[int, int]:
    """Return the size and the free bytes; zeros where there is none."""
    try:
        found = os.statvfs(_FOLDER)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
