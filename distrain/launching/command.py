"""The command line: run a script, a module or a function on several workers. Runs in: coordinator."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from distrain.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, ShippingConfig
from distrain.connection.choice import hosts_of, transports_for
from distrain.connection.worker_settings import settings_for
from distrain.console.detached import run_detached
from distrain.console.error_screen import show_error
from distrain.coordinator.requests import STACKS, ask
from distrain.coordinator.run_errors import exit_code_of
from distrain.errors import DistrainError, LaunchError
from distrain.hosts.gpus import find_gpus
from distrain.hosts.host_info import usable_cpus
from distrain.hosts.hostfile import check_transport, split_ssh_args, total_slots
from distrain.launching.driver import driver_of, is_for_ray
from distrain.launching.options import environment_variables, ignored_options, make_parser, parse, shown_ranks
from distrain.launching.preflight import Preflight
from distrain.launching.preflight_table import show, show_emptied
from distrain.launching.slurm_job import batch_job
from distrain.launching.target import work_of, workers_path
from distrain.storage.paths import RunPaths
from distrain.storage.remote_store import local_directory_of
from distrain.system.log import say, warn
from distrain.system.text import without_controls
from distrain.trackers.choice import parse_tracker
from distrain.trainer import run_work

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from distrain.console.detached import DetachedConsole
    from distrain.hosts.hostfile import HostSpec
    from distrain.work.job import Work

_SIGINT_EXIT = 130


def run_command(
    arguments: Sequence[str] | None, user_path: Sequence[str], *, prog: str = "python -m distrain.launch"
) -> int:
    """Run the command line and return its exit code. Raises SystemExit for a wrong command line.

    arguments: those after ``prog``; None: those of this process.
    user_path: sys.path as the user's process was started with.
    """
    parser = make_parser(prog)
    options = parse(parser, sys.argv[1:] if arguments is None else arguments)
    if is_for_ray(options):
        return _drive(parser, options, user_path)
    if options.detach and (other := _runs_nothing(options)):
        parser.error(f"--detach is for runs; leave it out with {other}")
    if options.stacks:
        return _show_stacks(options.stacks)
    if ignored := ignored_options(options):
        warn(f"{', '.join(ignored)}: no effect; these options are for torchrun only")
    try:
        if options.slurm or options.dry_run:
            return _submit(options, sys.argv[1:] if arguments is None else arguments)
        hosts = _hosts(options)
        if options.check or options.clear_caches:
            return _check(options, hosts, user_path)
        work = work_of(options, user_path)
        scaling, run = _scaling_config(options, hosts), _run_config(options)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    train = partial(_run, work, scaling, run, workers_path(work, user_path))
    return run_detached(train) if options.detach else train()


def _runs_nothing(options: argparse.Namespace) -> str | None:
    """Return the option that makes the command do something else than to run here, or None."""
    others = ("stacks", "check", "clear_caches", "slurm", "dry_run")
    return next((f"--{name.replace('_', '-')}" for name in others if getattr(options, name)), None)


# -- configs ---------------------------------------------------------------------------------------------------------


def _hosts(options: argparse.Namespace) -> tuple[HostSpec, ...]:
    """Return the hosts to train on.

    Raises ValueError for hosts that cannot be parsed, and for options of torchrun that contradict them.
    """
    check_transport(options.transport, "--transport")
    scaling = ScalingConfig(hosts=options.hosts, hostfile=options.hostfile, transport=options.transport)
    hosts = hosts_of(scaling, os.environ)
    if options.nnodes not in (None, str(len(hosts)), f"{len(hosts)}:{len(hosts)}"):
        raise ValueError(
            f"--nnodes {options.nnodes}, but {len(hosts)} host(s); name all hosts with --hostfile or --hosts, and run "
            "this command once"
        )
    if options.nproc_per_node and len(hosts) > 1:
        raise ValueError("--nproc-per-node: with several hosts, their slots say how many each gets; or --num-workers")
    split_ssh_args(options.ssh_args or "", "--ssh-args")
    return hosts


def _scaling_config(options: argparse.Namespace, hosts: Sequence[HostSpec]) -> ScalingConfig:
    return ScalingConfig(
        num_workers=_num_workers(options, hosts),
        use_gpu=options.use_gpu,
        start_method=options.start_method,
        numa_binding=options.numa_binding,
        interface=options.interface,
        hosts=options.hosts,
        hostfile=options.hostfile,
        transport=options.transport,
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
    return int(amount) if amount.isdigit() else _count_devices(amount)


def _count_devices(kind: str) -> int:
    """Return the number of GPUs or CPUs of this machine; ``auto`` prefers GPUs, as under torchrun."""
    if kind == "cpu":
        return usable_cpus()
    gpus, problem = find_gpus(os.environ)
    if kind == "gpu" and not gpus:
        why = problem or "driver missing, or hidden by CUDA_VISIBLE_DEVICES"
        raise ValueError(
            f"one worker for each GPU was asked for, but no usable NVIDIA GPU was found ({why}); name a number, or "
            "take cpu"
        )
    return len(gpus) or usable_cpus()


def _run_config(options: argparse.Namespace) -> RunConfig:
    host_wait = {} if options.hosts_wait is None else {"host_wait_s": options.hosts_wait}
    return RunConfig(
        name=options.name,
        storage_path=options.storage_path,
        log_dir=options.log_dir,
        failure_config=FailureConfig(max_failures=options.max_failures, **host_wait),
        progress=options.progress,
        debug_rank=options.debug_rank,
        logging_config=LoggingConfig(ranks=shown_ranks(options.ranks_shown)),
        worker_runtime_env={"env_vars": environment_variables(options.env)},
        shipping_config=_shipping_config(options),
        trackers=None if options.tracker is None else [parse_tracker(text) for text in options.tracker],
    )


def _shipping_config(options: argparse.Namespace) -> ShippingConfig:
    limit = {} if options.ship_limit is None else {"limit_bytes": options.ship_limit}
    return ShippingConfig(enabled=not options.no_ship, include=options.ship, env_from=options.env_from, **limit)


# -- actions ---------------------------------------------------------------------------------------------------------


def _drive(parser: argparse.ArgumentParser, options: argparse.Namespace, user_path: Sequence[str]) -> int:
    """Run a script of Ray in this process. Return 0; what it raises ends the process as it does any script."""
    try:
        _hosts(options)
        drive = driver_of(parser, options, user_path)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    drive()
    return 0


def _run(
    work: Work, scaling: ScalingConfig, run: RunConfig, sys_path: list[str], detached: DetachedConsole | None = None
) -> int:
    """Train, and return the exit code."""
    try:
        run_work(work, scaling, run, sys_path=sys_path, on_command_line=True, detached=detached)
    except KeyboardInterrupt as error:
        return exit_code_of(error)
    except DistrainError as error:
        show_error(type(error), str(error))
        return exit_code_of(error)
    return 0


def _submit(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Submit a job of Slurm that runs the command line, or only show its script. Raises ValueError."""
    if not options.slurm:
        raise ValueError("--dry-run: only with --slurm, whose batch script it shows")
    if not (options.target or options.module):
        raise ValueError("--slurm: name what to run, such as train.py")
    job = batch_job(options, arguments)
    print(job.script, end="", flush=True)
    if options.dry_run:
        return 0
    try:
        number = job.submit()
    except LaunchError as error:
        show_error(type(error), str(error))
        return 2
    say(f"submitted as job {number}; run directory {job.run}; Result.from_path({job.run!r}) shows how far it is")
    return 0


