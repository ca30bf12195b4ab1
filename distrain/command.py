"""The command line: run a script, a module or a function on several workers. Runs in: coordinator.

Parse, call, exit code; no logic.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import job
from distrain.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from distrain.errors import DistrainError, LaunchError, PreemptionError, TrainingFailedError, WorkerGroupError
from distrain.gpus import find_gpus
from distrain.output import warn
from distrain.storage import RunPaths
from distrain.survey import usable_cpus
from distrain.trainer import run_work
from distrain.version import __version__
from distrain.watch import request_stacks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.backend import BackendConfig

__all__ = ["run_command"]

_SIGINT_EXIT = 130
_SIGTERM_EXIT = 143
_TORCHRUN = (
    *("local-addr", "master-addr", "master-port", "monitor-interval", "node-rank", "rdzv-backend", "rdzv-conf"),
    *("rdzv-endpoint", "rdzv-id", "redirects", "role", "tee"),
)
"""torchrun's options for what distrain always does, or does without."""

_EPILOG = """\
targets:
  train.py ARGS...            a script, as under torchrun: it calls init_process_group() itself
  -m package.train ARGS...    a module, likewise
  train.py:train_func         a function of a file or of a module (package.train:train_func), called with the config;
                              the process group is set up for it

examples:
  python -m distrain.launch --num-workers 4 train.py --epochs 3
  python -m distrain.launch --num-workers 2 --config base.json --set lr=0.1 train.py:train_func

exit codes: 0; the exit code of the rank that failed first (1 for an exception, 128 + n for signal n); 130 after Ctrl-C;
143 after SIGTERM; 2 for a wrong command line or a launch that is not possible.
"""


def run_command(arguments: Sequence[str] | None, user_path: Sequence[str]) -> int:
    """Run what ``arguments`` (default: the process's own) ask for; returns the exit code.

    ``user_path`` is sys.path as the user's process was started with. Raises SystemExit for a wrong command line.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.stacks:
        return _show_stacks(options.stacks)
    if options.nnodes not in (None, "1", "1:1"):
        parser.error(f"--nnodes {options.nnodes}: distrain works on one host so far")
    if given := [f"--{name}" for name in _TORCHRUN if getattr(options, _dest(name)) is not None]:
        warn(f"{', '.join(given)}: torchrun's, without effect here")
    try:
        work = _work(options)
        scaling = ScalingConfig(
            num_workers=options.num_workers, use_gpu=options.use_gpu, start_method=options.start_method
        )
        run = RunConfig(
            name=options.name,
            storage_path=options.storage_path,
            log_dir=options.log_dir,
            failure_config=FailureConfig(max_failures=options.max_failures),
            logging_config=LoggingConfig(ranks=_ranks(options.console_ranks)),
        )
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    return _run(work, scaling, run, _workers_path(work, user_path))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m distrain.launch",
        description="Run a PyTorch script, module or function on several workers of this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"distrain {__version__}")
    workers = ("--num-workers", "--nproc-per-node", "--nproc_per_node")
    add(*workers, type=_workers, default=1, metavar="N", help="workers to start (1); or: gpu, cpu, auto")
    add("--use-gpu", action="store_true", help="give every worker a GPU")
    add("--start-method", choices=("forkserver", "spawn"), default="forkserver", help="how workers start (forkserver)")
    add("--name", help="name of the run; an unfinished run of that name goes on (time and a random suffix)")
    add("--storage-path", metavar="DIR", help="where run directories are made (~/distrain_results)")
    add("--log-dir", metavar="DIR", help="where the ranks' logs go (logs/ in the run directory)")
    add(
        *("--max-failures", "--max-restarts", "--max_restarts"),
        type=int,
        default=0,
        metavar="N",
        help="restart the workers up to N times after a failure, -1 always (0)",
    )
    add("--console-ranks", metavar="0,2-5", help="whose output is shown here (everybody's); the logs have it all")
    add("--stacks", metavar="RUN_DIR", help="where are the ranks of a run that is at work? runs nothing")
    add("--config", metavar="FILE.json", help="the function's config, a JSON object")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one entry of the config, JSON or text; a.b=1 sets config['a']['b']",
    )
    add(
        "-m",
        dest="module",
        metavar="MODULE",
        nargs=argparse.REMAINDER,
        help="run a module as a script; everything after it is the module's",
    )
    add("--standalone", action="store_true", help=argparse.SUPPRESS)
    for name in ("nnodes", *_TORCHRUN):
        add(f"--{name}", f"--{_dest(name)}", dest=_dest(name), help=argparse.SUPPRESS)
    add("target", nargs="?", help="script.py, file.py:function or module:function")
    add("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def _dest(name: str) -> str:
    return name.replace("-", "_")


def _workers(text: str) -> int:
    """As torchrun: a number, or one for each CPU or GPU; ``auto`` takes GPUs if there are any."""
    gpus = len(find_gpus(os.environ)) if text in ("gpu", "auto") else 0
    if text == "cpu" or (text == "auto" and not gpus):
        return usable_cpus()
    return gpus if text in ("gpu", "auto") else int(text)


# -- what to run -----------------------------------------------------------------------------------------------------


def _work(options: argparse.Namespace) -> job.Work:
    """Raises ValueError or OSError for a target or config that cannot be."""
    backend = _torch_backend()
    if options.module is not None:
        if not options.module:
            raise ValueError("-m needs the name of a module")
        _no_config(options, "a module")
        return job.ScriptWork(backend=backend, module=options.module[0], argv=options.module[1:])
    if options.target is None:
        raise ValueError("nothing to run: name a script, `-m MODULE`, or file.py:function")
    place, colon, name = options.target.rpartition(":")
    if colon and name.isidentifier() and not Path(options.target).exists():
        if options.arguments:
            raise ValueError(f"{options.target} is a function, which takes no arguments; use --config and --set")
        if place.endswith(".py"):
            _existing(place)
        return job.TargetWork(backend=backend, target=options.target, config=_config(options))
    _no_config(options, "a script")
    return job.ScriptWork(backend=backend, path=_existing(options.target), argv=options.arguments)


def _torch_backend() -> BackendConfig:
    from distrain.torch.config import TorchConfig

    return TorchConfig()


def _existing(path: str) -> str:
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r} in {os.getcwd()}")
    return path


def _no_config(options: argparse.Namespace, kind: str) -> None:
    if options.config or options.set:
        raise ValueError(f"--config and --set are for functions (file.py:function); {kind} has arguments of its own")


def _config(options: argparse.Namespace) -> dict[str, Any]:
    config: Any = {}
    if options.config:
        try:
            config = json.loads(Path(options.config).read_text())
        except ValueError as error:
            raise ValueError(f"--config {options.config}: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"--config {options.config}: must hold a JSON object, holds a {type(config).__name__}")
    for setting in options.set:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {setting!r}: must be KEY=VALUE")
        _set(config, key.split("."), _parsed(value))
    result: dict[str, Any] = config
    return result


def _ranks(text: str | None) -> list[int] | None:
    """``0,2-5`` as a list."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.strip().isdigit() or (dash and not last.strip().isdigit()):
            raise ValueError(f"--console-ranks {text!r}: must be ranks such as 0,2-5")
        found += range(int(first), int(last or first) + 1)
    return found


