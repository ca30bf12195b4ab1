"""Environment variables that a script sets before it imports the libraries that read them. Runs in: coordinator.

A forkserver imports torch before it forks the workers, so that a variable that a script sets above its own ``import
torch`` would come too late. If the source of a script names one there, nothing is imported before it.
"""

from __future__ import annotations

import re
from pathlib import Path

_READ_AT_IMPORT = re.compile(
    r"\b((G?OMP|KMP|MKL|MKLDNN|ONEDNN|DNNL|KINETO|PYTORCH|GOTO|OPENBLAS|NPY|NUMPY)_\w+"
    r"|TORCH(?!_(HOME|EXTENSIONS_DIR|CUDA_ARCH_LIST|NCCL_))\w+)"
)
"""The variables that torch, numpy, or a library that these load, reads once."""
_IMPORT = re.compile(r"^\s*(import .*\b(torch|numpy)\b|from (torch|numpy)\b)", re.MULTILINE)
"""An import of one of the modules that workers of scripts would have imported before."""


def sets_early(path: str) -> bool:
    """Tell if a script names such a variable above its first import of a package that reads it."""
    try:
        source = Path(path).read_text(errors="replace")
    except OSError:  # running it will show the error
        return False
    first = _IMPORT.search(source)
    return _READ_AT_IMPORT.search(source, 0, first.start() if first else len(source)) is not None
