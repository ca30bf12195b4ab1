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
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_READ_AT_IMPORT = re.compile(
    r"\b((G?OMP|KMP|MKL|MKLDNN|ONEDNN|DNNL|KINETO|PYTORCH|GOTO|OPENBLAS|NPY|NUMPY)_\w+"
    r"|TORCH(?!_(HOME|EXTENSIONS_DIR|CUDA_ARCH_LIST|NCCL_))\w+)"
)
"""The variables that torch, numpy, or a library that these load, reads once."""
_IMPORT = re.compile(r"^\s*(import .*\btorch\b|from torch\b)", re.MULTILINE)


def sets_early(source: str) -> bool:
    """Tell if a script names such a variable above its first import of torch."""
    first = _IMPORT.search(source)
    return _READ_AT_IMPORT.search(source, 0, first.start() if first else len(source)) is not None


# -- in the worker ---------------------------------------------------------------------------------------------------


def watch() -> Callable[[], None]:
    """Hide torch until the user's code imports it. Rank 0 names the variables that the code has set by then.

    Returns what shows torch, if it is still hidden.
    """
    if current.session is None or "torch" not in sys.modules:  # there is no session under --as-ray
        return lambda: None
    hidden = _Hidden(says=current.session.context.world_rank == 0)
    sys.meta_path.insert(0, hidden)
    return hidden.show


class _Hidden:
    """The part of torch that was imported before the user's code. An import finds it as it is."""

    def __init__(self, *, says: bool) -> None:
        self._says, self._before = says, _variables()
        names = [name for name in sys.modules if name.partition(".")[0] == "torch"]
        self._modules: dict[str, Any] = {name: sys.modules.pop(name) for name in names}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = copy.copy(self._modules[name].__spec__)
        spec.loader = self
        return spec  # type: ignore[no-any-return]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.show()
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__  # type: ignore[union-attr]

    def show(self) -> None:
        """Make torch visible, and name the variables that have changed."""
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        changed = sorted({name for name, _ in self._before.items() ^ _variables().items()})
        if changed and self._says:
            warn(
                f"torch may not notice the value of {', '.join(changed)}, which your code sets before importing torch: "
                "distrain has imported it already. Set it where you start the run, or with --env; scripts may use "
                "--start-method spawn instead"
            )


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _READ_AT_IMPORT.fullmatch(name)}
