"""The command line: run a script, a module or a function on several workers. Runs in: coordinator."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from distrain.api.config import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, ShippingConfig
from distrain.api.observer import Fact, Observer, RunBegan
from distrain.api.tracker import parse_tracker
from distrain.cli.run.check import as_json, compare_bytes, show
from distrain.cli.run.config_options import config_from, named_options
from distrain.cli.run.driver import driver_of, is_for_ray
from distrain.cli.run.options import WITHOUT_EFFECT, environment_variables, make_parser, parse
from distrain.cli.run.target import say_what_is_misplaced, work_of, workers_path
from distrain.cli.run.waiting import Job, in_queue, take_gpus
from distrain.cli.showing import details_of
from distrain.cli.text import write_json
from distrain.coordinator.connection.choice import hosts_of
from distrain.coordinator.run.error_screen import show_error
from distrain.coordinator.run.errors import exit_code_of
from distrain.coordinator.run.fit import check_hosts, run_work
from distrain.errors import DistrainError, ResourcesError
from distrain.hosts.claims import CLAIM, NO_CLAIM
from distrain.hosts.gpus import find_gpus
from distrain.hosts.host_info import usable_cpus
from distrain.hosts.hostfile import HostSpec, check_transport, split_ssh_args
from distrain.storage.runs.listing import run_at
from distrain.system.arguments import in_users_words, options_named
from distrain.system.log import log_level, warn
from distrain.system.remote_path import locate
from distrain.system.text import without_errno
from distrain.worker.job.job import TargetWork, Work
from distrain.worker.job.origin import script_of, stem_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from distrain.cli.parsers import Parser


def run_command(
    arguments: Sequence[str] | None,
    user_path: Sequence[str],
    *,
    prog: str = "python -m distrain.launch",
    job: Job | None = None,
) -> int:
    """Run the command line and return its exit code. Raises SystemExit for a wrong command line.

    arguments: those after ``prog``; None: those of this process.
    user_path: sys.path as the user's process was started with. job: this is a job of the queue.
    """
    parser = make_parser(prog)
    options = parse(parser, sys.argv[1:] if arguments is None else arguments)
    if options.force:
        os.environ[CLAIM] = NO_CLAIM
    if is_for_ray(options):
        return _drive(parser, options, user_path, job or Job())
    with options_named(named_options()):
        try:
            return _launch(parser, options, user_path, job or Job())
        except (DistrainError, KeyboardInterrupt) as error:
            show_error(error)
            return exit_code_of(error)


def _launch(parser: Parser, options: argparse.Namespace, user_path: Sequence[str], job: Job) -> int:
    """Train, or check the hosts. Raises the error of the run."""
    hosts, work, scaling, run = asked_for(parser, options, user_path, job)
    path = [job.in_copy(entry) for entry in workers_path(work, user_path)]
    if options.check:
        return _check(work, scaling, run, path, options)
    if scaling.num_workers == 1 or isinstance(work, TargetWork):
        say_what_is_misplaced(parser, options, user_path)
    train = _run_for_programs if options.json else run_work
    if not options.wait:
        train(work, scaling, run, sys_path=path)
        return 0
    with in_queue(options, hosts, scaling, stem_of(script_of(work)), job) as (name, hostfile, watcher):
        scaling = replace(scaling, hosts=None, hostfile=hostfile)
        train(work, scaling, replace(run, name=name, callbacks=[watcher]), sys_path=path)
    return 0


def asked_for(
    parser: Parser, options: argparse.Namespace, user_path: Sequence[str], job: Job
) -> tuple[tuple[HostSpec, ...], Work, ScalingConfig, RunConfig]:
    """Return what the command line asks for: hosts, work and configs. Raise SystemExit if something in it is wrong."""
    if ignored := [name for name in WITHOUT_EFFECT if getattr(options, name.replace("-", "_")) is not None]:
        warn(f"--{', --'.join(ignored)}: no effect; these options are for torchrun only")
    options.check = options.check or options.deep
    try:
        take_gpus(options)
        hosts = _hosts(options)
        work = work_of(options, user_path, job.in_copy, is_needed=not options.check)
        scaling = config_from(ScalingConfig, options, num_workers=_num_workers(options, hosts))
        run = _run_config(options)
    except (ValueError, TypeError, OSError, ResourcesError) as error:
        parser.error(in_users_words(without_errno(error)))
    return hosts, work, scaling, run


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


def _num_workers(options: argparse.Namespace, hosts: Sequence[HostSpec]) -> int | tuple[int, int]:
    amount: str | None = options.num_workers or options.nproc_per_node
    if amount is None:
        return sum(host.slots or 1 for host in hosts)
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
    return config_from(
        RunConfig,
        options,
        failure_config=config_from(FailureConfig, options),
        checkpoint_config=config_from(CheckpointConfig, options),
        logging_config=config_from(LoggingConfig, options),
        shipping_config=config_from(ShippingConfig, options),
        worker_runtime_env={"env_vars": environment_variables(options.env)},
        trackers=None if options.tracker is None else [parse_tracker(text) for text in options.tracker],
    )


# -- actions ---------------------------------------------------------------------------------------------------------


def _drive(parser: Parser, options: argparse.Namespace, user_path: Sequence[str], job: Job) -> int:
    """Run a script of Ray in this process. Return 0; what it raises ends the process as it does any script."""
    try:
        hosts = _hosts(options)
        drive = driver_of(parser, options, user_path, job.in_copy)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))  # it says what to write into the script
    with ExitStack() as stack:
        if options.wait:
            workers = options.gpus or sum(host.slots or 1 for host in hosts)
            scaling = ScalingConfig(num_workers=workers, use_gpu=bool(options.gpus))
            place = in_queue(options, hosts, scaling, stem_of(options.target or options.module[0]), job)
            try:
                _, options.hostfile, _ = stack.enter_context(place)
            except (DistrainError, KeyboardInterrupt) as error:
                show_error(error)
                return exit_code_of(error)
            options.hosts = None
        drive()
    return 0


class _Beginning(Observer):
    """It notes the run directory."""

    hears = (RunBegan,)
    location: str | None = None

    def hear(self, fact: Fact) -> None:
        assert isinstance(fact, RunBegan)
        self.location = fact.location


def _run_for_programs(work: Work, scaling: ScalingConfig, run: RunConfig, *, sys_path: list[str]) -> None:
    """Train with everything on stderr, also what native code prints, and then write an object to stdout."""
    beginning, error = _Beginning(), None
    sys.stdout.flush()
    with open(os.dup(1), "wb") as own:
        os.dup2(2, 1)
        try:
            run_work(work, scaling, replace(run, callbacks=[*(run.callbacks or ()), beginning]), sys_path=sys_path)
        except BaseException as raised:
            error = raised
            raise
        finally:
            sys.stdout.flush()
            os.dup2(own.fileno(), 1)
            found = {} if beginning.location is None else details_of(run_at(locate(beginning.location)))
            text = found.get("error") or (None if error is None else str(error) or None)
            write_json("run", exit_code=exit_code_of(error), **{"run": None, **found, "error": text})


def _check(work: Work, scaling: ScalingConfig, run: RunConfig, sys_path: list[str], options: argparse.Namespace) -> int:
    """Check the hosts and show a table of them. Return 0, or 1 if there is a problem."""
    from rich.console import Console

    with log_level(run.logging_config.log_level):
        findings, hosts = check_hosts(work, scaling, run, sys_path=sys_path)
    if options.deep and not any(finding.is_fatal for finding in findings):
        findings += compare_bytes(hosts, scaling, run, sys_path)
    if options.json:
        write_json("check", **as_json(findings, hosts))
    else:
        show(findings, hosts, Console(highlight=False))
    return 1 if any(finding.is_fatal for finding in findings) else 0
