"""fit(): config in, Result out. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from distrain.backend import BackendConfig
from distrain.checkpoint import Checkpoint
from distrain.config import RunConfig, RunContext, ScalingConfig, ValidationConfig, ValidationTaskConfig
from distrain.coordinator.callbacks import Callbacks
from distrain.coordinator.coordinator import Coordinator
from distrain.coordinator.manifest import RunManifest
from distrain.coordinator.preemption import exit_code, preempted, refuse_after_stop
from distrain.coordinator.transport import (
    LocalTransport,
    Transport,
    hosts_of,
    order_for,
    overruled,
    ssh_args_of,
    transports_for,
)
from distrain.decisions import failures
from distrain.decisions.events import HangDetected, RunRequest, RunSummary, Validator
from distrain.decisions.placement import shares_of, workers_on
from distrain.decisions.states import RunState
from distrain.errors import (
    CheckpointError,
    ControllerError,
    DistrainError,
    HangError,
    LaunchError,
    ResourcesError,
    StandInError,
    StorageError,
    TrainingFailedError,
    WorkerGroupError,
)
from distrain.hosts.host import hidden_gpus_problem
from distrain.inprocess import runner as local
from distrain.inprocess.torchrun import torchrun_rank
from distrain.result import Result, make_result, pickle_or_none
from distrain.storage.files import full_disk_hint, is_full_disk, write_atomically
from distrain.storage.paths import read_manifest
from distrain.storage.records import damage_of, last_metrics
from distrain.storage.remote_store import open_run
from distrain.system.consoles import unblocked_consoles
from distrain.system.log import log_level, say, warn, without_controls
from distrain.system.ray_names import explaining, without
from distrain.system.remote_path import locate
from distrain.work import job

if TYPE_CHECKING:
    from distrain.hosts.host import HostSettings
    from distrain.hosts.hostfile import HostSpec
    from distrain.storage.run_store import RunStore
    from distrain.system.remote_path import RemotePath

__all__ = ["DataParallelTrainer", "run_work"]


_FULL_DISK_WAIT_S = 5.0
"""How long the end of a run waits for somebody to free space."""
_FULL_DISK_PAUSE_S = 0.5


@explaining("Trainer")
@without("dataset_config", "datasets", "preprocessor")
class DataParallelTrainer:
    """Run a training function on a group of workers.

    train_loop_per_worker: function with no argument or one, the config. It runs in the main thread of every worker.
    train_loop_config: handed to it, ``{}`` by default; it is pickled once per run, so keep large objects out of it.
    backend_config: the framework's settings and hooks.
    resume_from_checkpoint: where a *new* run starts from, a checkpoint or the path of one; a run that goes on prefers
        its own latest checkpoint.
    validation_config: what ``report(validation=...)`` does with a checkpoint.
    metadata: JSON that ``get_context().get_metadata()`` returns, and that every checkpoint of the run gets.

    Raises TypeError or ValueError for bad arguments.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        backend_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        resume_from_checkpoint: Checkpoint | str | Path | None = None,
        metadata: Mapping[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        self._work = job.FunctionWork(
            function=job.check_signature(train_loop_per_worker),
            config=dict(_instance("train_loop_config", train_loop_config, Mapping, {})),
            backend=_instance("backend_config", backend_config, BackendConfig, BackendConfig()),
        )
        self._scaling = _instance("scaling_config", scaling_config, ScalingConfig, ScalingConfig())
        self._run = _instance("run_config", run_config, RunConfig, RunConfig())
        if isinstance(resume_from_checkpoint, (str, Path)):
            resume_from_checkpoint = Checkpoint(resume_from_checkpoint)
        self._resume_from = _instance("resume_from_checkpoint", resume_from_checkpoint, Checkpoint, None)
        self._validation: ValidationConfig | None = _instance(
            "validation_config", validation_config, ValidationConfig, None
        )
        if self._validation is not None:
            job.check_plain("ValidationConfig.fn", self._validation.fn)
        self._metadata = _json("metadata", _instance("metadata", metadata, Mapping, {}))

    @classmethod
    def restore(cls, path: str | os.PathLike[str], *args: Any, **options: Any) -> NoReturn:
        """Ray AIR's way to continue a run. Raises TypeError that names the one here."""
        raise TypeError(
            f"{cls.__name__}.restore() is not needed: make the trainer as before, with "
            f"RunConfig(name={os.path.basename(os.path.normpath(path))!r}, storage_path=...); an unfinished run of "
            "that name goes on at its last checkpoint"
        )

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str]) -> bool:
        """Whether ``fit()`` under that name would continue a run."""
        manifest = read_manifest(locate(path))
        return bool(manifest) and manifest.get("status") != "finished"

    def fit(self) -> Result:
        """Train, and wait for the end.

        Raises TrainingFailedError, with the partial ``result``, if a rank or a host failed; JobError, ResourcesError or
        StorageError before anything starts; KeyboardInterrupt after Ctrl-C, once every worker is gone; PreemptionError
        after SIGTERM, SIGHUP or SIGQUIT, and from then on at every further call in this process. Their tracebacks end
        here: what ranks raised is in ``WorkerGroupError.worker_failures``.
        """
        __tracebackhide__ = True  # pytest leaves out a frame with this name
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
            raise error.with_traceback(None) from None


