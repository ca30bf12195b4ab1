"""The command line: run a script, a module or a function on several workers. Runs in: coordinator.

Parse, call, exit code; no logic.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from distrain.cli import fit_script
from distrain.cli.preflight import Preflight
from distrain.cli.preflight_table import show
from distrain.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from distrain.coordinator.hang_monitor import request_stacks
from distrain.coordinator.transport import LAUNCH_OPTIONS, hosts_of, order_for, ssh_args_of, transports_for
from distrain.errors import DistrainError, LaunchError, PreemptionError, TrainingFailedError, WorkerGroupError
from distrain.hosts.gpus import find_gpus
from distrain.hosts.host_info import usable_cpus
from distrain.hosts.hostfile import ALWAYS_SET, split_ssh_args, total_slots
from distrain.storage.paths import RunPaths
from distrain.storage.remote_store import local_directory_of
from distrain.system.log import warn
from distrain.system.ray_names import did_you_mean
from distrain.system.version import __version__
from distrain.trainer import run_work
from distrain.work import job
from distrain.work.main_module import is_archive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.backend import BackendConfig
    from distrain.hosts.hostfile import HostSpec

_SIGINT_EXIT = 130
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
A script or module that calls TorchTrainer(...).fit() itself runs once, here, and its workers on the hosts named.

examples:
  python -m distrain.launch --num-workers 4 train.py --epochs 3
  python -m distrain.launch --num-workers 2 --config base.json --set lr=0.1 train.py:train_func
  python -m distrain.launch --hosts alpha:4,beta:4 train.py
  python -m distrain.launch --check --hostfile hosts.txt
  python -m distrain.launch --hostfile hosts.txt --ssh-args="-F my_ssh_config" --env WANDB_MODE=offline train.py

exit codes: 0; the exit code of the rank that failed first (1 for an exception, 128 + n for signal n); 130 after Ctrl-C;
143 after SIGTERM, 129 after SIGHUP; 2 for a wrong command line or a launch that is not possible.
"""


def run_command(arguments: Sequence[str] | None, user_path: Sequence[str]) -> int:
    """Run what ``arguments`` (default: the process's own) ask for; returns the exit code.

    ``user_path`` is sys.path as the user's process was started with. Raises SystemExit for a wrong command line.
    """
    parser = _parser()
    options = _options(parser, sys.argv[1:] if arguments is None else arguments)
    os.environ.pop(LAUNCH_OPTIONS, None)  # another launch's, of which this one is a part
    if options.stacks:
        return _show_stacks(options.stacks)
    if given := [f"--{name}" for name in _TORCHRUN if getattr(options, _dest(name)) is not None]:
        warn(f"{', '.join(given)}: torchrun's, without effect here")
    try:
        hosts = _hosts(options)
        if options.check:
            return _check(options, hosts, user_path)
        work = _work(options, user_path)
        if _is_driver(work, user_path):
            _become_driver(options, parser)
        scaling = _scaling(options, hosts)
        run = RunConfig(
            name=options.name,
            storage_path=options.storage_path,
            log_dir=options.log_dir,
            failure_config=FailureConfig(
                max_failures=options.max_failures,
                **({} if options.hosts_wait is None else {"host_wait_s": options.hosts_wait}),
            ),
            logging_config=LoggingConfig(ranks=_ranks(options.ranks_shown)),
            worker_runtime_env={"env_vars": _variables(options.env)},
        )
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    return _run(work, scaling, run, _workers_path(work, user_path))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line, which the usage would hide."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. What follows a function belongs to us, as it takes no arguments of its own."""
    options, unknown = parser.parse_known_args(arguments)
    split = len(arguments) - len(options.arguments)
    if options.arguments and arguments[split - 1] == options.target and _is_function(options.target):
        in_order = [*arguments[: split - 1], *options.arguments, options.target]
        again, unknown = parser.parse_known_args(in_order)
        options = again if again.target == options.target else options
    for word in unknown:
        option = word.partition("=")[0]
        hint = did_you_mean(option, parser._option_string_actions)
        if not hint and options.target and _is_function(options.target):
            hint = f"; {options.target} is a function, whose config comes from --config and --set"
        hint = hint or "; options of a script come after its name"
        parser.error(f"there is no option {option}{hint} (see --help)")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m distrain.launch",
        description="Run a PyTorch script, module or function on several workers, of this machine or of many.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"distrain {__version__}")
    add(
        "--num-workers",
        type=_amount,
        metavar="N",
        help="workers to start, on all hosts together (all slots of the hosts, else 1); or: gpu, cpu, auto; or 2:8, as "
        "the slots allow",
    )
    add("--nproc-per-node", "--nproc_per_node", type=_amount, metavar="N", help="the same, for a single host")
    add(
        "--hostfile",
        metavar="FILE",
        help="the hosts to train on, one a line: alpha slots=4 (DISTRAIN_HOSTFILE, else this machine)",
    )
    add("--hosts", metavar="alpha:4,beta:4", help="the same here, with the slots of each")
    add("--ssh-args", metavar="ARGS", help='further arguments for ssh, such as --ssh-args="-i my_key"')
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for all workers; without a value, as it is here",
    )
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
    add(
        "--hosts-wait",
        type=float,
        metavar="SECONDS",
        help="wait so long for a lost host to come back, if no others can take its workers (60)",
    )
    shown = ("--ranks-shown", "--console-ranks")
    add(*shown, metavar="0,2-5", help="whose output is shown here (everybody's); the logs have it all")
    add("--check", action="store_true", help="can these hosts train together? shows a table of them; runs nothing")
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


