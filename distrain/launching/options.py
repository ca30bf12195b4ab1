"""The options of ``python -m distrain.launch``, and their values. Runs in: coordinator."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

from distrain.config import NumaBinding, ProgressDisplay
from distrain.hosts.hostfile import ALWAYS_SET
from distrain.system.ray_names import did_you_mean
from distrain.system.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

_TORCHRUN_ONLY = (
    *("local-addr", "master-addr", "master-port", "monitor-interval", "node-rank", "rdzv-backend", "rdzv-conf"),
    *("rdzv-endpoint", "rdzv-id", "redirects", "role", "tee"),
)
"""Options of torchrun for things that distrain always does, or never needs."""

_EPILOG = """\
targets:
  train.py ARGS...            a script, as under torchrun: it calls init_process_group() itself
  -m package.train ARGS...    a module, likewise
  train.py:train_func         a function of a file or of a module (package.train:train_func), called with the config;
                              the process group is set up for it
A script that calls TorchTrainer(...).fit() starts its own workers: run it with `python script.py`, or, if it imports
ray, with `python -m distrain.launch --as-ray script.py`; --hosts, --hostfile, --transport, --env and --tracker apply.

examples:
  python -m distrain.launch --num-workers 4 train.py --epochs 3
  python -m distrain.launch --num-workers 2 --config base.json --set lr=0.1 train.py:train_func
  python -m distrain.launch --hosts alpha:4,beta:4 train.py
  python -m distrain.launch --hosts localhost:1,gpu-box:4 --ship data/words.txt train.py
  python -m distrain.launch --slurm partition=gpu,time=4:00:00,nodes=2,gpus-per-node=8 train.py
  python -m distrain.launch --check --hostfile hosts.txt
  python -m distrain.launch --hostfile hosts.txt --ssh-args="-F my_ssh_config" --env WANDB_MODE=offline train.py

exit codes: 0; after a failure that of the culprit (1 for an exception, 128 + n for signal n); 130 after Ctrl-C;
143 after SIGTERM, 129 after SIGHUP; 2 for a wrong command line or a launch that is not possible.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line. argparse would put the long usage in front of it."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. A function takes no arguments, so options of the launcher may follow it."""
    options, unknown = parser.parse_known_args(arguments)
    split = len(arguments) - len(options.arguments)
    if options.arguments and arguments[split - 1] == options.target and is_function(options.target):
        in_order = [*arguments[: split - 1], *options.arguments, options.target]
        again, unknown = parser.parse_known_args(in_order)
        options = again if again.target == options.target else options
    for word in unknown:
        _refuse_unknown(parser, word.partition("=")[0], options.target)
    return options


def _refuse_unknown(parser: argparse.ArgumentParser, option: str, target: str | None) -> NoReturn:
    names = [name[2:] for name in parser._option_string_actions if name.startswith("--")]
    hint = did_you_mean(option.lstrip("-"), names, prefix="--")
    if not hint and target and is_function(target):
        hint = f"; {target} is a function, whose config comes from --config and --set"
    parser.error(f"there is no option {option}{hint or '; options of a script come after its name'} (see --help)")


def is_function(target: str) -> bool:
    """Tell ``file.py:function`` and ``module:function`` from the name of a script."""
    _, colon, name = target.rpartition(":")
    return bool(colon) and name.isidentifier() and not Path(target).exists()


def ignored_options(options: argparse.Namespace) -> list[str]:
    """Return the options of torchrun that were given and have no effect here."""
    return [f"--{name}" for name in _TORCHRUN_ONLY if getattr(options, _attribute(name)) is not None]


def make_parser(prog: str = "python -m distrain.launch") -> argparse.ArgumentParser:
    """Make the parser of the command line. ``tests/launch_help.txt`` holds its ``--help``."""
    parser = _Parser(
        prog=prog,
        description="Run a PyTorch script, module or function on several workers, of this machine or of many.",
        epilog=_EPILOG.replace("python -m distrain.launch", prog.replace(" check", " run")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"distrain {__version__}")
    _add_placement_options(parser)
    _add_shipping_options(parser)
    _add_run_options(parser)
    _add_target(parser)
    parser.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)
    for name in ("nnodes", *_TORCHRUN_ONLY):
        parser.add_argument(f"--{name}", f"--{_attribute(name)}", dest=_attribute(name), help=argparse.SUPPRESS)
    return parser


def _add_placement_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--num-workers",
        type=_worker_count,
        metavar="N",
        help="workers to start, on all hosts together (default: all slots of the hosts, else 1); or: gpu, cpu, auto; "
        "or 2:8, as many as the slots allow",
    )
    per_node = ("--nproc-per-node", "--nproc_per_node")
    add(*per_node, type=_worker_count, metavar="N", help="the same as --num-workers, for a single host")
    add(
        "--hostfile",
        metavar="FILE",
        help="file with the hosts to train on, one per line: alpha slots=4 (default: DISTRAIN_HOSTFILE, else the nodes "
        "of the Slurm job, else this machine)",
    )
    add("--hosts", metavar="alpha:4,beta:4", help="the hosts to train on, each with its slots")
    add(
        "--transport",
        default="auto",
        metavar="HOW",
        help="how hosts are reached: local, ssh, slurm (by srun, in a job), or a command line such as 'docker exec -i "
        "{host}' (default: auto, slurm for the nodes of a Slurm job, ssh for other hosts)",
    )
    add(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="submit a job of Slurm that runs this command, with these options of sbatch: partition=gpu,time=4:00:00",
    )
    add("--dry-run", action="store_true", help="with --slurm: show the batch script; submit nothing")
    add("--ssh-args", metavar="ARGS", help='further arguments for ssh, such as --ssh-args="-i my_key"')
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable for all workers; without a value, it keeps its value from here",
    )
    add("--use-gpu", action="store_true", help="give every worker a GPU")
    add(
        *("--numa-binding", "--numa_binding"),
        choices=get_args(NumaBinding),
        help="bind each worker to CPUs near its GPU, as torchrun does (default: it may use all CPUs)",
    )
    add(
        "--interface",
        metavar="NAME",
        help="network interface over which workers of different hosts connect, such as ib0 (default: the one that leads"
        " to rank 0's host)",
    )
    methods = ("forkserver", "spawn")
    add("--start-method", choices=methods, default="forkserver", help="how workers start (default: forkserver)")


