"""The work of the workers, pickled in the coordinator and run in the workers. Runs in: coordinator, worker.

Agents pass the pickle on as opaque bytes.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import linecache
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.api import current
from distrain.api.job import Job
from distrain.errors import JobError, StandInError
from distrain.hosts.host import MIRROR
from distrain.system.log import warn
from distrain.system.notebook import cell_of
from distrain.system.pickling import pickled
from distrain.system.text import did_you_mean
from distrain.worker.job import early_variables
from distrain.worker.job.functions import call_with_config, check_signature, name_of
from distrain.worker.job.preload import makes_optimizers, third_party_modules
from distrain.worker.job.unpicklable import NamedValue, describe_unpicklable

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from distrain.api.backend import BackendConfig
    from distrain.data.constructors import RunDatasets
    from distrain.errors import RankFailure

LARGE_PAYLOAD_BYTES = 10_000_000
_LARGEST_SOURCES = 1 << 20
_FOR_OPTIMIZERS = "torch._dynamo"
"""The first optimizer in a process imports it, which takes a second or two of CPU."""
_SHARED_FROM = 4
"""Number of workers on a host from which it is imported before the fork. Fewer import it at the same time."""


# -- in the worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Work:
    """The base of all work: what a worker unpickles and runs. ``before``: called just before it runs."""

    before: Callable[[], None] | None = None
    backend: BackendConfig
    config: dict[str, Any] = field(default_factory=dict)
    run_datasets: RunDatasets | None = None
    initialises_backend: bool = True

    def run(self) -> Any:
        """Run in the main thread of the worker. Return what train_func returns, None for scripts."""
        raise NotImplementedError

    @property
    def files(self) -> list[str]:
        """The user's files that the workers load by their paths."""
        return []

    def fresh(self) -> Self:
        """Return a copy for another run in this process, whatever train_func does to its config."""
        return replace(self, config=_copied(self.config))

    def parts(self, config: str = "train_loop_config") -> Iterator[NamedValue]:
        """Yield the parts that are pickled, with their names for error messages. ``config``: the name of the config."""
        yield from ((f"{config}[{key!r}]", value) for key, value in self.config.items())
        yield "the backend config", self.backend
        if self.run_datasets is not None:
            yield from ((f"datasets[{name!r}]", dataset) for name, dataset in self.run_datasets.by_name.items())


@dataclass(frozen=True, kw_only=True)
class FunctionWork(Work):
    """A training or validation function and its config.

    validates: it is a validation function; for error messages.
    sources: the lines of code that is in no file, such as a notebook's cells, for tracebacks.
    """

    function: Callable[..., Any]
    validates: bool = False
    sources: dict[str, list[str]] = field(default_factory=dict)

    def run(self) -> Any:
        for name, lines in self.sources.items():
            linecache.cache.setdefault(name, (sum(map(len, lines)), None, lines, name))
        return call_with_config(self.function, self.config)

    def parts(self, config: str = "train_loop_config") -> Iterator[NamedValue]:
        yield name_of(self.function), self.function
        yield from super().parts("ValidationTaskConfig.fn_kwargs" if self.validates else config)


@dataclass(frozen=True, kw_only=True)
class TargetWork(Work):
    """``file.py:function`` or ``module:function``, imported in the worker, so that the coordinator need not import it.

    argv: the arguments that the file finds behind its own path in ``sys.argv``, as if it were run as a script.
    launched_in: see :class:`ScriptWork`.
    """

    target: str
    argv: list[str] = field(default_factory=list)
    launched_in: str = ""

    def run(self) -> Any:
        return call_with_config(self._load(), self.config)

    @property
    def files(self) -> list[str]:
        home = self.target.rpartition(":")[0]
        return [os.path.join(self.launched_in, home)] if home.endswith(".py") else []

    def _load(self) -> Callable[..., Any]:
        home, _, name = self.target.rpartition(":")
        sys.argv = [home, *self.argv]
        show_torch = early_variables.watch()
        if home.endswith(".py"):
            sys.argv[0] = _existing(home, self.launched_in)
            module = _import_file(Path(sys.argv[0]))
        else:
            sys.argv[0] = getattr(importlib.util.find_spec(home), "origin", None) or home
            module = importlib.import_module(home)
        show_torch()
        function = getattr(module, name, None)
        if not callable(function):
            raise JobError(f"{self.target}: {home} has no function {name!r}{did_you_mean(name, vars(module))}")
        return check_signature(function)


