"""The trainer: check what the user gives to fit(), run it, and make the Result or the error. Runs in: coordinator."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from distrain import wire
from distrain.api.backend import BackendConfig
from distrain.api.config import DataConfig, RunConfig, RunContext, ScalingConfig, ValidationConfig, ValidationTaskConfig
from distrain.api.job import Job
from distrain.api.observer import Ended, RunBegan
from distrain.api.ray_names import explaining, without
from distrain.api.result import Result, make_result, pickle_or_none
from distrain.api.tracker import check_packages, trackers_of
from distrain.api.trainer_options import check_options, showing_options
from distrain.coordinator.connection import resting_agents
from distrain.coordinator.connection.choice import advice_on_slots, hosts_of, transports_for
from distrain.coordinator.connection.connections import Connections
from distrain.coordinator.connection.slurm import run_name
from distrain.coordinator.connection.transport import LocalTransport, Transport
from distrain.coordinator.connection.worker_settings import INTERPRETER_VARIABLES, interpreter_entries, settings_for
from distrain.coordinator.coordinator import Coordinator
from distrain.coordinator.host_check import HostCheck, lacking
from distrain.coordinator.host_files import Shipping
from distrain.coordinator.manifest import RunManifest
from distrain.coordinator.observers import Observers, import_observers, observers_of
from distrain.coordinator.ranks.adopted import request_for_adopted
from distrain.coordinator.ranks.ignored_settings import describe_ignored_settings
from distrain.coordinator.ranks.in_process import InProcessRank
from distrain.coordinator.ranks.joined import RankGroup, join
from distrain.coordinator.ranks.outer_launcher import OuterLauncher, check_launcher
from distrain.coordinator.run_errors import RunErrors, exit_code_of
from distrain.coordinator.run_facts import RunFacts, plain
from distrain.coordinator.stop_signals import refuse_after_stop
from distrain.coordinator.store.event_log import EventLog
from distrain.coordinator.store.remote_store import open_run
from distrain.coordinator.store.run_store import RESERVED_BYTES
from distrain.decisions.blame import RunSummary
from distrain.decisions.events import RunRequest, Validator
from distrain.decisions.placement import shares_of, workers_on
from distrain.decisions.retries import start_without_checkpoint
from distrain.decisions.run_status import RunStatus
from distrain.decisions.states import RunState
from distrain.errors import (
    CheckpointError,
    DistrainError,
    LaunchError,
    ResourcesError,
    StorageError,
    TrainingFailedError,
    WorkerGroupError,
)
from distrain.hosts.host import hidden_gpus_problem
from distrain.storage.checkpoint import Checkpoint
from distrain.storage.files import full_disk_hint, write_atomically
from distrain.storage.ownership import check_owners
from distrain.storage.paths import read_manifest
from distrain.storage.records import damage_of, last_metrics
from distrain.system.arguments import check_type
from distrain.system.consoles import console_threads
from distrain.system.log import log_level, say, warn
from distrain.system.notebook import hide_own_lines
from distrain.system.remote_path import RemotePath, locate
from distrain.system.text import is_full_disk, stopped_by
from distrain.worker.job import job
from distrain.worker.job.functions import check_plain, check_signature
from distrain.worker.job.origin import script_of, stem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from typing_extensions import Unpack

    from distrain.api.trainer_options import TrainerOptions
    from distrain.coordinator.host_check import HostFacts
    from distrain.coordinator.ranks.port import Ranks
    from distrain.coordinator.store.run_store import RunStore
    from distrain.data.datasets import RunDatasets
    from distrain.decisions.host_checks import Finding
    from distrain.hosts.hostfile import HostSpec
    from distrain.storage.paths import RunPaths

__all__ = ["DataParallelTrainer", "run_work"]


_FULL_DISK_WAIT_S = 5.0
"""Seconds that the end of a run waits for free space on a full disk before it gives up a file."""
_FULL_DISK_PAUSE_S = 0.5
"""Seconds between two attempts to write on a full disk."""
_LEFT_BY_REPORTS = RESERVED_BYTES * 3 // 4
_LEFT_BY_RESULTS = RESERVED_BYTES // 2
"""Bytes of reserved disk space that the last reports leave for results and errors, and these for run.json."""


@explaining("Trainer")
@without("preprocessor")
class DataParallelTrainer:
    """Run a training function on a group of workers.

    train_loop_per_worker: the function, with no parameter or one for the config. It runs in the main thread of every
        worker.
    train_loop_config: the argument of that function, ``{}`` by default. It is pickled once per run, so keep large
        objects out of it.
    backend_config: the framework's settings and hooks.
    datasets: by name, the data that :func:`distrain.get_dataset_shard` divides among the workers: a Dataset of
        :mod:`distrain.data`; a dataset of torch, Hugging Face or pyarrow; a pandas DataFrame, a dict of arrays, a list
        of dicts; a path, glob pattern or URL of Parquet, CSV or JSON files, or a list of these; or a function that
        makes one of these on the worker.
    dataset_config: how they are read.
    resume_from_checkpoint: the checkpoint, or its path, that a *new* run starts from. A run that is continued starts
        from its own latest checkpoint.
    validation_config: how ``report(validation=...)`` validates a checkpoint.
    metadata: JSON that ``get_context().get_metadata()`` returns, and that every checkpoint of the run gets.

    Raises TypeError or ValueError for bad arguments.

    ::

        def train_func(config):
            distrain.report({"loss": 2 * config["lr"]})

        scaling = distrain.ScalingConfig(num_workers=2)
        result = DataParallelTrainer(train_func, train_loop_config={"lr": 0.1}, scaling_config=scaling).fit()
    """

    @showing_options
    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        backend_config: BackendConfig | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        resume_from = options.get("resume_from_checkpoint")
        if isinstance(resume_from, (str, Path)):
            resume_from = options["resume_from_checkpoint"] = Checkpoint(resume_from)
        check_type("backend_config", backend_config, BackendConfig, optional=True)
        check_options(options)
        datasets, validation = options.get("datasets"), options.get("validation_config")
        if validation is not None:
            check_plain("ValidationConfig.fn", validation.fn)
        self._work = job.FunctionWork(
            function=check_signature(train_loop_per_worker),
            config=dict(options.get("train_loop_config") or {}),
            backend=backend_config or BackendConfig(),
            run_datasets=_datasets(datasets, options.get("dataset_config") or DataConfig()) if datasets else None,
        )
        self._scaling = options.get("scaling_config") or ScalingConfig()
        self._run = options.get("run_config") or RunConfig()
        self._resume_from = resume_from
        self._validation = validation
        self._metadata = _json("metadata", options.get("metadata") or {})

    @classmethod
    def restore(cls, path: str | os.PathLike[str], *args: Any, **options: Any) -> NoReturn:
        """Raise TypeError that says how to continue a run: distrain needs no ``restore()``, which Ray AIR has."""
        raise TypeError(
            f"{cls.__name__}.restore() is not needed: make the trainer as before, with "
            f"RunConfig(name={os.path.basename(os.path.normpath(path))!r}, storage_path=...); fit() continues an "
            "unfinished run of that name at its last checkpoint"
        )

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str]) -> bool:
        """Return True if ``fit()`` with this run directory would continue a run."""
        manifest = read_manifest(locate(path))
        return bool(manifest) and manifest.get("status") != "finished"

    def _for_trial(
        self, config: Mapping[str, Any], scaling_config: ScalingConfig | None, run_config: RunConfig
    ) -> DataParallelTrainer:
        """Return this trainer with more of a config, and other settings: one trial of a sweep."""
        trial = copy.copy(self)
        trial._work = replace(self._work, config={**self._work.config, **config})
        trial._scaling = scaling_config or self._scaling
        trial._run = run_config
        return trial

    def fit(self) -> Result:
        """Train, wait for the end, and return the result.

        Raises JobError, ResourcesError or StorageError before any worker starts; TrainingFailedError, with the partial
        ``result``, if a rank or a host failed; KeyboardInterrupt after Ctrl-C, once every worker is gone;
        PreemptionError after SIGTERM, SIGHUP or SIGQUIT, and then at every further call in this process. Their
        tracebacks end here. The exceptions of ranks are in ``WorkerGroupError.worker_failures``.
        """
        __tracebackhide__ = True  # pytest omits frames that have this variable
        try:
            return run_work(
                self._work,
                self._scaling,
                self._run,
                resume_from=self._resume_from,
                metadata=self._metadata,
                validation=self._validation,
            )
        except (DistrainError, KeyboardInterrupt) as error:
            hide_own_lines(error)
            raise error.with_traceback(None) from None


def _check_intact(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a checkpoint that does not exist or is damaged."""
    if not checkpoint.exists():
        raise CheckpointError(f"resume_from_checkpoint: there is no directory {checkpoint.path}")
    folder, damage = Path(checkpoint.path), None
    if checkpoint.path and _is_run(checkpoint.remote_path or folder):
        raise CheckpointError(
            f"resume_from_checkpoint: {checkpoint.path} is a run directory; give one of its checkpoints, "
            f"Result.from_path({checkpoint.path!r}).checkpoint for the latest"
        )
    try:
        if checkpoint.path:
            damage = damage_of(checkpoint.remote_path or folder, needs_manifest=False)
    except OSError as error:
        damage = f"it cannot be read: {error}"
    if damage is not None:
        raise CheckpointError(f"resume_from_checkpoint: {checkpoint.path} is damaged: {damage}")