def _add_shipping_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--ship",
        action="append",
        default=[],
        metavar="PATH",
        help="file or directory that hosts need in addition to your code, such as small data files",
    )
    add("--no-ship", action="store_true", help="bring no code to other hosts: they have it at the same paths")
    add("--ship-limit", type=_size, metavar="SIZE", help="largest size of all that is brought (default: 100MB)")
    add(
        "--env-from",
        metavar="SOURCE",
        help="make a virtual environment on each host, from freeze (the packages installed here), uv.lock or "
        "requirements.txt (default: hosts use the Python that they have)",
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--name",
        help="name of the run; an unfinished run of that name continues (default: the name of the script, the time "
        "and a random suffix)",
    )
    add("--storage-path", metavar="DIR", help="directory of the run directories (default: ~/distrain_results)")
    add("--log-dir", metavar="DIR", help="directory of the ranks' logs (default: logs/ in the run directory)")
    add(
        "--tracker",
        action="append",
        metavar="NAME[:KEY=VALUE,...]",
        help="log metrics to tensorboard, wandb, mlflow or trackio, too, such as wandb:project=my,mode=offline "
        "(default: DISTRAIN_TRACKERS)",
    )
    add(
        *("--max-failures", "--max-restarts", "--max_restarts"),
        type=int,
        default=0,
        metavar="N",
        help="restart the workers after a failure, up to N times, or always with -1 (default: 0)",
    )
    add(
        "--hosts-wait",
        type=float,
        metavar="SECONDS",
        help="time to wait for a lost host to come back, if no others can take its workers (default: 60)",
    )
    add(
        *("--stop-grace", "--shutdown-timeout", "--shutdown_timeout"),
        dest="stop_grace_s",
        type=float,
        metavar="SECONDS",
        help="time that the workers have to end after Ctrl-C, SIGTERM and the like, before SIGKILL; if one calls "
        "should_stop(), time to stop there, before the others get the signal (default: 30 for a script, as under "
        "torchrun, and 10 for a function)",
    )
    add(
        *("--signals-to-handle", "--signals_to_handle"),
        dest="stop_signals",
        metavar="SIGTERM,SIGUSR1",
        help="signals that stop the run and are passed on to the workers (default: SIGINT,SIGTERM,SIGHUP,SIGQUIT, and "
        "in a job of Slurm SIGUSR1,SIGUSR2)",
    )
    add(
        "--detach",
        action="store_true",
        help="return once the ranks train; the run goes on, also when the terminal is closed; its console is "
        "console.log in the run directory, and `distrain attach` shows it",
    )
    shown = ("--ranks-shown", "--console-ranks")
    add(*shown, metavar="0,2-5", help="ranks whose output is shown here (default: all); the logs have everything")
    add(
        "--progress",
        choices=get_args(ProgressDisplay),
        default="auto",
        help="how the progress is shown: live, a footer on a terminal; plain, a line every 30 s; off (default: auto, "
        "live on a terminal, else plain)",
    )
    add(
        "--debug-rank",
        type=int,
        metavar="RANK",
        help="open pdb at breakpoint(), or where an exception was raised, on this rank (default: no rank)",
    )
    add(
        "--check",
        action="store_true",
        help="check if the hosts can train together, and show a table of them; run nothing",
    )
    add("--clear-caches", action="store_true", help="delete what distrain has stored on the hosts; run nothing")
    add("--stacks", metavar="RUN_DIR", help="show the stacks of all ranks of a running run; run nothing")


def _add_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--as-ray",
        action="store_true",
        help="run an unmodified script of Ray Train: it imports ray and calls fit() itself, here (default: "
        "DISTRAIN_AS_RAY)",
    )
    add("--config", metavar="FILE.json", help="config of the function, a JSON object")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one entry of the config, JSON or text; a.b=1 sets config['a']['b']",
    )
    module = "run a module as a script; everything after it belongs to the module"
    add("-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help=module)
    add("target", nargs="?", help="script.py, file.py:function or module:function")
    add("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def _attribute(name: str) -> str:
    return name.replace("-", "_")


# -- values ----------------------------------------------------------------------------------------------------------


def _worker_count(text: str) -> str:
    if not re.fullmatch(r"\d+(:\d+)?|gpu|cpu|auto", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a number such as 4, or 2:8, gpu, cpu or auto; got {text!r}")
    return text


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text, re.ASCII)
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a size such as 300MB or 2GB, got {text!r}")
    return int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " "))


def environment_variables(settings: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``--env``. Raises ValueError for one without a value, or one that each rank gets."""
    variables = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals and name not in os.environ:
            raise ValueError(f"--env {name}: is not set here; give a value, --env {name}=VALUE")
        if name in ALWAYS_SET:
            raise ValueError(f"--env {name}: each rank is given its own {name}; leave it out")
        variables[name] = value if equals else os.environ[name]
    return variables


def shown_ranks(text: str | None) -> list[int] | None:
    """Return the ranks of ``--ranks-shown 0,2-5`` as a list, None for all ranks. Raises ValueError."""
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