def _instance(name: str, value: Any, kind: type, default: Any) -> Any:
    if value is None:
        return default
    if not isinstance(value, kind):
        wanted = "dict" if kind is Mapping else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
        raise TypeError(f"{name} must be a {wanted}, got {value!r:.80} ({type(value).__name__})")
    return value


def _check_intact(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a checkpoint that is not there, or is damaged."""
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
    except (StorageError, AttributeError):  # somebody's own file of that name
        return False


def _json(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be JSON, as checkpoints carry it in a file: {error}") from None
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
    on_command_line: bool = False,
) -> Result:
    """What fit() and the command line have in common; see :meth:`DataParallelTrainer.fit`."""
    refuse_after_stop()
    local.check_launcher(scaling.max_workers, work.backend)
    asked = _Asked(
        work=work,
        job=job.make_job(work) if scaling.num_workers else job.Job(blob=b""),
        scaling=scaling,
        run=run,
        resume_from=resume_from,
        metadata=metadata or {},
        validation=validation,
        transports=transports or _transports(scaling, run.failure_config.host_lease_s),
        sys_path=_clean_path(sys.path if sys_path is None else sys_path),
        on_command_line=on_command_line,
    )
    if scaling.use_gpu:
        for name, order in asked.orders().items():
            if problem := hidden_gpus_problem(order):
                raise LaunchError(f"{name}: {problem}")
    with log_level(run.log_level):
        if asked.job.warning is not None:
            warn(asked.job.warning)
        if scaling.num_workers == 0 and torchrun_rank():
            return local.follow(asked.request(uuid.uuid4().hex), work, run.checkpoint_config)
        _check_log_dir(run.log_dir)
        store = open_run(run.storage_path, run.name, run.storage_filesystem)
        try:
            with unblocked_consoles() if scaling.num_workers else contextlib.nullcontext():
                return _Run(store, asked).train()
        finally:
            store.close()


def _check_log_dir(log_dir: str | os.PathLike[str] | None) -> None:
    """Raise StorageError if nothing can be written there, before anything starts."""
    if log_dir is None:
        return
    folder = _absolute(log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"distrain")
    except OSError as error:
        raise StorageError(
            f"cannot write logs in {folder}: {error}; name another directory with RunConfig(log_dir=...) or --log-dir"
        ) from error


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


def _transports(scaling: ScalingConfig, lease_s: float) -> list[Transport]:
    """To all hosts, those included that get ranks only if others are lost. Raises HostfileError, and ResourcesError if
    there are too few slots.
    """
    if options := overruled(scaling, os.environ):
        warn(f"{', '.join(options)}: without effect, as the script's ScalingConfig says otherwise")
    if scaling.num_workers == 0:
        return [LocalTransport()]
    hosts = hosts_of(scaling, os.environ)
    _shares(hosts, scaling)
    return transports_for(hosts, ssh_args_of(scaling, os.environ), lease_s)


def _shares(hosts: Iterable[HostSpec], scaling: ScalingConfig) -> dict[str, int]:
    """How many workers each host gets, as long as none is lost. Raises ResourcesError."""
    slots = {host.name: host.slots for host in hosts}
    return shares_of(slots, workers_on(slots, scaling))


def _clean_path(path: Sequence[object]) -> list[str]:
    """sys.path as text: notebooks put Path objects there."""
    return [os.fspath(entry) for entry in path if isinstance(entry, (str, os.PathLike))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """All that the user has asked for."""

    work: job.Work
    job: job.Job
    scaling: ScalingConfig
    run: RunConfig
    resume_from: Checkpoint | None
    metadata: Mapping[str, Any]
    validation: ValidationConfig | None
    transports: Sequence[Transport]
    sys_path: list[str]
    on_command_line: bool
    """The user gave options of the command line, not configs."""

    def _validator(self) -> Validator | None:
        """Raises JobError if the function cannot be pickled."""
        if self.validation is None:
            return None
        task = self.validation.task_config or ValidationTaskConfig()
        function, config = self.validation.fn, dict(task.fn_kwargs or {})
        work = job.FunctionWork(function=function, config=config, validates=True, backend=BackendConfig())
        return Validator(
            blob=job.make_job(work).blob,
            timeout_s=task.timeout_s,
            directory=os.getcwd(),
            sys_path=self.sys_path,
            environment=self.run.env_vars,
        )

    def orders(self) -> dict[str, HostSettings]:
        """Return the orders for each host, by its name."""
        return {
            transport.host.name: order_for(
                transport,
                directory=os.getcwd(),
                sys_path=self.sys_path,
                environment=self.run.env_vars,
                own_environment=os.environ,
            )
            for transport in self.transports
        }

    def request(
        self, run_id: str, store: RunStore | None = None, *, checkpoint: str | None = None, first_attempt: int = 0
    ) -> RunRequest:
        """The same for the machine; ``store``: the run directory, if it is known in this process."""
        return RunRequest(
            run_id=run_id,
            run_name=store.location.name if store else "",
            storage_path=store.storage_path if store else "",
            filesystem=store.filesystem if store else "",
            job=self.job,
            backend=self.work.backend,
            scaling=self.scaling,
            hosts=self.orders(),
            failure_config=self.run.failure_config,
            stop_grace_s=self.run.stop_grace_s,
            argv=sys.argv,
            python_flags=subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            first_attempt=first_attempt,
            checkpoint=checkpoint,
            metadata=self.metadata,
            validator=self._validator(),
        )


class _Run:
    """One run in its directory: manifest, coordinator, and the Result of it."""

    def __init__(self, store: RunStore, asked: _Asked) -> None:
        self._store = store
        self._asked = asked
        self._config = asked.run
        self._run_id = uuid.uuid4().hex
        configs = {
            "scaling_config": asdict(asked.scaling),
            "checkpoint_config": asdict(asked.run.checkpoint_config),
            "failure_config": asdict(asked.run.failure_config),
        }
        self._manifest = RunManifest(store, run_id=self._run_id, configs=configs)
        self._continued = bool(self._manifest.before)
        self._write_until: float | None = None
        self._log_dir = None if asked.run.log_dir is None else _absolute(asked.run.log_dir)
        context = RunContext(
            run_id=self._run_id,
            run_config=asked.run,
            scaling_config=asked.scaling,
            backend_config=asked.work.backend,
            train_loop_config=getattr(asked.work, "config", {}),
        )
        self._callbacks = Callbacks(asked.run.callbacks or (), context, complain=warn)

    def train(self) -> Result:
        request = self._asked.request(
            self._run_id,
            self._store,
            checkpoint=self._start_from(self._asked.resume_from),
            first_attempt=self._manifest.first_attempt,
        )
        self._announce()
        self._store.metadata = dict(self._asked.metadata)
        try:
            self._manifest.write("running")
            if self._continued:
                self._store.delete_end_files()
        except OSError as error:
            raise StorageError(
                f"cannot use the run directory {self._store.location}: {error}{full_disk_hint(str(error))}"
            ) from error
        started, concluded = time.monotonic(), False
        runner = self._runner(request)
        try:
            self._callbacks.before_run()
            runner.run()
            self._write_at_end(self._store.write_last_metrics, "the last reports could not be written")
            result, failure = self._conclude(runner.end, time.monotonic() - started)
            concluded = True
        finally:
            # Last of all: who finds a finished run, finds everything of it.
            end = runner.end
            ended = end.state.is_terminal and (concluded or end.state is not RunState.FINISHED)
            status = end.state.value if ended else "failed"
            self._write_at_end(
                lambda: self._manifest.write(status),
                "the run directory does not say how the run has ended, as that could not be written",
            )
        self._callbacks.after_run(result, failure)
        if failure is not None:
            raise failure
        return result

    def _write_at_end(self, write: Callable[[], None], complaint: str) -> None:
        """Write what the end of the run leaves. Wait a while for space on a full disk; then only complain, so as not to
        hide the error that has ended the run.
        """
        while not self._store.is_stalled:
            try:
                write()
                return
            except OSError as error:
                self._write_until = self._write_until or time.monotonic() + _FULL_DISK_WAIT_S
                if not is_full_disk(str(error)) or time.monotonic() > self._write_until:
                    warn(f"{complaint}: {error}")
                    return
                time.sleep(_FULL_DISK_PAUSE_S)

    def _start_from(self, resume_from: Checkpoint | None) -> str | None:
        if self._store.latest:
            return str(self._store.latest.path)
        if resume_from is None:
            return None
        _check_intact(resume_from)
        if resume_from.path and (resume_from.remote_path is None or resume_from.remote_path.given is None):
            return resume_from.path
        return resume_from.to_directory(self._store.paths.staging / "resume_from")

    def _announce(self) -> None:
        if self._continued:
            latest = self._store.latest
            say(
                f"continuing the unfinished run {self._store.location} "
                + (f"at {latest.path.name}" if latest else "from its beginning, as it has no checkpoint yet")
            )
        shares = _shares([transport.host for transport in self._asked.transports], self._asked.scaling)
        workers, hosts = sum(shares.values()), sum(map(bool, shares.values()))
        what = f"starting {workers} worker{'s' if workers > 1 else ''}" if workers else "training in this process"
        what += f" on {hosts} hosts" if hosts > 1 else ""
        say(f"{what}; run directory {self._store.location}")

    def _runner(self, request: RunRequest) -> Coordinator | local.InProcessRun:
        checkpoints, callbacks = self._config.checkpoint_config, self._callbacks
        if not self._asked.scaling.num_workers:
            return local.InProcessRun(
                request, self._asked.work, self._store, checkpoints, manifest=self._manifest, callbacks=callbacks
            )
        before = self._manifest.before
        return Coordinator(
            request,
            self._store,
            self._asked.transports,
            checkpoints,
            log_dir=self._log_dir,
            manifest=self._manifest,
            callbacks=callbacks,
            console_ranks=self._config.logging_config.ranks,
            stale_run_id=before.get("run_id") if before.get("status") == "running" else None,
        )

    # -- the end --------------------------------------------------------------------------------------------------

    def _conclude(self, end: RunSummary, seconds: float) -> tuple[Result, BaseException | None]:
        """Make the Result and, if the run did not finish, the exception to raise."""
        value = end.value
        if value is not None:
            self._write_at_end(
                lambda: write_atomically(self._store.paths.return_value, value),
                "what train_func returned is in this Result only, as it could not be written",
            )
        result = make_result(
            self._store.location,
            self._store.committed,
            self._config.checkpoint_config,
            metrics=self._earlier_metrics() if end.metrics is None else end.metrics,
            return_value=None if value is None else _return_value(value),
        )
        if end.state is RunState.FINISHED:
            say(f"finished in {seconds:.1f} s; results in {result.path}")
            return result, None
        error = self._error(end, result)
        if isinstance(error, TrainingFailedError):
            error.result = result
            failed = error
            self._write_at_end(lambda: self._keep_error(failed), "why the run failed could not be written")
        return result, error

    def _earlier_metrics(self) -> dict[str, Any] | None:
        return last_metrics(self._store.paths.metrics) if self._continued else None

    def _keep_error(self, error: TrainingFailedError) -> None:
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

    def _error(self, end: RunSummary, result: Result) -> BaseException:
        if end.stop_reason is not None:
            lines = self._stopped(end, end.stop_reason, result)
            if end.stop_reason != "SIGINT":
                return preempted("\n".join(lines), end.stop_reason)
            warn("\n    ".join(lines))
            return KeyboardInterrupt()
        if end.hung is not None and not end.failures:
            return self._hang_error(end, end.hung, result)
        is_explained = end.problem and all(failure.lost for failure in end.failures)
        is_explained = is_explained or (end.storage_failed and all(is_full_disk(f.summary) for f in end.failures))
        if end.failures and not is_explained:
            return self._worker_group_error(end, result)
        if end.storage_failed:
            return ControllerError(f"{end.problem}\nonce that is mended: {self._again(result)}\nrun:  {result.path}")
        if end.resources_missing:
            return ResourcesError(end.problem)
        lines = [end.problem or "", *self._postscript(end, result)]
        return ControllerError("\n".join(lines)) if end.entered else LaunchError("\n".join(lines))

    def _worker_group_error(self, end: RunSummary, result: Result) -> WorkerGroupError:
        found = failures.culprit_first(end.failures)
        screen = failures.failure_screen(
            found, stopped=end.stopped_ranks, finished=end.finished, where=end.where, last_lines=end.last_lines
        )
        return WorkerGroupError(
            without_controls("\n".join([screen, *_beside(end), *self._postscript(end, result)])),
            worker_failures={f.rank: end.errors.get(f.rank) or job.original(f) for f in found},
            culprit=found[0].rank,
            exit_code=found[0].exit_code,
            failures=found,
            stopped=end.stopped_ranks,
            where=end.where,
            last_lines={failure.rank: end.last_lines.get(failure.rank, ()) for failure in found},
        )

    def _hang_error(self, end: RunSummary, hung: HangDetected, result: Result) -> HangError:
        where = "they were:" if hung.where else "no rank had been started"
        lines = [f"no rank has reported or printed anything for {hung.after_s:g} s; {where}"]
        lines += [f"    {line}" for line in hung.where]
        hosts = {rank: end.hosts[rank] for rank in end.stopped_ranks}
        found = failures.hang_failures(hosts, hung.suspects, after_s=hung.after_s)
        return HangError(
            "\n".join([*lines, *self._postscript(end, result)]),
            worker_failures={failure.rank: StandInError(failure.summary) for failure in found},
            culprit=found[0].rank,
            failures=found,
            stopped=end.stopped_ranks,
            where=hung.where,
            last_lines=end.last_lines,
        )

    def _again(self, result: Result) -> str:
        latest = f"at {Path(result.checkpoint.path).name}" if result.checkpoint else "from the beginning"
        name = self._store.location.name
        named = f"with --name {shlex.quote(name)}" if self._asked.on_command_line else f"as RunConfig(name={name!r})"
        return f"started again {named}, it goes on {latest}"

    def _stopped(self, end: RunSummary, reason: str, result: Result) -> list[str]:
        lines = [f"the run was stopped by {reason}; {self._again(result)}"]
        asked = {exit_code("SIGTERM"), exit_code(reason)}
        own = [f for f in end.failures if not f.consequence and f.exit_code not in asked]
        if own:
            screen = failures.failure_screen(own, stopped=(), last_lines=end.last_lines)
            lines += ["meanwhile, there was a failure:", *(f"    {line}" for line in screen.splitlines())]
        if end.where:
            lines += ["ranks that did not stop in time were killed:", *(f"    {line}" for line in end.where)]
        return [*lines, *_beside(end), f"run:  {result.path}"]

    def _postscript(self, end: RunSummary, result: Result) -> list[str]:
        """What every account of a failure ends with."""
        lines = [*end.earlier, *([end.no_retry] if end.no_retry else [])]
        if self._asked.scaling.num_workers and end.attempt >= self._manifest.first_attempt:
            log = self._store.paths.log(end.attempt, 0, self._log_dir)
            lines.append(f"logs: {self._store.display_path(log.parent)}")
        if result.checkpoint:
            lines.append(self._again(result))
        return [*lines, f"run:  {result.path}"]


def _beside(end: RunSummary) -> list[str]:
    """What went wrong, too, for the account of a failure of ranks. Lost hosts are in it already."""
    if end.storage_failed:
        return [f"besides, the storage has failed: {end.problem}"]
    return [f"besides, {end.problem}"] if end.problem and not any(failure.lost for failure in end.failures) else []


def _return_value(blob: bytes) -> Any:
    """A training is not lost because its return value cannot be read here."""
    try:
        return job.unpickle_value(blob)
    except Exception as error:
        warn(f"the return value cannot be unpickled in this process ({error!r}); it is kept in return_value.pkl")
        return None