# -- hosts and workers -----------------------------------------------------------------------------------------------


def _hosts(options: argparse.Namespace) -> tuple[HostSpec, ...]:
    """Raises ValueError for hosts that cannot be understood, or are not as many as torchrun's option says."""
    hosts = hosts_of(ScalingConfig(hosts=options.hosts, hostfile=options.hostfile), os.environ)
    if options.nnodes not in (None, str(len(hosts)), f"{len(hosts)}:{len(hosts)}"):
        raise ValueError(
            f"--nnodes {options.nnodes}, but {len(hosts)} host(s); --hostfile or --hosts say which, and nothing has to "
            "be started there"
        )
    if options.nproc_per_node and len(hosts) > 1:
        raise ValueError("--nproc-per-node: with several hosts, their slots say how many each gets; or --num-workers")
    split_ssh_args(options.ssh_args or "", "--ssh-args")
    return hosts


def _scaling(options: argparse.Namespace, hosts: Sequence[HostSpec]) -> ScalingConfig:
    return ScalingConfig(
        num_workers=_num_workers(options, hosts),
        use_gpu=options.use_gpu,
        start_method=options.start_method,
        hosts=options.hosts,
        hostfile=options.hostfile,
        ssh_args=options.ssh_args or (),
    )


def _num_workers(options: argparse.Namespace, hosts: Sequence[HostSpec]) -> int | tuple[int, int]:
    amount: str | None = options.num_workers or options.nproc_per_node
    if amount is None:
        return total_slots(hosts)
    if options.nproc_per_node not in (None, amount):
        both = f"--num-workers {amount}, but --nproc-per-node {options.nproc_per_node}"
        raise ValueError(f"{both}: they are the same for a single host; drop one of the two")
    least, colon, most = amount.partition(":")
    if colon:
        return int(least), int(most)
    if not amount.isdigit() and not all(host.is_local for host in hosts):
        raise ValueError(f"--num-workers {amount} would count this machine's; give a number, or leave it out")
    return _count(amount)


