"""From what the user gives to ``fit()`` to a run on some hosts. Runs in: coordinator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.api.backend import BackendConfig
from distrain.api.config import RunConfig, ScalingConfig, ValidationConfig, ValidationTaskConfig
from distrain.api.job import Job
from distrain.api.tracker import check_packages, trackers_of
from distrain.coordinator.connection import resting_agents
from distrain.coordinator.connection.choice import advice_on_slots, hosts_of, transports_for
from distrain.coordinator.connection.slurm import run_name
from distrain.coordinator.connection.transport import Transport, this_machine
from distrain.coordinator.connection.worker_settings import INTERPRETER_VARIABLES, settings_for
from distrain.coordinator.host_check import HostCheck, lacking
from distrain.coordinator.host_files import Shipping
from distrain.coordinator.ranks.ignored_settings import describe_ignored_settings
from distrain.coordinator.ranks.joined import RankGroup, join
from distrain.coordinator.ranks.outer_launcher import check_launcher
from distrain.coordinator.ranks.stop_signals import during_fit, refuse_after_stop
from distrain.coordinator.run.run import Run, absolute, workers_by_host
from distrain.coordinator.store.remote_store import open_run
from distrain.decisions.events import RunRequest, Validator
from distrain.errors import LaunchError, ResourcesError, StorageError
from distrain.hosts.host import hidden_gpus_problem
from distrain.system.consoles import console_threads
from distrain.system.log import log_level, warn
from distrain.system.remote_path import RemotePath
from distrain.transfer.project.module_origins import is_library
from distrain.worker.job import job
from distrain.worker.job.origin import script_of, stem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.api.result import Result
    from distrain.coordinator.host_check import HostFacts
    from distrain.decisions.host_checks import Finding
    from distrain.hosts.hostfile import HostSpec
    from distrain.storage.checkpoint import Checkpoint

    Given = tuple[job.Work, ScalingConfig, RunConfig]

prepare: Callable[[job.Work, ScalingConfig, RunConfig], Given] | None = None
"""Returns what is run instead of what fit() was given; set in processes that try out a user's script."""


def run_work(
    work: job.Work,
    scaling: ScalingConfig,
    run: RunConfig,
    *,
    resume_from: Checkpoint | None = None,
    metadata: Mapping[str, Any] | None = None,
    validation: ValidationConfig | None = None,
    transports: Sequence[Transport] | None = None,
    sys_path: Sequence[str] | None = None,
) -> Result:
    """Train as fit() and the command line do; see :meth:`DataParallelTrainer.fit`.

    transports: connections to the hosts; by default those that the ScalingConfig or the environment names.
    sys_path: the module search path of the workers; by default that of this process.
    """
    refuse_after_stop()
    if prepare is not None:
        work, scaling, run = prepare(work, scaling, run)
    resting_agents.idle_s()  # raises for a bad setting
    launcher = check_launcher(scaling, work)
    starts_workers = launcher is None and scaling.num_workers != 0
    if run.debug_rank is not None:
        work = _for_debugging(work, scaling, run.debug_rank, starts_workers=starts_workers)
    if transports is None:
        transports = transports_for(_hosts(scaling), scaling, os.environ, run) if starts_workers else [this_machine()]
    shares = workers_by_host([transport.host for transport in transports], scaling)
    if launcher is None or launcher.rank == 0:
        trackers = trackers_of(run.trackers, os.environ)
        check_packages(trackers)
        run = replace(run, trackers=trackers)
    _check_working_directory()
    sys_path = _clean_path(sys.path if sys_path is None else sys_path)
    request = _request(
        work,
        scaling,
        run,
        transports,
        sys_path,
        job=job.make_job(work, workers_per_host=max(shares.values())) if starts_workers else Job(blob=b""),
        resume_from=resume_from,
        metadata=metadata or {},
        validator=_validator(validation, run, sys_path),
    )
    with log_level(run.logging_config.log_level):
        if request.job.warning is not None:
            warn(request.job.warning)
        train = partial(_train, request, run, work, transports, _shipping(work, run, transports, sys_path))
        if launcher is None:
            with during_fit():
                return train()
        with join(launcher, request, work) as group:
            return group.follow() if launcher.rank else group.lead(partial(train, group))