def _is_run(folder: Path | RemotePath) -> bool:
    try:
        return {"run_id", "attempts"} <= read_manifest(folder).keys()
    except (StorageError, AttributeError):  # another program's file of that name
        return False


def _datasets(datasets: Mapping[str, Any], config: DataConfig) -> RunDatasets:
    from distrain.data.datasets import run_datasets  # it needs numpy

    return run_datasets(
        datasets,
        config.datasets_to_split,
        on_change=config.on_change,
        resume=config.resume,
    )


def _json(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be JSON, because every checkpoint stores it in a file: {error}") from None
    return plain


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
    detach: Callable[[RunPaths, str], None] | None = None,
) -> Result:
    """Train as fit() and the command line do; see :meth:`DataParallelTrainer.fit`.

    transports: connections to the hosts; by default those that the ScalingConfig or the environment names.
    sys_path: the module search path of the workers; by default that of this process.
    detach: has this process write to the console.log of the run, if it has no terminal.
    """
    refuse_after_stop()
    resting_agents.idle_s()  # raises for a bad setting
    launcher = check_launcher(scaling, work)
    starts_workers = launcher is None and scaling.num_workers != 0
    if run.debug_rank is not None:
        work = _for_debugging(work, scaling, run.debug_rank, starts_workers=starts_workers)
    if transports is None:
        transports = _transports(_hosts(scaling), scaling, run) if starts_workers else [LocalTransport()]
    shares = _shares([transport.host for transport in transports], scaling)
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
        job=job.make_job(work, workers_per_host=max(shares.values())) if starts_workers else Job(blob=b""),
        transports=transports,
        resume_from=resume_from,
        metadata=metadata or {},
        validator=_validator(validation, run, sys_path),
        sys_path=sys_path,
    )
    where = _Where(
        transports=transports,
        shipping=_shipping(work, run, transports, sys_path),
        launcher=launcher,
        detach=detach,
        starts_workers=starts_workers,
    )
    _check_gpus_are_counted(scaling, request)
    with log_level(run.log_level):
        if request.job.warning is not None:
            warn(request.job.warning)
        train = partial(_train, request, run, work, where)
        if launcher is None:
            return train()
        with join(launcher, request, work) as group:
            return group.follow() if launcher.rank else group.lead(partial(train, group))


