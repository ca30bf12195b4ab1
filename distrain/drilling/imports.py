"""Functions that are called once a module has been imported. Runs in: worker, launcher."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def when_imported(name: str, function: Callable[[], None]) -> None:
    """Call a function now if a module has been imported, else right after its import."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Hook(name, function))


class _Hook(MetaPathFinder):
    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name, self._function = name, function

    def find_spec(self, name: str, *_: Any) -> Any:
        """Return the spec of the module, with a loader that calls the function."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute: Callable[[Any], None] = spec.loader.exec_module

            def execute_and_call(module: Any) -> None:
                execute(module)
                self._function()

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