def _amount(text: str) -> str:
    if not re.fullmatch(r"\d+(:\d+)?|gpu|cpu|auto", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a number such as 4, or 2:8, gpu, cpu or auto; got {text!r}")
    return text


def _count(text: str) -> int:
    """As torchrun: a number, or one for each CPU or GPU; ``auto`` takes GPUs if there are any."""
    found, problem = find_gpus(os.environ) if text in ("gpu", "auto") else ((), "")
    gpus = len(found)
    if text == "gpu" and not gpus:
        why = problem or "driver missing, or hidden by CUDA_VISIBLE_DEVICES"
        raise ValueError(
            f"one worker for each GPU was asked for, but no usable NVIDIA GPU was found ({why}); name a number, or "
            "take cpu"
        )
    if text == "cpu" or (text == "auto" and not gpus):
        return usable_cpus()
    return gpus if text in ("gpu", "auto") else int(text)


# -- what to run -----------------------------------------------------------------------------------------------------


def _work(options: argparse.Namespace, user_path: Sequence[str]) -> job.Work:
    """Raises ValueError or OSError for a target or config that cannot be."""
    backend = _torch_backend()
    if options.module is not None:
        if not options.module:
            raise ValueError("-m needs the name of a module")
        _no_config(options, "a module")
        if ":" in options.module[0]:
            raise ValueError(f"-m {options.module[0]}: is a function; leave out -m")
        return job.ScriptWork(backend=backend, module=options.module[0], argv=options.module[1:])
    if options.target is None:
        raise ValueError("nothing to run: name a script, `-m MODULE`, or file.py:function")
    if _is_function(options.target):
        if options.arguments:
            raise ValueError(f"{options.target} is a function, which takes no arguments; use --config and --set")
        _check_function(options.target, user_path)
        return job.TargetWork(backend=backend, target=options.target, config=_config(options), launched_in=os.getcwd())
    _no_config(options, "a script")
    path = options.target if is_archive(options.target) else _existing(options.target)
    return job.ScriptWork(backend=backend, path=path, argv=options.arguments, launched_in=os.getcwd())


def _is_function(target: str) -> bool:
    """Tell ``file.py:function`` and ``module:function`` from the name of a script."""
    _, colon, name = target.rpartition(":")
    return bool(colon) and name.isidentifier() and not Path(target).exists()


def _check_function(target: str, user_path: Sequence[str]) -> None:
    """Raise ValueError if its file is not there, or never names the function, so far as reading it tells."""
    place, _, name = target.rpartition(":")
    file = _existing(place) if place.endswith(".py") else fit_script.source_of_module(place, [os.getcwd(), *user_path])
    if file is not None and (names := fit_script.names_in(file)) is not None and name not in names:
        raise ValueError(f"{target}: {place} has no function {name!r}{did_you_mean(name, names)}")


def _is_driver(work: job.Work, user_path: Sequence[str]) -> bool:
    if not isinstance(work, job.ScriptWork):
        return False
    path = work.path if work.module is None else fit_script.file_of_module(work.module, user_path)
    return path is not None and fit_script.calls_fit(path)


_DRIVER_TAKES = ("target", "arguments", "module", "hosts", "hostfile", "ssh_args", "env", "nnodes")


def _become_driver(options: argparse.Namespace, parser: argparse.ArgumentParser) -> NoReturn:
    """Run the script with the hosts in force. What else was asked for is the script's to say."""
    kept = {*_DRIVER_TAKES, *map(_dest, _TORCHRUN)}
    given = [name for name, value in vars(options).items() if name not in kept and value != parser.get_default(name)]
    target = options.target if options.module is None else f"-m {options.module[0]}"
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        warn(f"{flags}: without effect, as {target} calls fit() itself: its configs say it")
    arguments = [options.target, *options.arguments] if options.module is None else ["-m", *options.module]
    fit_script.become(arguments, _driver_environment(options))


def _driver_environment(options: argparse.Namespace) -> dict[str, str]:
    variables = _variables(options.env)
    environment = {**os.environ, **variables}
    environment["DISTRAIN_ENV"] = ",".join(filter(None, (os.environ.get("DISTRAIN_ENV"), *variables)))
    if options.hosts or options.hostfile:
        for name in ("DISTRAIN_HOSTS", "DISTRAIN_HOSTFILE"):
            environment.pop(name, None)
    if options.hosts:
        environment["DISTRAIN_HOSTS"] = options.hosts
    if options.hostfile:
        environment["DISTRAIN_HOSTFILE"] = os.path.abspath(os.path.expanduser(options.hostfile))
    if options.ssh_args:
        environment["DISTRAIN_SSH_ARGS"] = options.ssh_args
    given = {"--hosts": options.hosts, "--hostfile": options.hostfile, "--ssh-args": options.ssh_args}
    environment[LAUNCH_OPTIONS] = ",".join(option for option, value in given.items() if value)
    return environment


def _variables(settings: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE``, or ``NAME`` as it is in this process."""
    variables = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals and name not in os.environ:
            raise ValueError(f"--env {name}: is not set here; give a value, --env {name}=VALUE")
        if name in ALWAYS_SET:
            raise ValueError(f"--env {name}: each rank is given its own {name}; leave it out")
        variables[name] = value if equals else os.environ[name]
    return variables


def _torch_backend() -> BackendConfig:
    from distrain.torch.config import TorchConfig

    return TorchConfig()


def _existing(path: str) -> str:
    if Path(path).is_dir():
        raise ValueError(f"the directory {path!r} has no __main__.py; name a script in it")
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
            raise ValueError(f"--ranks-shown {text!r}: must be ranks such as 0,2-5")
        if int(last or first) < int(first):
            raise ValueError(f"--ranks-shown {text!r}: {part.strip()} has no rank in it; the lower one comes first")
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
        run_work(work, scaling, run, sys_path=sys_path, on_command_line=True)
    except KeyboardInterrupt:
        return _SIGINT_EXIT
    except PreemptionError as error:
        _show("stopped", str(error))
        return error.exit_code
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


def _check(options: argparse.Namespace, hosts: Sequence[HostSpec], user_path: Sequence[str]) -> int:
    """0 if the hosts can train together, else 1."""
    from rich.console import Console

    scaling = _scaling(options, hosts)
    transports = transports_for(hosts, ssh_args_of(scaling, os.environ))
    orders = {
        transport.host.name: order_for(
            transport,
            directory=os.getcwd(),
            sys_path=user_path,
            environment=_variables(options.env),
            own_environment=os.environ,
        )
        for transport in transports
    }
    preflight = Preflight(transports, orders, storage_path=options.storage_path, sys_path=user_path, scaling=scaling)
    try:
        preflight.run()
    except KeyboardInterrupt:
        return _SIGINT_EXIT
    show(preflight, Console(highlight=False))
    return 0 if preflight.is_fit else 1


def _show_stacks(folder: str) -> int:
    try:
        print(request_stacks(RunPaths(local_directory_of(folder))))
    except DistrainError as error:
        _show("no stacks", str(error))
        return 2
    return 0


def _workers_path(work: job.Work, user_path: Sequence[str]) -> list[str]:
    """For functions and modules the working directory comes first, as ``python -m`` has it; scripts put their own
    directory there instead, as ``python script.py`` does.
    """
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
