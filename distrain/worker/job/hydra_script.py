"""Scripts of Hydra under ``distrain run``: all ranks share one output directory. Runs in: worker."""

from __future__ import annotations

import functools
import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from distrain.api.context import TrainContext

_DIRECTORIES = ("hydra.run.dir", "hydra.sweep.dir")
_WRITE_NOTHING = {"hydra.output_subdir": "null", "hydra/job_logging": "stdout"}
"""Settings for all ranks but rank 0: no copy of the config, no log file."""


def share_directory(context: TrainContext) -> None:
    """Have ``@hydra.main`` use a directory in the run directory, if the script imports Hydra. Rank 0 writes there."""
    sys.meta_path.insert(0, _Finder(context))


class _Finder:
    """It finds ``hydra.main``, and wraps the decorator in it."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name != "hydra.main":
            return None
        sys.meta_path.remove(self)
        if spec := PathFinder.find_spec(name, path):
            assert spec.loader is not None
            execute = spec.loader.exec_module

            def execute_and_wrap(module: ModuleType) -> None:
                execute(module)
                module.main = _with_overrides(module.main, self._context)  # type: ignore[attr-defined]

            spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def _with_overrides(main: Callable[..., Any], context: TrainContext) -> Callable[..., Any]:
    """Return a ``hydra.main`` whose functions add our settings to the command line when they are called."""

    @functools.wraps(main)
    def decorator(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        decorate = main(*args, **kwargs)

        def decorated(task: Callable[..., Any]) -> Callable[..., Any]:
            run = decorate(task)

            @functools.wraps(task)
            def call(config: Any = None) -> Any:
                if config is None:
                    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # otherwise an exception ends as sys.exit(1)
                    sys.argv[1:] = with_overrides(sys.argv[1:], context)
                return run(config)

            return call

        return decorated

    return decorator


def with_overrides(words: list[str], context: TrainContext) -> list[str]:
    """Return a command line of Hydra with our settings, next to the user's own ones, which win."""
    run = context.get_trial_dir()
    folder = f"{run}/hydra" if os.path.isdir(run) else f"outputs/{context.run_name}"  # this host has no run directory
    quoted = "'{}'".format(folder.replace("'", r"\'"))
    settings = {**dict.fromkeys(_DIRECTORIES, quoted), **(_WRITE_NOTHING if context.world_rank else {})}
    given = {word.partition("=")[0].lstrip("+") for word in words}
    ours = [f"{name}={value}" for name, value in settings.items() if name not in given]
    overrides = (i for i, word in enumerate(words) if word[:1] in ("+", "~") or (word[:1] != "-" and "=" in word))
    place = next(overrides, len(words))  # Hydra's parser takes overrides in one piece only
    return [*words[:place], *ours, *words[place:]]