def _check(options: argparse.Namespace, hosts: Sequence[HostSpec], user_path: Sequence[str]) -> int:
    """Check the hosts and show a table of them, or empty their caches. Return 0, or 1 if there is a problem."""
    from rich.console import Console

    scaling = _scaling_config(options, hosts)
    transports = transports_for(
        hosts,
        scaling,
        os.environ,
        ships=not options.no_ship,
        makes_environment=options.env_from is not None,
    )
    settings = settings_for(
        transports,
        directory=os.getcwd(),
        sys_path=user_path,
        environment=environment_variables(options.env),
        own_environment=os.environ,
        interface="" if options.clear_caches else scaling.interface or "",
    )
    preflight = Preflight(transports, settings, storage_path=options.storage_path, sys_path=user_path, scaling=scaling)
    try:
        preflight.clear_caches() if options.clear_caches else preflight.run()
    except KeyboardInterrupt:
        return _SIGINT_EXIT
    if options.clear_caches:
        return 0 if show_emptied(preflight) else 1
    show(preflight, Console(highlight=False))
    return 0 if preflight.is_fit else 1


def _show_stacks(folder: str) -> int:
    try:
        print(without_controls(ask(RunPaths(local_directory_of(folder)), STACKS)))
    except DistrainError as error:
        show_error(type(error), str(error), title="no stacks")
        return 2
    return 0
