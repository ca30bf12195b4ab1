"""What a worker will run, as opaque bytes: made in the coordinator, opened in the workers only.

Runs in: coordinator, worker.
"""

from __future__ import annotations

import copy
import dis
import functools
import importlib
import importlib.util
import inspect
import io
import linecache
import os
import pickle
import pickletools
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from distrain.errors import JobError, StandInError

if TYPE_CHECKING:
    from distrain.backend import BackendConfig
    from distrain.errors import RankFailure

LARGE_PAYLOAD_BYTES = 10_000_000
_DEEPEST_SEARCH = 6
_LARGEST_SOURCES = 1 << 20
_MOST_ITEMS = 100
"""A collection with more items is named as a whole."""
_NEVER_PRELOADED = frozenset({"tensorflow", "keras", "tf_keras"})
"""They do not survive a fork; a worker that needs them imports them itself."""


# -- what runs in the worker -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Work:
    """The pickled object: knows how to run itself in a worker."""

    backend: BackendConfig
    initialises_backend = True

    def run(self) -> Any:
        """Run in the main thread of the worker; the return value of train_func, None for scripts."""
        raise NotImplementedError

    def fresh(self) -> Work:
        """The same to be run once more in this process, whatever train_func did to its config."""
        return self


@dataclass(frozen=True, kw_only=True)
class FunctionWork(Work):
    """A training function and its config."""

    function: Callable[..., Any]
    config: dict[str, Any]
    validates: bool = False
    """Whether it is the validation function; for error messages."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Lines of code that is in no file, such as a notebook's cells, for tracebacks."""

    def run(self) -> Any:
        for name, lines in self.sources.items():
            linecache.cache.setdefault(name, (sum(map(len, lines)), None, lines, name))
        return call_with_config(self.function, self.config)

    def fresh(self) -> FunctionWork:
        return replace(self, config=_copied(self.config))


@dataclass(frozen=True, kw_only=True)
class TargetWork(Work):
    """``file.py:function`` or ``module:function``, imported in the worker, so that the coordinator need not.
    launched_in: see :class:`ScriptWork`.
    """

    target: str
    config: dict[str, Any]
    launched_in: str = ""

    def run(self) -> Any:
        return call_with_config(self._load(), self.config)

    def fresh(self) -> TargetWork:
        return replace(self, config=_copied(self.config))

    def _load(self) -> Callable[..., Any]:
        place, _, name = self.target.rpartition(":")
        is_file = place.endswith(".py")
        module = _import_file(Path(_found(place, self.launched_in))) if is_file else importlib.import_module(place)
        function = getattr(module, name, None)
        if not callable(function):
            raise JobError(f"{self.target}: {place} has no function {name!r}")
        return check_signature(function)


@dataclass(frozen=True, kw_only=True)
class ScriptWork(Work):
    """A script (``path``; also a zip file or a directory with a ``__main__.py``) or a module (``module``) with its own
    arguments, run as ``__main__`` as torchrun does.
    launched_in: the directory in which the launcher has found the script, where workers may be in another.
    """

    path: str | None = None
    module: str | None = None
    argv: list[str] = field(default_factory=list)
    launched_in: str = ""
    initialises_backend = False

    def run(self) -> None:
        from distrain.work import main_module

        if self.module is not None:
            sys.argv = [self.module, *self.argv]
            main_module.run_module(self.module)
        else:
            assert self.path is not None
            path = _found(self.path, self.launched_in)
            sys.argv = [path, *self.argv]
            if main_module.is_archive(path):
                sys.path[0:0] = [os.path.abspath(path)]
                main_module.run_archive()
            else:
                sys.path[0:0] = [str(Path(path).resolve().parent)]
                main_module.run_script(path)


def _found(path: str, launched_in: str) -> str:
    """The user's file, seen from the working directory, where a host may have a copy of its own, or else from where it
    was launched, which hosts may share. Raises JobError.
    """
    if _can_run(path):
        return path
    launched = os.path.join(launched_in, path)
    if _can_run(launched):
        return launched
    places = dict.fromkeys(map(os.path.abspath, (path, launched)))
    hint = "share it between the hosts, copy it there, or set cwd= in the hostfile"
    raise JobError(f"this host has no file {' and no file '.join(places)}; {hint}")


def _can_run(path: str) -> bool:
    from distrain.work import main_module

    return os.path.isfile(path) or main_module.is_archive(path)


def _copied(config: dict[str, Any]) -> dict[str, Any]:
    try:
        return copy.deepcopy(config)
    except Exception:  # what cannot be copied is shared
        return dict(config)


