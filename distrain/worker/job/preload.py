"""The installed modules that a forkserver imports before it forks the workers. Runs in: coordinator."""

from __future__ import annotations

import dis
import importlib.util
import inspect
import io
import pickletools
import sys
import types
from typing import TYPE_CHECKING, Any

from distrain.system.pickling import MAIN_NAMES
from distrain.system.text import LIBRARY_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NEVER_PRELOADED = frozenset({"tensorflow", "keras", "tf_keras"})
"""Packages that do not survive a fork. A worker that needs one imports it itself."""


def makes_optimizers(blob: bytes, function: Callable[..., Any] | None = None) -> bool:
    """Tell if a pickled function, or one that is pickled by name, probably makes an optimizer of torch."""
    words = set(_words(blob))
    function = inspect.unwrap(getattr(function, "func", function))  # type: ignore[arg-type]
    if isinstance(function, types.FunctionType):
        words |= {name for code in _codes(function.__code__) for name in code.co_names}
        words |= _modules_in_namespace(function.__module__)
    return any(word == "optim" or word.startswith(("torch.optim", "transformers", "lightning")) for word in words)


def third_party_modules(blob: bytes, function: Callable[..., Any] | None = None) -> list[str]:
    """Return the installed modules that a pickle names or that a function imports, sorted. User files are left out."""
    named = {word for word in _words(blob) if word in sys.modules}
    if function is not None:
        named |= _modules_of_function(function)
    for name in sorted(named):
        if not _is_installed(name):
            named |= _modules_in_namespace(name)
    return sorted(name for name in named if _is_installed(name))


def _words(blob: bytes) -> Iterator[str]:
    """Yield the strings in a pickle: names of modules, and names that a function uses."""
    return (argument for _, argument, _ in pickletools.genops(io.BytesIO(blob)) if isinstance(argument, str))


def _modules_of_function(function: object) -> set[str]:
    """Return the module of a function, and the modules that it imports in its body."""
    function = inspect.unwrap(getattr(function, "func", function))  # type: ignore[arg-type]
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", None)
    return ({module} if module else set()) | (_imports(code) if code else set())


def _imports(code: types.CodeType) -> set[str]:
    instructions = (one for inner in _codes(code) for one in dis.get_instructions(inner))
    return {str(one.argval) for one in instructions if one.opname == "IMPORT_NAME" and one.argval}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _modules_in_namespace(name: str) -> set[str]:
    """Return the modules that define the values in a user module's namespace. A worker imports them with it."""
    module = sys.modules.get(name)
    if name in MAIN_NAMES or module is None:
        return set()
    return {home for value in list(vars(module).values()) if isinstance(home := _home(value), str)}


def _home(value: object) -> object:
    """Return the name of the module that a value is, or is from.

    Only the value's type is asked: an attribute of the value itself may be a property that warns, imports or fails, and
    even ``isinstance`` reads ``__class__``.
    """
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        return types.ModuleType.__getattribute__(value, "__dict__").get("__name__")
    if issubclass(kind, type):
        return type.__getattribute__(value, "__module__")
    if issubclass(kind, (types.FunctionType, types.BuiltinFunctionType)):
        return object.__getattribute__(value, "__module__")
    return type.__getattribute__(kind, "__module__")


def _is_installed(name: str) -> bool:
    """Tell if a module is in site-packages. Editable installs are not: the user may change them between two runs."""
    top = name.partition(".")[0]
    if top in ("distrain", "cloudpickle", "__main__") or top in _NEVER_PRELOADED or not top.isidentifier():
        return False
    if top in sys.stdlib_module_names:
        return False
    module = sys.modules.get(top)
    try:
        spec = getattr(module, "__spec__", None) or importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    origin = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
    return bool(origin) and LIBRARY_FILE.search(str(origin)) is not None