def _request(
    work: job.Work,
    scaling: ScalingConfig,
    run: RunConfig,
    *,
    transports: Sequence[Transport],
    sys_path: list[str],
    **facts: Any,
) -> RunRequest:
    """Return all that the user has asked for. ``facts``: fields of the request that are not in the configs."""
    is_script = isinstance(work, job.ScriptWork)
    grace_s, peer_grace_s = run.stop_grace_s, run.failure_config.peer_failure_grace_s
    return RunRequest(
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
        stop_grace_s=grace_s if grace_s is not None else 30.0 if is_script else 10.0,  # for scripts, as of torchrun
        peer_failure_grace_s=peer_grace_s if peer_grace_s is not None else 5.0 if is_script else 0.0,
        argv=sys.argv,
        python_flags=subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
        debug_rank=run.debug_rank,
        is_script=is_script,
        stop_signals=run.stop_signals,
        sys_path=sys_path,
        **facts,
    )


def check_hosts(
    work: job.Work,
    scaling: ScalingConfig,
    run: RunConfig,
    *,
    sys_path: Sequence[str],
    empties_caches: bool = False,
) -> tuple[list[Finding], dict[str, HostFacts]]:
    """Begin a run on all hosts, also on spare ones, and end it before its ranks start.

    Return the problems, and what each host has. empties_caches: also delete what distrain stores on the hosts.

    Raises DistrainError for problems of the storage or the settings, and KeyboardInterrupt.
    """
    hosts = _hosts(scaling)
    spare = {host.name: host.slots or 1 for host in hosts}
    shares = {name: share or spare[name] for name, share in _shares(hosts, scaling).items()}
    one_each = replace(
        scaling, num_workers=(1, len(hosts)), use_gpu=False, resources_per_worker=None, accelerator_type=None
    )
    path = _clean_path(sys_path)
    transports = _transports([replace(host, slots=1) for host in hosts], scaling, run)
    request = _request(work, one_each, run, job=Job(blob=b""), transports=transports, sys_path=path)
    _check_gpus_are_counted(scaling, request)
    where = _Where(
        transports=transports,
        shipping=_shipping(work, run, transports, path),
        launcher=None,
        detach=None,
        starts_workers=True,
    )
    store = open_run(run.storage_path, f".distrain-check-{uuid.uuid4().hex}", run.storage_filesystem)
    try:
        found, facts = _Run(store, request, run, work, where, None).check(empties_caches=empties_caches)
    finally:
        store.close()
        location = store.location
        location.remove() if isinstance(location, RemotePath) else shutil.rmtree(location)
    return [*found, *lacking(facts, scaling, shares)], facts


