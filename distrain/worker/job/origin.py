"""The script that a run comes from, and the beginning of its name. Runs in: coordinator."""

from __future__ import annotations

import re
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING

from distrain.worker.job.job import ScriptWork, TargetWork

if TYPE_CHECKING:
    from distrain.worker.job.job import Work

UNKNOWN = "distrain"
"""The beginning of the name of a run that comes from no file: a notebook, ``python -c``."""
_LONGEST = 60


def script_of(work: Work) -> str:
    """Return what the user has started: a script, a module or a function as on the command line; "" if unknown."""
    if isinstance(work, ScriptWork):
        return work.path or work.module or ""
    if isinstance(work, TargetWork):
        return work.target
    return str(getattr(sys.modules.get("__main__"), "__file__", None) or "")


def stem_of(script: str) -> str:
    """Return the beginning of the name of a run of this script.

    >>> [stem_of(script) for script in ("runs/train.py", "train.py:fit", "shop.train:fit", "shop.train", "")]
    ['train', 'train', 'train', 'train', 'distrain']
    """
    file = PurePath(re.sub(r":\w+$", "", script))
    stem = file.parent.name if file.name == "__main__.py" else file.name.removesuffix(".py")
    if file.suffix != ".py" and len(file.parts) == 1:  # a module
        stem = stem.rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip(".-")[:_LONGEST] or UNKNOWN