def check_hosts(
    work: job.Work,
    scaling: ScalingConfig,
    run: RunConfig,
    *,
    sys_path: Sequence[str],
) -> tuple[list[Finding], dict[str, HostFacts]]:
    """Look at all hosts, also at spare ones, as at the start of a run.

    Return the problems, and what each host has.

    Raises DistrainError for problems of the storage or the settings, and KeyboardInterrupt.
    """
    hosts = _hosts(scaling)
    spare = {host.name: host.slots or 1 for host in hosts}
    shares = {name: share or spare[name] for name, share in workers_by_host(hosts, scaling).items()}
    one_each = replace(
        scaling, num_workers=(1, len(hosts)), use_gpu=False, resources_per_worker=None, accelerator_type=None
    )
    transports = transports_for([replace(host, slots=1) for host in hosts], scaling, os.environ, run)
    path = _clean_path(sys_path)
    request = _request(work, one_each, run, transports, path, job=Job(blob=b""))
    shipping = _shipping(work, run, transports, path)
    store = open_run(run.storage_path, f".distrain-check-{uuid.uuid4().hex}", run.storage_filesystem)
    location = store.location
    try:
        store.write_manifest({"run_id": request.run_id, "status": "running"})  # by which hosts know the storage
        request = replace(request, storage_path=str(location.parent), checks_hosts=True)
        found, facts = HostCheck(
            request, transports, shipping.for_run(store, request.run_id), store.open_order()
        ).look()
    finally:
        store.close()
        location.remove() if isinstance(location, RemotePath) else shutil.rmtree(location)
    return [*found, *lacking(facts, scaling, shares)], facts


def _train(
    request: RunRequest,
    run: RunConfig,
    work: job.Work,
    transports: Sequence[Transport],
    shipping: Shipping,
    group: RankGroup | None = None,
) -> Result:
    """Train in the run directory. ``group``: the ranks that another launcher has started."""
    is_rank = group is not None or request.scaling.num_workers == 0
    if is_rank and (ignored := describe_ignored_settings(request.scaling, run, group.launcher if group else None)):
        warn(ignored)
    _check_log_dir(run.log_dir)
    name, stem = run.name or run_name(os.environ), stem_of(script_of(work))
    store = open_run(run.storage_path, name, run.storage_filesystem, stem=stem)
    try:
        with console_threads():
            return Run(store, request, run, work, transports, shipping, group).train()
    finally:
        store.close()


def _request(
    work: job.Work,
    scaling: ScalingConfig,
    run: RunConfig,
    transports: Sequence[Transport],
    sys_path: list[str],
    **facts: Any,
) -> RunRequest:
    """Return all that the user has asked for.

    facts: fields of the request that are not in the configs.
    """
    is_script = isinstance(work, job.ScriptWork)
    grace_s, peer_grace_s = run.stop_grace_s, run.failure_config.peer_failure_grace_s
    request = RunRequest(
        run_id=uuid.uuid4().hex,
        backend=work.backend,
        scaling=scaling,
        hosts=settings_for(
            transports,
            directory=os.getcwd(),
            sys_path=sys_path,
            environment=run.env_vars,
            own_environment=os.environ,
            interface=scaling.interface or "",
        ),
        failure_config=run.failure_config,
        memory_every=run.checkpoint_config.memory_every,
        stop_grace_s=grace_s if grace_s is not None else 30.0 if is_script else 10.0,  # for scripts, as of torchrun
        peer_failure_grace_s=peer_grace_s if peer_grace_s is not None else 5.0 if is_script else 0.0,
        argv=sys.argv,
        python_flags=subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
        debug_rank=run.debug_rank,
        is_script=is_script,
        stop_signals=run.stop_signals,
        **facts,
    )
    _check_gpus_are_counted(scaling, request)
    return request


def _for_debugging(work: job.Work, scaling: ScalingConfig, rank: int, *, starts_workers: bool) -> job.Work:
    """Return the work for a run in which a rank is debugged. Raises ResourcesError if there is no such rank."""
    if not starts_workers:
        warn("RunConfig.debug_rank has no effect: train_func runs in this process, where breakpoint() works")
    elif rank >= scaling.max_workers:
        raise ResourcesError(f"debug_rank={rank}: ranks count from 0, and there are {scaling.max_workers} workers")
    return replace(work, backend=work.backend.for_debugging())