def _check_gpus_are_counted(scaling: ScalingConfig, request: RunRequest) -> None:
    """Raise LaunchError if workers would see other GPUs than the agents."""
    if scaling.use_gpu or scaling.numa_binding:
        for name, settings in request.hosts.items():
            if problem := hidden_gpus_problem(settings):
                raise LaunchError(f"{name}: {problem}")


def _for_debugging(work: job.Work, scaling: ScalingConfig, rank: int, *, starts_workers: bool) -> job.Work:
    """Return the work for a run in which a rank is debugged. Raises ResourcesError if there is no such rank."""
    if not starts_workers:
        warn("RunConfig.debug_rank has no effect: train_func runs in this process, where breakpoint() works")
    elif rank >= scaling.max_workers:
        raise ResourcesError(f"debug_rank={rank}: ranks count from 0, and there are {scaling.max_workers} workers")
    return replace(work, backend=work.backend.for_debugging())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """The place where a run trains: on which hosts, with which files; by which launcher, if not distrain.

    detach: sends the output into the run directory.
    """

    transports: Sequence[Transport]
    shipping: Shipping
    launcher: OuterLauncher | None
    detach: Callable[[RunPaths, str], None] | None
    starts_workers: bool
    """False if train_func runs in this process."""


def _train(
    request: RunRequest, run: RunConfig, work: job.Work, where: _Where, group: RankGroup | None = None
) -> Result:
    """Train in the run directory. ``group``: the ranks that another launcher has started."""
    if not where.starts_workers and (ignored := describe_ignored_settings(request.scaling, run, where.launcher)):
        warn(ignored)
    _check_log_dir(run.log_dir)
    name, stem = run.name or run_name(os.environ), stem_of(script_of(work))
    store = open_run(run.storage_path, name, run.storage_filesystem, stem=stem)
    try:
        if where.detach is not None:
            where.detach(store.paths, str(store.location))
        with console_threads():
            return _Run(store, request, run, work, where, group).train()
    finally:
        store.close()


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
    folder = _absolute(log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"distrain")
    except OSError as error:
        raise StorageError(
            f"cannot write logs in {folder}: {error}; name another directory with RunConfig(log_dir=...)"
        ) from error


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