@dataclass(frozen=True, kw_only=True)
class ScriptWork(Work):
    """A script or a module with its own arguments, run as ``__main__`` as torchrun does.

    path: the script.
    module: the name of the module, instead of ``path``.
    launched_in: the directory in which the launcher found the script; workers may be in another.
    imports_alone: nothing must be imported before the script, because it sets variables that libraries read then.
    uses_hydra: it names Hydra.
    """

    path: str | None = None
    module: str | None = None
    argv: list[str] = field(default_factory=list)
    launched_in: str = ""
    imports_alone: bool = False
    uses_hydra: bool = False
    initialises_backend: bool = False

    @property
    def files(self) -> list[str]:
        return [] if self.path is None else [os.path.join(self.launched_in, self.path)]

    def run(self) -> None:
        from distrain.worker.job import hydra_script, main_module

        if self.uses_hydra and current.session is not None:  # there is none under --as-ray
            hydra_script.set_defaults(current.session.context)
        early_variables.watch()
        sys.argv = [self.module or _existing(self.path or "", self.launched_in), *self.argv]
        flags = ["-u", *subprocess._args_from_interpreter_flags(), *["-m"] * bool(self.module)]  # type: ignore[attr-defined]
        sys.orig_argv = [sys.executable, *flags, *sys.argv]  # a script may execute it again
        if self.module is not None:
            main_module.run_module(self.module)
        else:
            sys.path[0:0] = [str(Path(sys.argv[0]).resolve().parent)]
            main_module.run_script(sys.argv[0])


def _existing(path: str, launched_in: str) -> str:
    """Return the path of the user's file on this host. Raises JobError.

    A file that was copied to this host comes first. A file below the working directory comes second, because a host may
    have a copy of its own. The directory in which the run was launched comes last, as hosts may share it.
    """
    launched = os.path.join(launched_in, path)
    brought = os.environ.get(MIRROR, "")
    for candidate in (*([brought + os.path.abspath(launched)] if brought else []), path, launched):
        if os.path.isfile(candidate):
            return candidate
    paths = dict.fromkeys(map(os.path.abspath, (path, launched)))
    hint = "share it between the hosts, copy it there, or set cwd= in the hostfile"
    raise JobError(f"this host has no file {' and no file '.join(paths)}; {hint}")


def _copied(config: dict[str, Any]) -> dict[str, Any]:
    try:
        return copy.deepcopy(config)
    except Exception:  # attempts share a config that cannot be copied
        return dict(config)


def _import_file(path: Path) -> types.ModuleType:
    """Import a file, also if another module of its name is loaded already: a user's script may be called queue.py."""
    path = path.resolve()
    sys.path[0:0] = [str(path.parent)]
    name = f"{path.stem}__target" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- in the coordinator ----------------------------------------------------------------------------------------------


def make_job(work: Work, *, workers_per_host: int = 1) -> Job:
    """Pickle the work. Raises JobError that names the path to the value that cannot be pickled."""
    function = None
    if isinstance(work, FunctionWork):
        work = replace(work, sources=_sources_without_files())
        function = work.function
    try:
        blob = pickled(work)
    except Exception as error:
        kind = "validation" if isinstance(work, FunctionWork) and work.validates else "training"
        raise JobError(
            f"cannot pickle {describe_unpicklable(*work.parts())}: {error}. "
            f"It goes to another process: create it inside the {kind} function, or leave it out of the config."
        ) from error
    if isinstance(work, ScriptWork) and work.imports_alone:
        return Job(blob=blob)
    of_datasets = work.run_datasets.preload if work.run_datasets else ()
    preload = dict.fromkeys((*work.backend.preload, *of_datasets, *third_party_modules(blob, function)))
    if workers_per_host >= _SHARED_FROM and "torch" in preload and makes_optimizers(blob, function):
        preload[_FOR_OPTIMIZERS] = None
    return Job(blob=blob, preload=tuple(preload), warning=_size_warning(len(blob)))


def _sources_without_files() -> dict[str, list[str]]:
    """Return the code in ``linecache`` that was not read from a file: the cells of a notebook, by their names."""
    entries = [entry for entry in list(linecache.cache.values()) if len(entry) == 4 and entry[1] is None]
    sources = {cell_of(str(entry[3])) or str(entry[3]): list(entry[2]) for entry in entries}
    return sources if sum(entry[0] for entry in entries) <= _LARGEST_SOURCES else {}


def _size_warning(size: int) -> str | None:
    if size <= LARGE_PAYLOAD_BYTES:
        return None
    return (
        f"the training function, its config and datasets are {size / 1e6:.1f} MB, which every worker has to unpickle. "
        "Load large objects inside the training function, and large datasets from files."
    )


# -- back again ------------------------------------------------------------------------------------------------------


def loads(blob: bytes) -> Work:
    """Unpickle the work, in a worker. Raises JobError for anything else."""
    work = pickle.loads(blob)  # noqa: S301 - made by make_job() of the same run, and received over our own wire
    if not isinstance(work, Work):
        raise JobError(f"this job was not made by distrain: {type(work).__name__}")
    return work


def unpickle_return_value(blob: bytes) -> Any:
    """Unpickle what train_func returned. If that fails, warn and return None: the training has finished."""
    try:
        return pickle.loads(blob)  # noqa: S301 - see loads()
    except Exception as error:
        warn(f"the return value cannot be unpickled in this process ({error!r}); it is kept in return_value.pkl")
        return None


def original(failure: RankFailure) -> BaseException:
    """Return the exception that the rank raised, or a StandInError if there is none that can be unpickled here."""
    try:
        error = pickle.loads(failure.payload) if failure.payload else None  # noqa: S301 - see loads()
    except Exception:
        error = None
    if not isinstance(error, BaseException):
        error = StandInError(f"rank {failure.rank} on {failure.host}: {failure.summary}")
    return error
