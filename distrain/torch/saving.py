"""torch.save() to the temporary directory, by several ranks at once. Runs in: worker."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import torch


def save_in_one_step(folder: str) -> None:
    """Have torch.save() replace a file of this directory in one step.

    Ranks that write to one path would otherwise mix their bytes, and torch.load() reads such a file without an error.
    """
    save, folder = torch.save, os.path.realpath(folder)

    @functools.wraps(save)
    def replacing(obj: object, f: Any, *args: Any, **options: Any) -> None:
        if not isinstance(f, (str, os.PathLike)) or os.path.dirname(os.path.realpath(f)) != folder:
            save(obj, f, *args, **options)
            return
        with tempfile.TemporaryDirectory(dir=folder, prefix="distrain-save-") as own:
            written = os.path.join(own, os.path.basename(f))  # the archive has the name in it
            save(obj, written, *args, **options)
            os.replace(written, os.path.realpath(f))

    torch.save = replacing
