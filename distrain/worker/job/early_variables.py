"""Environment variables that users set before they import the libraries that read them. Runs in: coordinator, worker.

A forkserver imports torch before it forks the workers, so that a variable that a script sets above its own ``import
torch`` would come too late. If the source of a script names one there, nothing is imported before it. What the source
does not show, such as a variable that an imported module sets, is noticed when the user's code imports torch.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from distrain.api import current
from distrain.system.log import warn

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_READ_AT_IMPORT = re.compile(
    r"\b((G?OMP|KMP|MKL|MKLDNN|ONEDNN|DNNL|KINETO|PYTORCH|GOTO|OPENBLAS|NPY|NUMPY)_\w+"
    r"|TORCH(?!_(HOME|EXTENSIONS_DIR|CUDA_ARCH_LIST|NCCL_))\w+)"
)
"""The variables that torch, numpy, or a library that these load, reads once."""
_IMPORT = re.compile(r"^\s*(import .*\b(torch|numpy)\b|from (torch|numpy)\b)", re.MULTILINE)
"""An import of one of the modules that workers of scripts would have imported before."""


def sets_early(source: str) -> bool:
    """Tell if a script names such a variable above its first import of a package that reads it."""
    first = _IMPORT.search(source)
    return _READ_AT_IMPORT.search(source, 0, first.start() if first else len(source)) is not None


# -- in the worker ---------------------------------------------------------------------------------------------------


def watch() -> None:
    """Hide torch and numpy until the user's code imports them. Rank 0 names the variables that it has set by then."""
    if current.session is not None and "torch" in sys.modules:  # there is no session under --as-ray
        sys.meta_path.insert(0, _Hidden(says=current.session.context.world_rank == 0))


def end_watch() -> None:
    """Show what is still hidden."""
    for finder in sys.meta_path[:]:
        if isinstance(finder, _Hidden):
            finder.show("torch")


class _Hidden:
    """What was imported of torch and numpy before the user's code. An import finds it as it is."""

    def __init__(self, *, says: bool) -> None:
        self._says, self._before = says, _variables()
        names = [name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy")]
        self._modules: dict[str, Any] = {name: sys.modules.pop(name) for name in names}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if "." in name or name not in self._modules:
            return None
        spec = copy.copy(self._modules[name].__spec__)
        spec.loader, spec.loader_state = self, self._modules[name].__spec__
        return spec  # type: ignore[no-any-return]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.show(spec.name)
        return self._modules[spec.name]  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state  # type: ignore[union-attr]

    def show(self, package: str) -> None:
        """Make a package visible, and name the variables that have changed."""
        prefix = "numpy" if package == "numpy" else ""  # torch imports numpy
        sys.modules.update({name: module for name, module in self._modules.items() if name.startswith(prefix)})
        if not prefix:
            sys.meta_path.remove(self)
        before, self._before = self._before, _variables()
        changed = sorted(name for name, _ in before.items() ^ self._before.items())
        if changed and self._says:
            warn(
                f"{package} may not notice the value of {', '.join(dict.fromkeys(changed))}, which your code sets "
                f"before it imports {package}: workers are forked from a process that has imported it already. Set "
                "it where you start the run, or with --env; scripts may use --start-method spawn instead"
            )


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _READ_AT_IMPORT.fullmatch(name)}