def _hosts(scaling: ScalingConfig) -> tuple[HostSpec, ...]:
    """Return all hosts, including spare ones that get ranks only if others are lost.

    Raises HostfileError, and ResourcesError if the hosts have too few slots.
    """
    hosts = hosts_of(scaling, os.environ)
    try:
        _shares(hosts, scaling)
    except ResourcesError as error:
        raise ResourcesError(f"{error} {advice_on_slots(scaling, os.environ)}".rstrip()) from None
    return hosts


def _transports(hosts: Sequence[HostSpec], scaling: ScalingConfig, run: RunConfig) -> list[Transport]:
    """Return the connections to the hosts. Raises HostfileError."""
    return transports_for(
        hosts,
        scaling,
        os.environ,
        lease_s=run.failure_config.host_lease_s,
        ships=run.shipping_config.enabled,
        makes_environment=run.shipping_config.env_from is not None,
    )


def _shares(hosts: Iterable[HostSpec], scaling: ScalingConfig) -> dict[str, int]:
    """Return how many workers each host gets while no host is lost. Raises ResourcesError."""
    slots = {host.name: host.slots for host in hosts}
    return shares_of(slots, workers_on(slots, scaling))


def _clean_path(path: Sequence[object]) -> list[str]:
    """Return ``sys.path`` as text. Notebooks add Path objects to it."""
    return [os.fspath(entry) for entry in path if isinstance(entry, (str, os.PathLike))]


def _validator(validation: ValidationConfig | None, run: RunConfig, sys_path: list[str]) -> Validator | None:
    """Return the settings of the validation. Raises JobError if the function cannot be pickled."""
    if validation is None:
        return None
    task = validation.task_config or ValidationTaskConfig()
    config = dict(task.fn_kwargs or {})
    work = job.FunctionWork(function=validation.fn, config=config, validates=True, backend=BackendConfig())
    return Validator(
        blob=job.make_job(work).blob,
        timeout_s=task.timeout_s,
        directory=os.getcwd(),
        sys_path=sys_path,
        environment=run.env_vars,
    )


def _shipping(work: job.Work, run: RunConfig, transports: Sequence[Transport], sys_path: list[str]) -> Shipping:
    """Return what is brought to other machines. Raises LaunchError if that is not possible."""
    from distrain.transfer.project.project import find_project  # most runs need neither
    from distrain.transfer.project.requirements import requirements_of

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
        cache_bytes=config.cache_bytes,
        requirements=requirements_of(os.fspath(config.env_from), directory=os.getcwd()) if config.env_from else "",
        python=".".join(map(str, sys.version_info[:2])),
        executable=sys.executable,
        interpreter_path=interpreter_entries(sys_path),
        interpreter_variables=[name for name in INTERPRETER_VARIABLES if name not in named],
        more_path=[folder for folder in (project.folders if project else ()) if folder not in places],
    )
    return Shipping(
        question=question,
        project=project,
        find_project=find,
        takes_project={host.name for host in hosts},
    )