def _check_gpus_are_counted(scaling: ScalingConfig, request: RunRequest) -> None:
    """Raise LaunchError if workers would see other GPUs than the agents, or would be bound near none."""
    if scaling.numa_binding and not scaling.use_gpu:
        raise LaunchError("numa_binding binds workers to the CPUs near their GPUs: set use_gpu=True, too (--use-gpu)")
    if scaling.use_gpu:
        for name, settings in request.hosts.items():
            if problem := hidden_gpus_problem(settings):
                raise LaunchError(f"{name}: {problem}")


def _check_working_directory() -> None:
    """Raise LaunchError if the working directory, which workers begin in, was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the working directory was deleted: change to another one with cd or os.chdir()") from None


def _check_log_dir(log_dir: str | os.PathLike[str] | None) -> None:
    """Raise StorageError if logs cannot be written in ``log_dir``."""
    if log_dir is None:
        return
    folder = absolute(log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"distrain")
    except OSError as error:
        raise StorageError(
            f"cannot write logs in {folder}: {error}; name another directory with RunConfig(log_dir=...)"
        ) from error


# -- the hosts ---------------------------------------------------------------------------------------------------------


def _hosts(scaling: ScalingConfig) -> tuple[HostSpec, ...]:
    """Return all hosts, including spare ones that get ranks only if others are lost.

    Raises HostfileError, and ResourcesError if the hosts have too few slots.
    """
    hosts = hosts_of(scaling, os.environ)
    try:
        workers_by_host(hosts, scaling)
    except ResourcesError as error:
        raise ResourcesError(f"{error} {advice_on_slots(scaling, os.environ)}".rstrip()) from None
    return hosts


def _clean_path(path: Sequence[object]) -> list[str]:
    """Return ``sys.path`` as text. Notebooks add Path objects to it."""
    return [os.fspath(entry) for entry in path if isinstance(entry, (str, os.PathLike))]


# -- what travels ------------------------------------------------------------------------------------------------------


def _validator(validation: ValidationConfig | None, run: RunConfig, sys_path: list[str]) -> Validator | None:
    """Return the settings of the validation. Raises JobError if the function cannot be pickled."""
    if validation is None:
        return None
    task = validation.task_config or ValidationTaskConfig()
    config = dict(task.fn_kwargs or {})
    work = job.FunctionWork(function=validation.fn, config=config, validates=True, backend=BackendConfig())
    order = wire.RunValidation(directory=os.getcwd(), sys_path=sys_path, body=job.make_job(work).blob)
    return Validator(order=order, timeout_s=task.timeout_s, environment=run.env_vars)


def _requirements(file: str | os.PathLike[str]) -> str:
    """Return the text of a requirements file. Raises LaunchError."""
    try:
        return Path(file).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"the requirements file {file} cannot be read ({error}). `uv export --no-emit-project` and `pip freeze` "
            "write one"
        ) from error


def _shipping(work: job.Work, run: RunConfig, transports: Sequence[Transport], sys_path: list[str]) -> Shipping:
    """Return what is copied to other machines. Raises LaunchError if that is not possible."""
    from distrain.transfer.project.project import find_project  # most runs do not need it

    config = run.shipping_config
    hosts = [one.host for one in transports if one.ships and one.host.cwd is None]

    find = partial(
        find_project,
        sys_path=sys_path,
        directory=os.getcwd(),
        targets=work.files,
        named=[os.fspath(path) for path in config.include],
        limit_bytes=config.limit_bytes,
    )
    if config.env_from is not None and not any(one.makes_environment for one in transports):
        warn(
            "ShippingConfig.env_from has no effect: workers on this machine use its interpreter, and there is no "
            "other host"
        )
    project = find() if hosts else None
    places = {os.path.abspath(path) for path in (".", *sys_path, *map(os.path.dirname, work.files))}
    named = {*run.env_vars, *(name for one in transports for name in one.host.environment)}
    question = wire.SetUpHost(
        files=[],
        folders=[],
        place="",
        requirements=_requirements(config.env_from) if config.env_from else "",
        python=".".join(map(str, sys.version_info[:2])),
        executable=sys.executable,
        interpreter_path=[entry for entry in sys_path if is_library(entry)],
        interpreter_variables=[name for name in INTERPRETER_VARIABLES if name not in named],
        more_path=[folder for folder in (project.folders if project else ()) if folder not in places],
    )
    return Shipping(
        question=question,
        project=project,
        find_project=find,
        takes_project={host.name for host in hosts},
        fetch_limit=config.fetch_limit_bytes,
    )