def _import_file(path: Path) -> types.ModuleType:
    """Import the file itself, also if a module of its name is loaded already: ``queue.py`` may be a user's script."""
    path = path.resolve()
    sys.path[0:0] = [str(path.parent)]
    name = f"{path.stem}__target" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, if it can be called with a config or with nothing, and then runs. Raises TypeError or
    ValueError otherwise.
    """
    if not callable(function):
        raise TypeError(f"train_loop_per_worker must be a function, got {function!r} ({type(function).__name__})")
    check_plain("train_loop_per_worker", function)
    required = [p for p in _parameters(function) if p.default is p.empty and p.kind not in _VARIADIC]
    keywords = [p.name for p in required if p.kind is p.KEYWORD_ONLY]
    if len(required) > 1 or keywords:
        names = ", ".join(p.name for p in required)
        raise ValueError(
            f"train_loop_per_worker must take no argument or one (the config); {_name(function)} requires: {names}. "
            "Put what it needs into train_loop_config, or bind it with functools.partial."
        )
    return function


def call_with_config(function: Callable[..., Any], config: dict[str, Any]) -> Any:
    """Call with the config if the function can take one argument, also an optional one, else without."""
    takes_one = any(p.kind is not p.KEYWORD_ONLY and p.kind is not p.VAR_KEYWORD for p in _parameters(function))
    value = function(config) if takes_one else function()
    for _, is_one, kind, cure in _NOT_RUN:
        if is_one(value):
            if inspect.iscoroutine(value):
                value.close()  # or Python would warn that nobody awaits it
            raise TypeError(f"{_name(function)} has returned {kind}, of which nothing has run: {cure}")
    return value


def check_plain(label: str, function: Callable[..., Any]) -> None:
    """Raise TypeError for a function that a call does not run, also behind functools.partial or in an object."""
    while isinstance(function, functools.partial):
        function = function.func
    for makes_one, _, kind, cure in _NOT_RUN:
        if makes_one(function) or makes_one(type(function).__call__):
            raise TypeError(f"{label} must be a plain function, but a call of {_name(function)} makes {kind}: {cure}")


_NO_AWAIT = "make it a plain function that calls asyncio.run(...)"
_NO_YIELD = "make it a plain function, which may report() where it yields"
_NOT_RUN = (
    (inspect.iscoroutinefunction, inspect.iscoroutine, "a coroutine", _NO_AWAIT),
    (inspect.isasyncgenfunction, inspect.isasyncgen, "an asynchronous generator", _NO_AWAIT),
    (inspect.isgeneratorfunction, inspect.isgenerator, "a generator", _NO_YIELD),
)
"""How to tell functions that run when somebody awaits or iterates over what they return, and those objects."""


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return []


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


# -- what the coordinator makes of it --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The pickled work, the modules worth importing before the fork, and a warning about its size, if there is one."""

    blob: bytes
    preload: tuple[str, ...] = ()
    warning: str | None = None


def make_job(work: Work) -> Job:
    """Pickle ``work``. Raises JobError that names the path to the variable that cannot be pickled."""
    if isinstance(work, FunctionWork):
        work = replace(work, sources=_sources_without_files())
    try:
        blob = _dumps(work)
    except Exception as error:
        raise JobError(_explain(work, error)) from error
    preload = dict.fromkeys((*work.backend.preload, *third_party_modules(blob, work)))
    return Job(blob=blob, preload=tuple(preload), warning=_size_warning(work, len(blob)))


def _sources_without_files() -> dict[str, list[str]]:
    """What ``linecache`` knows of code that was not read from a file: the cells of a notebook."""
    entries = [entry for entry in list(linecache.cache.values()) if len(entry) == 4 and entry[1] is None]
    sources = {str(entry[3]): list(entry[2]) for entry in entries}
    return sources if sum(entry[0] for entry in entries) <= _LARGEST_SOURCES else {}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which knows modules, but not those of a subclass, such as ``torch.backends.cudnn``."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:
            name = value.__name__
            if sys.modules.get(name) is value:
                return importlib.import_module, (name,)
        return super().reducer_override(value)