class _Run:
    """One run in its directory. It writes the manifest, runs the coordinator, and makes the Result."""

    def __init__(
        self,
        store: RunStore,
        request: RunRequest,
        run: RunConfig,
        work: job.Work,
        where: _Where,
        group: RankGroup | None,
    ) -> None:
        self._store = store
        self._group = group
        self._request = request
        self._work = work
        self._where = where
        self._config = run
        configs = {
            "scaling_config": plain(asdict(request.scaling)),
            "checkpoint_config": asdict(run.checkpoint_config),
            "failure_config": asdict(run.failure_config),
            "run_config": _plain_run_config(run),
        }
        config = getattr(work, "config", {})
        self._facts = RunFacts(script_of(work), config, detached=where.detach is not None)
        self._manifest = RunManifest(store, run_id=request.run_id, configs=configs, facts=self._facts)
        self._continued = bool(self._manifest.before)
        self._write_until: float | None = None
        self._log_dir = None if run.log_dir is None else _absolute(run.log_dir)
        if self._log_dir is not None:
            check_owners(self._log_dir / store.paths.root.name)
        self._context = RunContext(
            run_id=request.run_id,
            run_config=run,
            scaling_config=request.scaling,
            backend_config=request.backend,
            train_loop_config=config,
        )

    def train(self) -> Result:
        """Train and return the result, or raise the error of the run."""
        latest = self._store.latest
        request = self._request = replace(
            self._in_directory(),
            checkpoint=str(latest.path) if latest else self._start_without_own(),
            first_attempt=self._manifest.first_attempt,
        )
        import_observers()  # now, as Ctrl-C is not handled well between the next line and the start of the loop
        self._announce()
        self._store.metadata = dict(self._request.metadata)
        self._write_start()
        self._facts.begin()
        observers = self._observers()
        coordinator: Coordinator | None = None
        result: Result | None = None
        try:
            observers.tell(self._begun)
            ranks, request = self._ranks(request)
            coordinator = self._coordinator(request, ranks, observers)
            ranks.drive(coordinator.run)
            complaint = "the last reports could not be written"
            self._write_at_end(self._store.write_last_lines, complaint, left=_LEFT_BY_REPORTS)
            result, failure = self._conclude(coordinator, observers.status)
        except BaseException as error:
            failure = error
        self._end(coordinator, observers, result, failure)
        if failure is not None:
            raise failure
        assert result is not None
        return result

    def _in_directory(self) -> RunRequest:
        """Return the request, which knows the run directory."""
        store = self._store
        return replace(
            self._request,
            run_name=store.location.name,
            storage_path=store.storage_path,
            filesystem=store.filesystem,
        )

    def _observers(self) -> Observers:
        location, name = str(self._store.location), self._store.location.name
        in_process = not self._where.starts_workers
        self._begun = RunBegan(self._request.run_id, name, location, self._store.paths.root, in_process)
        status = RunStatus(location, time.monotonic(), self._request.stop_grace_s)
        return Observers(status, [EventLog(self._store), *observers_of(self._context, self._begun, status)])

    def check(self, *, empties_caches: bool) -> tuple[list[Finding], dict[str, HostFacts]]:
        """Look at the hosts, and start no rank."""
        self._write_start()
        request = replace(self._in_directory(), checks_hosts=True, empties_caches=empties_caches)
        return HostCheck(
            request,
            self._store,
            Connections(self._where.transports, request),
            self._config.checkpoint_config,
            Observers(RunStatus(str(self._store.location), time.monotonic(), 0.0)),
            manifest=self._manifest,
            shipping=self._where.shipping.for_run(self._store, request.run_id),
        ).look()

    def _end(
        self,
        coordinator: Coordinator | None,
        observers: Observers,
        result: Result | None,
        error: BaseException | None,
    ) -> None:
        """Note in run.json how the run has ended, and tell the observers. All other files of the run are there."""
        begun = RunSummary(state=RunState.CONNECTING, attempt=self._request.first_attempt - 1)
        end = begun if coordinator is None else coordinator.end
        is_over = end.state.is_terminal and (result is not None or end.state is not RunState.FINISHED)
        status = end.state.value if is_over else "failed"
        reason = None if end.state is RunState.FINISHED else end.stop_reason
        how = "stopped" if status == "aborted" else status
        ended = partial(
            Ended,
            status=status,
            how=f"stopped by {stopped_by(reason)}" if reason else how,
            seconds=time.monotonic() - observers.status.started,
            result=result,
            error=error,
            checkpoints=list(self._store.committed),
            advice=(
                self._run_errors(coordinator, observers.status).how_to_continue
                if coordinator is not None and reason == "SIGINT"
                else None
            ),
        )
        try:
            self._facts.end()
            self._manifest.exit_code = exit_code_of(error)
            self._write_at_end(
                lambda: self._manifest.write(status),
                "the run directory does not say how the run ended, because that could not be written",
                left=0,
            )
        finally:  # Ctrl-C may end the wait for a full disk
            observers.end(ended(storage_works=self._storage_works(end)))

    def _storage_works(self, end: RunSummary) -> bool:
        return not (end.storage_failed or self._store.is_stalled)

    def _write_start(self) -> None:
        try:
            self._manifest.write("running")
            if self._continued:
                self._store.delete_end_files()
        except OSError as error:
            raise StorageError(
                f"cannot use the run directory {self._store.location}: {error}{full_disk_hint(str(error))}"
            ) from error

    def _write_at_end(self, write: Callable[[], None], complaint: str, *, left: int = _LEFT_BY_RESULTS) -> None:
        """Write a file at the end of the run. Wait some seconds for space on a full disk.

        If it cannot be written, only warn: an exception would hide the error that has ended the run.

        left: bytes of the reserved space that must stay for more important files.
        """
        while not self._store.is_stalled:
            try:
                self._store.shrink_reserve(left)
                write()
                return
            except OSError as error:
                self._write_until = self._write_until or time.monotonic() + _FULL_DISK_WAIT_S
                if not is_full_disk(str(error)) or time.monotonic() > self._write_until:
                    warn(f"{complaint}: {error}")
                    return
                time.sleep(_FULL_DISK_PAUSE_S)

    def _start_without_own(self) -> str | None:
        """Return the checkpoint to start from if the run has none itself. Raise CheckpointError if it is damaged."""
        resume_from = self._request.resume_from
        if resume_from is None:
            return None
        _check_intact(resume_from)
        if resume_from.path and (resume_from.remote_path is None or resume_from.remote_path.given is None):
            return resume_from.path
        return resume_from.to_directory(self._store.paths.staging / "resume_from")

    def _announce(self) -> None:
        wanted, name = self._config.name, self._store.location.name
        if wanted and wanted != name:
            say(f"run {wanted!r} is finished; this one is {name}")
        if self._continued:
            latest = self._store.latest
            fresh = start_without_checkpoint(is_script=self._request.is_script)
            start = f"at {latest.path.name}" if latest else f"from {fresh}"
            say(f"continuing the unfinished run {self._store.location} {start}")
        say(f"{self._headline()}; run directory {self._store.location}")

    def _headline(self) -> str:
        """Return what begins now."""
        if self._group is not None:
            launcher = self._group.launcher
            return f"training in the {launcher.world_size} processes that {launcher.name} has started"
        shares = _shares([transport.host for transport in self._where.transports], self._request.scaling)
        workers, hosts = sum(shares.values()), sum(map(bool, shares.values()))
        what = f"starting {workers} worker{'s' if workers > 1 else ''}" if workers else "training in this process"
        return what + (f" on {hosts} hosts" if hosts > 1 else "")

    def _ranks(self, request: RunRequest) -> tuple[Ranks, RunRequest]:
        """Return where the ranks live, and what is asked of them. Ranks of another launcher meet here."""
        if self._group is not None:
            joined = self._group.join_up(self._store, request.run_id)
            return joined, request_for_adopted(request, self._group.plan)
        if not self._where.starts_workers:
            request = request_for_adopted(request)
            return InProcessRank(request, self._work), request
        return Connections(self._where.transports, request, stale_run_ids=self._manifest.stale_ids), request

    def _coordinator(self, request: RunRequest, ranks: Ranks, observers: Observers) -> Coordinator:
        return Coordinator(
            request,
            self._store,
            ranks,
            self._config.checkpoint_config,
            observers,
            log_dir=self._log_dir,
            manifest=self._manifest,
            start_without_own=self._start_without_own,
            shipping=self._where.shipping.for_run(self._store, request.run_id),
        )

    # -- the end --------------------------------------------------------------------------------------------------

    def _conclude(self, coordinator: Coordinator, status: RunStatus) -> tuple[Result, BaseException | None]:
        """Make the Result, and the exception to raise if the run did not finish."""
        value = coordinator.end.value
        if value is not None:
            self._write_at_end(
                lambda: write_atomically(self._store.paths.return_value, value),
                "the return value of train_func is only in this Result, because it could not be written",
            )
        result = make_result(
            self._store.location,
            self._store.committed,
            self._config.checkpoint_config,
            metrics=self._earlier_metrics() if coordinator.metrics is None else coordinator.metrics,
            return_value=None if value is None else job.unpickle_return_value(value),
        )
        if coordinator.end.state is RunState.FINISHED:
            return result, None
        error = self._run_errors(coordinator, status).error()
        if isinstance(error, TrainingFailedError):
            error.result = result
            failed = error
            self._write_at_end(lambda: self._write_error(failed), "the error of the run could not be written")
        return result, error

    def _earlier_metrics(self) -> dict[str, Any] | None:
        return last_metrics(self._store.paths.metrics) if self._continued else None

    def _write_error(self, error: TrainingFailedError) -> None:
        text: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
        if isinstance(error, WorkerGroupError):
            text |= {
                "culprit": error.culprit,
                "failures": [
                    {**failure.as_json(), "last_lines": error.last_lines.get(failure.rank, [])}
                    for failure in error.failures
                ],
                "stopped": error.stopped,
                "where": error.where,
            }
        write_atomically(self._store.paths.error_text, json.dumps(text, indent=1).encode())
        if (blob := pickle_or_none(error)) is not None:
            write_atomically(self._store.paths.error_pickle, blob)

    def _run_errors(self, coordinator: Coordinator, status: RunStatus) -> RunErrors:
        end = coordinator.end
        name, logs, latest = self._store.location.name, None, self._store.latest
        if self._where.starts_workers and end.attempt >= self._manifest.first_attempt:
            logs = self._store.display_path(self._store.paths.log(end.attempt, 0, self._log_dir).parent)
        return RunErrors(
            summary=end,
            run=str(self._store.location),
            name=name,
            is_script=self._request.is_script,
            step="{:,} of {:,}".format(*status.progress) if status.progress else None,
            checkpoint=f"{latest.path.name}, at step {latest.step:,}" if latest else None,
            logs=logs,
            page=str(self._store.paths.page) if self._storage_works(end) and not self._store.is_remote else None,
            last_lines=coordinator.last_lines(),
            where=coordinator.where(),
        )


def _plain_run_config(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a RunConfig that run.json has nowhere else."""
    kept = ("storage_path", "log_dir", "stop_grace_s", "logging_config", "shipping_config")
    settings: dict[str, Any] = plain({name: getattr(config, name) for name in kept})
    log_dir = None if config.log_dir is None else str(_absolute(config.log_dir))
    return {**settings, "log_dir": log_dir}
