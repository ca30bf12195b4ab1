"""The stand-in for Ray in the process of the tests, where an import of any part of ``distrain.as_ray`` activates it."""

from __future__ import annotations

import importlib.util
import os
import sys

from distrain.as_ray.importing import Finder


def leave() -> None:
    """Undo ``activate()``, so that other tests meet no stand-in."""
    if Finder not in sys.meta_path:
        return
    sys.meta_path.remove(Finder)  # type: ignore[arg-type]
    importlib.util.find_spec = importlib.util.find_spec.__wrapped__  # type: ignore[attr-defined]
    os.environ.pop("DISTRAIN_AS_RAY", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        del sys.modules[name]
