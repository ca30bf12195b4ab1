"""The options of ``python -m distrain.launch``, and their values. Runs in: coordinator."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distrain.api.config import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, ShippingConfig
from distrain.cli import parsers
from distrain.cli.run.config_options import add_options_of
from distrain.hosts.hostfile import ALWAYS_SET
from distrain.system import __version__
from distrain.system.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WITHOUT_EFFECT = (
    *("duplicate-stderr-filters", "duplicate-stdout-filters", "event-log-handler", "local-addr"),
    *("log-line-prefix-template", "logs-specs", "master-addr", "master-port", "monitor-interval", "node-rank"),
    *("rdzv-backend", "rdzv-conf", "rdzv-endpoint", "rdzv-id", "redirects", "role", "tee"),
)
"""Options of torchrun for things that distrain always does, or never needs."""
_SHORT = {"redirects": "-r", "tee": "-t"}
_INSTEAD = {
    **dict.fromkeys(("n", "np", "nprocs", "num-processes", "num-procs", "workers"), "use --num-workers N"),
    **dict.fromkeys(("num-gpus", "ngpus", "gpus-per-node", "devices"), "use --num-workers N --use-gpu"),
    **dict.fromkeys(("nodes", "num-nodes", "num-machines"), "name the hosts with --hosts or --hostfile"),
    "port": "use --env MASTER_PORT=PORT",
    "ssh-key": "use --ssh-args='-i KEY'",
    "use-env": "leave it out: ranks always get the variables",
    "no-python": "ranks are Python; in a script, subprocess.run() starts another program",
    "print-completion": "`distrain run --help` lists the options",
    "on-slow": "a slow rank is named in any case; leave its host out when you continue the run",
    "virtual-local-rank": "set CUDA_VISIBLE_DEVICES to LOCAL_RANK at the top of the script",
}
"""Options that people expect, as other launchers have them, and what to use instead."""


_CHECK = "Check if the hosts can train together; run nothing. All other options of `distrain run` are allowed, too."
_OF_CHECK = {field.name for config in (ScalingConfig, ShippingConfig) for field in fields(config)}
_OF_CHECK |= {"deep", "env", "help", "json", "num_workers", "storage_path", "target"}
"""The fields that options of ``distrain check`` set which its help shows."""


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. What follows the target belongs to it."""
    options, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        _refuse_unknown(parser, word.partition("=")[0])
    return options


def _refuse_unknown(parser: argparse.ArgumentParser, option: str) -> NoReturn:
    if instead := _INSTEAD.get(option.lstrip("-").replace("_", "-")):
        parser.error(f"there is no option {option}; {instead}")
    shown = {name: one for name, one in parser._option_string_actions.items() if one.help != argparse.SUPPRESS}
    names = [name[2:] for name in shown if name.startswith("--") and "_" not in name]
    hint = did_you_mean(option.lstrip("-").replace("_", "-"), names, prefix="--")
    parser.error(f"there is no option {option}{hint or '; options of a script come after its name'} (see --help)")


def is_function(target: str) -> bool:
    """Tell ``file.py:function`` and ``module:function`` from the name of a script."""
    _, colon, name = target.rpartition(":")
    return bool(colon) and name.isidentifier() and not Path(target).exists()


def make_parser(prog: str = "python -m distrain.launch") -> parsers.Parser:
    """Make the parser of the command line. ``tests/cli/launch_help.txt`` holds its ``--help``."""
    submits = prog.endswith(" submit")
    parser = parsers.make_parser("submit" if submits else "run")
    parser.prog = prog
    parser.epilog = str(parser.epilog).replace("python -m distrain.launch", prog.replace(" check", " run"))
    parser.add_argument("--version", action="version", version=f"distrain {__version__}")
    _add_placement_options(parser.add_argument_group("hosts and workers").add_argument)
    add_options_of(ShippingConfig, parser.add_argument_group("files for hosts that do not share them").add_argument)
    _add_run_options(parser.add_argument_group("the run"))
    _add_queue_options(parser.add_argument_group("the queue").add_argument, submits=submits)
    add_options_of(FailureConfig, parser.add_argument_group("failures and time limits").add_argument)
    reported = "checkpoints that are reported with distrain.report()"
    add_options_of(CheckpointConfig, parser.add_argument_group(reported).add_argument)
    parser.set_defaults(check=False, deep=False, json=False)
    if not submits:
        _add_options_for_programs(parser.add_argument_group("for checks and programs").add_argument)
    _add_target(parser)
    if prog.endswith(" check"):
        parser.description, parser.epilog = _CHECK, None
        for action in [action for action in parser._actions if action.dest not in _OF_CHECK]:
            action.help = argparse.SUPPRESS
    for name in ("standalone", "run-path"):  # what distrain does in any case
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    for name in ("nnodes", *WITHOUT_EFFECT):
        short = (_SHORT[name],) if name in _SHORT else ()
        parser.add_argument(*short, f"--{name}", help=argparse.SUPPRESS)
    known = parser._option_string_actions
    known.update({f"--{name[2:].replace('-', '_')}": action for name, action in known.items() if name[:2] == "--"})
    return parser


