"""Imports that come late, or that fail with advice. Runs in: every process."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_OWN_EXTRA = ("jax", "lightning", "mlflow", "tensorboard", "tensorflow", "torch", "transformers", "wandb")
_EXTRAS = {
    "numpy": "data", "prometheus_client": "prometheus", "pyarrow": "data", "s3fs": "s3", "starlette": "board",
    "tf_keras": "tensorflow", "uvicorn": "board",
} | {it: it for it in _OWN_EXTRA}  # fmt: skip
"""By package: the extra of distrain that installs it."""
_SHOWN = re.compile(r"^    from (\S+) import (\w+) as \2$", re.MULTILINE)


def lazy_names(
    package: str,
    file: str,
    modules: Collection[str] = (),
    explain: Callable[[str, str], str] = "module {!r} has no attribute {!r}".format,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that imports its names on first use (PEP 562).

    file: of the package. Its names are those that it shows to editors and type checkers, in lines of ``if
    TYPE_CHECKING`` such as ``from distrain.api.result import Result as Result``.
    modules: public modules that can be used without importing them.
    explain: returns the text of the AttributeError for a name that the package lacks.
    """
    with open(file, encoding="utf-8") as source:
        home_of = {name: home for home, name in _SHOWN.findall(source.read())}
    public = sorted(home_of)

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        home = home_of.get(name)
        if home is None:
            raise AttributeError(explain(package, name))
        value = getattr(require(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*public, *modules}), public


def require(module: str) -> Any:
    """Import a module that needs a package which not everybody has. Raises ImportError that says how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "distrain":  # a bug in distrain; installing something won't help
            raise
        raise ModuleNotFoundError(f"{error}; install it with: {install_command(package)}", name=error.name) from error


def install_command(package: str) -> str:
    """Return the command that installs a package, with the extra of distrain that has it.

    >>> install_command("s3fs")
    "pip install 'distrain[s3]'"
    """
    return f"pip install 'distrain[{_EXTRAS[package]}]'" if package in _EXTRAS else f"pip install {package}"


def find_filesystem(url: str) -> tuple[Any, str]:
    """Return the filesystem of a URL, and the path there. Raises ImportError that says how to install its package."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:
        package = getattr(error.__cause__, "name", None)
        if package is None:
            raise
        raise ImportError(f"{package} is not installed: {install_command(package)}") from error


def when_imported(name: str, function: Callable[[], None]) -> None:
    """Call a function now if a module has been imported, else right after its import."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Hook(name, function))


class _Hook:
    """A finder of modules, for ``sys.meta_path``."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name, self._function = name, function
        self._is_asking = False

    def find_spec(self, name: str, *_: Any) -> Any:
        """Return the spec of the module, with a loader that calls the function."""
        if name != self._name or self._is_asking:
            return None
        from importlib.util import find_spec  # which imports much, and this module comes before all others

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