def _set(config: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        config = config.setdefault(part, {})
        if not isinstance(config, dict):
            raise ValueError(f"--set {'.'.join(path)}: {part!r} is not an object in the config")
    config[path[-1]] = value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# -- running it ------------------------------------------------------------------------------------------------------


def _run(work: job.Work, scaling: ScalingConfig, run: RunConfig, sys_path: list[str]) -> int:
    """The exit code."""
    try:
        run_work(work, scaling, run, sys_path=sys_path)
    except KeyboardInterrupt:
        return _SIGINT_EXIT
    except PreemptionError as error:
        _show("stopped", str(error))
        return _SIGTERM_EXIT
    except WorkerGroupError as error:
        _show("training failed", str(error))
        return error.exit_code or 1
    except LaunchError as error:
        _show("cannot launch", str(error))
        return 2
    except TrainingFailedError as error:
        _show("training failed", str(error))
        return 1
    except DistrainError as error:
        _show("cannot launch", str(error))
        return 2
    return 0


def _show_stacks(folder: str) -> int:
    try:
        print(request_stacks(RunPaths(Path(folder))))
    except DistrainError as error:
        _show("no stacks", str(error))
        return 2
    return 0


def _workers_path(work: job.Work, user_path: Sequence[str]) -> list[str]:
    """For functions and modules the working directory comes first, as ``python -m`` has it; scripts put their own
    directory there instead, as ``python script.py`` does."""
    path = list(user_path)
    if path[:1] in ([""], [os.getcwd()]):
        del path[0]
    return path if isinstance(work, job.ScriptWork) and work.path is not None else [os.getcwd(), *path]


def _show(title: str, text: str) -> None:
    from rich.console import Console
    from rich.rule import Rule
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Rule(f"distrain: {title}", style="red"))
    first, _, rest = text.partition("\n")
    console.print(Text(first, style="bold red"))
    if rest:
        console.print(Text(rest))
