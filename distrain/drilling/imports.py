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
        self._is_asking = False

    def find_spec(self, name: str, *_: Any) -> Any:
        """Return the spec of the module, with a loader that calls the function."""
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True  # the other finders; many libraries ask whether torch is installed, and import it later
        try:
            spec = find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            execute: Callable[[Any], None] = spec.loader.exec_module

            def execute_and_call(module: Any) -> None:
                sys.meta_path.remove(self)
                execute(module)
                self._function()

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