def _dumps(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _explain(work: Work, error: BaseException) -> str:
    path, culprit = _find_unpicklable(work)
    return (
        f"cannot pickle {path} ({type(culprit).__module__}.{type(culprit).__qualname__}): {error}. "
        f"It goes to another process: create it inside the {_kind(work)} function, or leave it out of the config."
    )


def _kind(work: Work) -> str:
    return "validation" if isinstance(work, FunctionWork) and work.validates else "training"


def _find_unpicklable(work: Work) -> tuple[str, object]:
    path, value = f"the {_kind(work)} function", object()
    candidates = list(_entries(work))
    for _ in range(_DEEPEST_SEARCH):
        for name, child in candidates:
            if not _can_pickle(child):
                path, value = name, child
                candidates = [(f"{name}{suffix}", part) for suffix, part in _parts(child)]
                break
        else:
            break
    return path, value


def _entries(work: Work) -> Iterator[tuple[str, object]]:
    """The named things a job is made of."""
    if isinstance(work, FunctionWork):
        yield _name(work.function), work.function
    config = "ValidationTaskConfig.fn_kwargs" if _kind(work) == "validation" else "train_loop_config"
    for key, value in getattr(work, "config", {}).items():
        yield f"{config}[{key!r}]", value
    yield "the backend config", work.backend


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What ``value`` holds, each with the way to it."""
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f" -> variable {name!r}", _cell_contents(cell)
        for name in sorted(_global_names(value.__code__)):
            if name in value.__globals__:
                yield f" -> global {name!r}", value.__globals__[name]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        yield from ((f" -> default {default!r:.40}", default) for default in defaults)
    elif isinstance(value, types.MethodType):
        yield " -> its object", value.__self__
    elif isinstance(value, (Mapping, list, tuple, set, frozenset)) and len(value) > _MOST_ITEMS:
        return
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, type):
        yield from ((f".{name}", item) for name, item in vars(value).items())
    else:
        for holder in ("func", "args", "keywords"):  # functools.partial
            if type(value).__name__ == "partial":
                yield f".{holder}", getattr(value, holder)
        slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name))
        names = dict.fromkeys((*getattr(value, "__dict__", {}), *slots))
        yield from ((f".{name}", getattr(value, name, None)) for name in names)


def _cell_contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _can_pickle(value: object) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True


def _size_warning(work: Work, size: int) -> str | None:
    if size <= LARGE_PAYLOAD_BYTES:
        return None
    sizes: list[tuple[int, str]] = []
    for name, value in _entries(work):
        is_function = isinstance(value, types.FunctionType)
        parts = [(f"{name}{suffix}", part) for suffix, part in _parts(value)] if is_function else [(name, value)]
        sizes += [(len(_dumps(part)), path) for path, part in parts if _can_pickle(part)]
    biggest = ", ".join(f"{path}: {count / 1e6:.1f} MB" for count, path in sorted(sizes, reverse=True)[:3])
    return (
        f"the training function and its config are {size / 1e6:.1f} MB, which every worker has to unpickle "
        f"({biggest}). Load large objects inside the training function."
    )


# -- what is worth importing before the fork -------------------------------------------------------------------------


def third_party_modules(blob: bytes, work: Work) -> list[str]:
    """Installed modules that the pickle names or that the function imports, in a stable order. Never user files."""
    named = set(_modules_in_pickle(blob))
    if isinstance(work, FunctionWork):
        named |= _modules_of_function(work.function)
    for name in sorted(named):
        if not _is_installed(name):
            named |= _third_party_in_namespace(name)
    return sorted(name for name in named if _is_installed(name))


def _modules_in_pickle(blob: bytes) -> Iterator[str]:
    """Module names among the strings of a pickle; which strings are modules only sys.modules can tell."""
    for _, argument, _ in pickletools.genops(io.BytesIO(blob)):
        if isinstance(argument, str) and argument in sys.modules:
            yield argument


def _modules_of_function(function: object) -> set[str]:
    """Modules that a function is from, or imports in its body."""
    function = inspect.unwrap(getattr(function, "func", function))  # type: ignore[arg-type]
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", None)
    return ({module} if module else set()) | (_imports(code) if code else set())


def _imports(code: types.CodeType) -> set[str]:
    found = {str(i.argval) for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME" and i.argval}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _imports(constant)
    return found


def _third_party_in_namespace(name: str) -> set[str]:
    """Modules that the values in the namespace of a user's module are from; a worker will import them with it."""
    module = sys.modules.get(name)
    if name == "__main__" or module is None:
        return set()
    return {home for value in list(vars(module).values()) if isinstance(home := _home(value), str)}


def _home(value: object) -> object:
    """Return the name of the module that a value is, or is from.

    Only types are asked. An attribute of the value itself may be a property that warns, imports or fails, and even
    ``isinstance`` reads ``__class__``.
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
    """Whether a top-level package of that name lies in site-packages (an editable install does not)."""
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
    return bool(origin) and any(str(origin).startswith(folder + os.sep) for folder in _site_folders())


def _site_folders() -> set[str]:
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        folders.add(site.getusersitepackages())
    return folders


def loads(blob: bytes) -> Work:
    """The work back from its bytes, in a worker."""
    work = pickle.loads(blob)  # noqa: S301 - made by make_job() of the same run, and carried over our own wire
    if not isinstance(work, Work):
        raise JobError(f"the job is not one of ours: {type(work).__name__}")
    return work


def unpickle_value(blob: bytes) -> Any:
    """A return value or an exception of a worker of our own, in the user's process. Raises what unpickling raises."""
    return pickle.loads(blob)  # noqa: S301 - see loads()


def original(failure: RankFailure) -> BaseException:
    """The exception that the rank raised; a stand-in if it raised none, or none that can be unpickled here."""
    try:
        error = unpickle_value(failure.payload) if failure.payload else None
    except Exception:
        error = None
    if not isinstance(error, BaseException):
        error = StandInError(f"rank {failure.rank} on {failure.host}: {failure.summary}")
    return error