def _add_placement_options(add: Callable[..., object]) -> None:
    add(
        "--num-workers",
        type=_worker_count,
        metavar="N",
        help="workers to start, on all hosts together (default: all slots of the hosts, else 1); or: gpu, cpu, auto; "
        "or 2:8, as many as the slots allow",
    )
    add("--nproc-per-node", type=_worker_count, metavar="N", help="the same as --num-workers, for a single host")
    add_options_of(ScalingConfig, add)
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable for all workers; without a value, it keeps its value from here",
    )


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add_options_of(RunConfig, add)
    add(
        "--tracker",
        action="append",
        metavar="NAME[:KEY=VALUE,...]",
        help="also log metrics to tensorboard, wandb or mlflow, such as wandb:project=my,mode=offline (default: "
        "DISTRAIN_TRACKERS)",
    )
    add_options_of(LoggingConfig, add)


def _add_queue_options(add: Callable[..., object], *, submits: bool) -> None:
    if submits:
        add("--on-host", metavar="HOST", help="submit on this host, which runs the job: you can turn this machine off")
        add("--resume", action="store_true", help="continue the job after a reboot; alone: all unfinished jobs")
    wait = "wait in the queue until what the workers need is free"
    add("--wait", action="store_true", default=submits, help=argparse.SUPPRESS if submits else wait)
    add("--gpus", type=parsers.number, metavar="N", help="the same as --num-workers N --use-gpu")
    time = "how long you expect it to take, such as 30m or 2h: a short job may go before larger ones"
    add("--time", type=parsers.seconds, metavar="TIME", help=time)
    add("--after", action="append", default=[], metavar="JOB", help="start when this job has ended, however it ends")
    add("--force", action="store_true", help="also use GPUs that belong to jobs of the queue")


def _add_options_for_programs(add: Callable[..., object]) -> None:
    add("--check", action="store_true", help="check if the hosts can train together, and show a table of them")
    add("--deep", action="store_true", help="as --check, but also send bytes between all slots, and compare them")
    add("--json", action="store_true", help="write a JSON object at the end; other output goes to stderr")


def _add_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--as-ray",
        action="store_true",
        help="run an unmodified script of Ray Train: it imports ray and calls fit() itself, here (default: "
        "DISTRAIN_AS_RAY)",
    )
    frameworks = "whose variables the workers get (default: tensorflow if the script names TF_CONFIG, else torch)"
    add("--backend", choices=["torch", "tensorflow"], help=frameworks)
    add("--config", metavar="FILE.json", help="config of the function, a JSON object")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one entry of the config, JSON or text; a.b=1 sets config['a']['b']",
    )
    module = "run a module as a script; everything after it belongs to the module"
    add("-m", "--module", metavar="MODULE", nargs=argparse.REMAINDER, help=module)
    add("target", nargs="?", help="script.py, file.py:function or module:function")
    add("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


# -- values ----------------------------------------------------------------------------------------------------------


def _worker_count(text: str) -> str:
    if not re.fullmatch(r"\d+(:\d+)?|gpu|cpu|auto", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a number such as 4, or 2:8, gpu, cpu or auto; got {text!r}")
    return text


def environment_variables(settings: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``--env``. Raises ValueError for one without a value, or one that each rank gets."""
    variables = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name:
            raise ValueError(f"--env {setting}: must be NAME=VALUE, or the name of a variable that is set here")
        if not equals and name not in os.environ:
            raise ValueError(f"--env {name}: is not set here; give a value, --env {name}=VALUE")
        if name in ALWAYS_SET:
            raise ValueError(f"--env {name}: each rank is given its own {name}; leave it out")
        variables[name] = value if equals else os.environ[name]
    return variables
