"""The places of this user's queue and jobs. Runs in: waiter, commands."""

from __future__ import annotations

import os
from pathlib import Path

QUEUE = "DISTRAIN_QUEUE"
"""Environment variable: the directory of the queue, or ``ssh://host/directory``."""


def has_queue() -> bool:
    """Tell if this user has a queue; :func:`open_desk` would make one."""
    return bool(os.environ.get(QUEUE)) or (state_folder() / "queue").is_dir()


def state_folder() -> Path:
    """Return the directory for what distrain keeps about this user's jobs on this machine."""
    parent = os.environ.get("XDG_STATE_HOME", "")
    return Path(parent if os.path.isabs(parent) else "~/.local/state").expanduser() / "distrain"
