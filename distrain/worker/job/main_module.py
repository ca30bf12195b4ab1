"""The user's ``__main__`` in a worker, and in the children that its libraries start. Runs in: worker, validator.

Workers do not run the user's script again. Classes and functions of the script that came with a pickled train_func must
be found all the same: by ``torch.save`` of a whole model, and by DataLoader workers and pools of every start method.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import io
import os
import pickle
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import cloudpickle

from distrain.system.pickling import MAIN_NAMES, pickled

if TYPE_CHECKING:
    from collections.abc import Mapping

# cloudpickle's record of the classes that it made; there is no public way to it.
_DYNAMIC_CLASSES: Mapping[str, type] = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})


def replace_main() -> types.ModuleType:
    """Install a new, empty ``__main__``, also under the second name that multiprocessing uses for it."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


def run_script(path: str) -> None:
    """Run a file as ``python path`` does."""
    path = os.path.join(os.getcwd(), path)  # like the interpreter: absolute, with links and dots unresolved
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = replace_main()
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(code, main.__dict__)  # noqa: S102 - it is the user's script


def run_module(name: str) -> None:
    """Run a module as ``python -m name`` does; the arguments are in sys.argv already."""
    replace_main()
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]


# -- unpickled functions and classes ---------------------------------------------------------------------------------


def publish(function: object) -> None:
    """Define what came with a pickled function in the ``__main__`` of this process and of its children."""
    main = vars(sys.modules["__main__"])
    function = inspect.unwrap(getattr(function, "func", function))  # type: ignore[arg-type]
    namespace = getattr(function, "__globals__", {})
    if namespace.get("__name__") in MAIN_NAMES:
        main.update({name: value for name, value in namespace.items() if not name.startswith("__")})
    for cls in list(_DYNAMIC_CLASSES.values()):  # including those that came with the config or with an object
        if cls.__module__ in MAIN_NAMES and "." not in cls.__qualname__:
            main.setdefault(cls.__qualname__, cls)
    _send_by_value()


def load(blob: bytes) -> Any:
    """Unpickle a class or function in a child process, and publish it there."""
    value = pickle.loads(blob)  # noqa: S301 - multiprocessing's own pipe to its own child
    with contextlib.suppress(AttributeError, TypeError):
        if "." not in value.__qualname__:
            vars(sys.modules["__main__"]).setdefault(value.__qualname__, value)
    _send_by_value()
    return value


def _send_by_value() -> None:
    """Make multiprocessing and cloudpickle send classes and functions of ``__main__`` by value, under both its names.

    A class that a child sends back is the same class again, because cloudpickle keeps track of it.
    """
    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    setattr(ForkingPickler, "reducer_override", _reduce)  # noqa: B010 - mypy takes it for a method of ForkingPickler


def _reduce(pickler: ForkingPickler, value: object) -> Any:
    if isinstance(value, (type, types.FunctionType)) and value.__module__ in MAIN_NAMES:
        return load, (pickled(value),)
    return NotImplemented
