"""The target of a command line: a script, a module or a function, as the work for the workers. Runs in: coordinator."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.cli.run.options import is_function
from distrain.system.log import warn
from distrain.system.text import did_you_mean, without_errno
from distrain.worker.job import job
from distrain.worker.job.early_variables import sets_early

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from distrain.api.backend import BackendConfig


def work_of(
    options: argparse.Namespace,
    user_path: Sequence[str],
    in_copy: Callable[[str], str] = str,
    *,
    is_needed: bool = True,
) -> job.Work:
    """Return the work that the command line names. Raises ValueError or OSError for a wrong target or config.

    in_copy: returns where a file is in a copy of the user's code, or its path.
    is_needed: False returns some work if the command line names none.
    """
    if options.module is not None:
        module, places = _module(options), [in_copy(path) for path in (os.getcwd(), *user_path)]
        source = _source_of_module(f"{module}.__main__", places) or _source_of_module(module, places)
        return _script(options, source, module=module, argv=options.module[1:])
    backend = _backend(options)
    if options.target is None and not is_needed:
        return job.FunctionWork(backend=backend, function=print, config={})
    if options.target is None:
        raise ValueError("nothing to run: name a script, `-m MODULE`, or file.py:function")
    if options.target != (function := options.target.replace("::", ":").removesuffix("()")):
        raise ValueError(f"{options.target!r}: name a function as {function}")
    if options.target in ("python", "python3"):
        raise ValueError(f"leave {options.target} out: name the script, which distrain runs with its own interpreter")
    if is_function(options.target):
        home, _, function = options.target.rpartition(":")
        if home.endswith(".py"):
            home = in_copy(_existing(home))
        return job.TargetWork(
            backend=backend,
            target=f"{home}:{function}",
            config=_config(options),
            argv=options.arguments,
            launched_in=os.getcwd(),
        )
    _refuse_config(options, "a script")
    path = in_copy(_existing(options.target))
    return _script(options, path, path=path, argv=options.arguments, launched_in=os.getcwd())


def _script(options: argparse.Namespace, source: str | None, **fields: Any) -> job.ScriptWork:
    """Return the work of a script or module, whose source may tell which framework it uses."""
    text = "" if source is None else Path(source).read_text(errors="replace")
    backend = _backend(options, text)
    is_torch = backend.framework == "torch"
    early, hydra = is_torch and sets_early(text), "hydra" in text
    return job.ScriptWork(
        **fields, backend=backend, initialises_backend=not is_torch, imports_alone=early, uses_hydra=hydra
    )


def _backend(options: argparse.Namespace, source: str = "") -> BackendConfig:
    from distrain.tensorflow.config import TensorflowConfig
    from distrain.torch.config import TorchConfig

    is_named = "TF_CONFIG" in source or "MultiWorkerMirroredStrategy" in source
    return TensorflowConfig() if (options.backend or (is_named and "tensorflow")) == "tensorflow" else TorchConfig()


def say_what_is_misplaced(parser: argparse.ArgumentParser, options: argparse.Namespace, path: Sequence[str]) -> None:
    """Name options of distrain that the target gets, unless its source has options of these names."""
    target, *arguments = options.module or [options.target, *options.arguments]
    home = target.rpartition(":")[0] if is_function(target) else target
    file = home if os.path.isfile(home) else _source_of_module(home, [os.getcwd(), *path])
    source = Path(file).read_text(errors="replace").replace("-", "_") if file else ""
    known = {name for name in parser._option_string_actions if name[2:].replace("-", "_") not in source}
    if names := [name for word in arguments if (name := word.partition("=")[0]) in known and name[:2] == "--"]:
        warn(f"{', '.join(names)}: goes to {target}, as it follows it; options of distrain come before {target}")


def workers_path(work: job.Work, user_path: Sequence[str]) -> list[str]:
    """Return the sys.path of the workers.

    For functions and modules it starts with the working directory, as under ``python -m``. A script puts its own
    directory there instead, as under ``python script.py``.
    """
    path = list(user_path)
    if path[:1] in ([""], [os.getcwd()]):
        del path[0]
    return path if isinstance(work, job.ScriptWork) and work.path is not None else [os.getcwd(), *path]


def _module(options: argparse.Namespace) -> str:
    if not options.module:
        raise ValueError("-m needs the name of a module")
    _refuse_config(options, "a module")
    name: str = options.module[0]
    if name.startswith("-"):
        raise ValueError(f"-m {name}: is not a module; put -m after the options, just before the name of the module")
    if ":" in name:
        raise ValueError(f"-m {name}: is a function; leave out -m")
    return name


def _existing(path: str) -> str:
    if Path(path).is_dir():
        raise ValueError(f"{path!r} is a directory; name a script in it, or run a package with -m")
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r} in {os.getcwd()}{did_you_mean(path, os.listdir())}")
    return path


def _source_of_module(name: str, path: Sequence[str]) -> str | None:
    """Find the source file of a module without importing its packages; None if it is not in these directories."""
    parts = name.split(".")
    for folder in path:
        for file in (Path(folder, *parts, "__init__.py"), Path(folder, *parts).with_suffix(".py")):
            if file.is_file():
                return str(file)
    return None


# -- the function's config -------------------------------------------------------------------------------------------


def _refuse_config(options: argparse.Namespace, kind: str) -> None:
    if options.config or options.set:
        _config(options)  # its own mistakes come first
        raise ValueError(f"--config and --set are for functions (file.py:function); {kind} has arguments of its own")


def _config(options: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = _config_file(options.config) if options.config else {}
    for setting in options.set:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {setting!r}: must be KEY=VALUE")
        _set(config, key.split("."), _json_or_text(value))
    return config


def _config_file(path: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path}: must name a JSON file: {without_errno(error)}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--config {path}: must hold a JSON object, holds a {type(config).__name__}")
    return config


def _set(config: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        config = config.setdefault(part, {})
        if not isinstance(config, dict):
            raise ValueError(f"--set {'.'.join(path)}: {part!r} is not an object in the config")
    config[path[-1]] = value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
