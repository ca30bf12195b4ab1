"""One run in its directory: from its first line to its Result, or its error. Runs in: coordinator."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.api.config import RunConfig, RunContext, ScalingConfig
from distrain.api.observer import Ended, RunBegan
from distrain.api.result import Result, make_result, pickle_or_none
from distrain.coordinator.connection.connections import Connections
from distrain.coordinator.coordinator import Coordinator
from distrain.coordinator.engine import Engine
from distrain.coordinator.observers import Observers, import_observers, observers_of
from distrain.coordinator.ranks.adopted import request_for_adopted
from distrain.coordinator.ranks.in_process import InProcessRank
from distrain.coordinator.run.errors import RunErrors, exit_code_of
from distrain.coordinator.run.facts import RunFacts, plain
from distrain.coordinator.store.event_log import EventLog
from distrain.coordinator.store.manifest import RunManifest
from distrain.decisions.placement import shares_of, workers_on
from distrain.decisions.run.machine import RunStateMachine
from distrain.decisions.run.retries import start_without_checkpoint
from distrain.decisions.run_status import RunStatus
from distrain.decisions.states import RunState
from distrain.errors import CheckpointError, StorageError, TrainingFailedError, WorkerGroupError
from distrain.storage.checkpoint import absence_of
from distrain.storage.files import write_atomically
from distrain.storage.lines import last_record
from distrain.storage.ownership import check_owners
from distrain.storage.records import damage_of
from distrain.system.log import say, warn
from distrain.system.text import advice_on, stopped_by, without_errno
from distrain.worker.job import job
from distrain.worker.job.origin import script_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from distrain.coordinator.connection.transport import Transport
    from distrain.coordinator.host_files import Shipping
    from distrain.coordinator.ranks.joined import RankGroup
    from distrain.coordinator.ranks.port import Ranks
    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.events import RunRequest
    from distrain.hosts.hostfile import HostSpec
    from distrain.storage.checkpoint import Checkpoint


@dataclass(eq=False)
class Run:
    """One run in its directory. It writes the manifest, runs the coordinator, and makes the Result.

    group: the ranks that another launcher has started, if it did.
    """

    store: RunStore
    request: RunRequest
    config: RunConfig
    work: job.Work
    transports: Sequence[Transport]
    shipping: Shipping
    group: RankGroup | None = None

    def __post_init__(self) -> None:
        configs = {
            "scaling_config": plain(asdict(self.request.scaling)),
            "checkpoint_config": plain(asdict(self.config.checkpoint_config)),
            "failure_config": plain(asdict(self.config.failure_config)),
            "run_config": _plain_run_config(self.config),
        }
        given = getattr(self.work, "config", {})
        self._facts = RunFacts(script_of(self.work), given, getattr(self.work, "argv", ()))
        self._manifest = RunManifest(self.store, run_id=self.request.run_id, configs=configs, known=self._facts.known)
        self._continued = bool(self._manifest.before)
        if self.config.log_dir is not None:
            self.store.paths = replace(self.store.paths, log_dir=absolute(self.config.log_dir))
            check_owners(self.store.paths.logs)
        self._context = RunContext(
            run_id=self.request.run_id,
            run_config=self.config,
            scaling_config=self.request.scaling,
            backend_config=self.request.backend,
            train_loop_config=given,
        )

    @property
    def _starts_workers(self) -> bool:
        """False if train_func runs in this process."""
        return self.group is None and self.request.scaling.num_workers != 0

    def train(self) -> Result:
        """Train and return the result, or raise the error of the run."""
        latest = self.store.ledger.latest
        checkpoint = str(latest.path) if latest else self._start_without_own()
        skips = {str(saved.path): saved.skip_to for saved in self.store.ledger.all if saved.skip_to}
        request = self.request = replace(
            self.request,
            run_name=self.store.location.name,
            storage_path=str(self.store.location.parent),
            filesystem=self.store.filesystem,
            checkpoint=checkpoint,
            skips=skips if latest else {checkpoint or "": self._manifest.skip_to},
            first_attempt=self._manifest.first_attempt,
        )
        import_observers()  # now, as Ctrl-C is not handled well between the next line and the start of the loop
        self._announce()
        self.store.metadata = dict(self.request.metadata)
        self._write_start()
        self._facts.begin()
        if self._continued and (lines := self._facts.note_changes(self._manifest.before, self._manifest.first_attempt)):
            text = "changed since the last start (use another RunConfig.name to start from scratch):"
            say("\n    ".join([text, *lines]))
        observers = self._observers()
        engine: Engine | None = None
        result: Result | None = None
        try:
            observers.tell(self._begun)
            ranks, request = self._ranks(request)
            engine = Engine(
                request,
                self.store,
                ranks,
                self.config.checkpoint_config,
                observers,
                self._status,
                manifest=self._manifest,
                start_without_own=self._start_without_own,
                shipping=self.shipping.for_run(self.store, request.run_id),
            )
            ranks.drive(Coordinator(engine).run)
            result, failure = self._conclude(engine)
        except BaseException as error:
            failure = error
        self._end(engine, observers, result, failure)
        if failure is not None:
            raise failure
        assert result is not None
        return result

    def _observers(self) -> Observers:
        location, name = str(self.store.location), self.store.location.name
        in_process = not self._starts_workers
        self._begun = RunBegan(self.request.run_id, name, location, self.store.paths.root, in_process)
        self._status = RunStatus(location, time.monotonic(), self.request.stop_grace_s)
        return Observers([self._status, EventLog(self.store), *observers_of(self._context, self._begun, self._status)])

    def _end(
        self,
        engine: Engine | None,
        observers: Observers,
        result: Result | None,
        error: BaseException | None,
    ) -> None:
        """Note in run.json how the run has ended, and tell the observers. All other files of the run are there."""
        end = RunStateMachine(self.request) if engine is None else engine.machine
        is_over = end.state.is_terminal and (result is not None or end.state is not RunState.FINISHED)
        reason = None if end.state is RunState.FINISHED else end.stopping.reason
        status = "failed" if not is_over else "stopped" if reason else end.state.value  # as its error says
        seconds = time.monotonic() - self._status.started
        advice = None
        if engine is not None and reason == "SIGINT":
            advice = self._run_errors(engine).how_to_continue
        try:
            self._facts.end()
            self._manifest.exit_code = exit_code_of(error)
            self._write_at_end(
                lambda: self._manifest.write(status),
                "the run directory does not say how the run ended, because that could not be written",
            )
            lines = partial(self.store.directory.append_lines, b"", b"")  # those that a full disk did not take
            self._write_at_end(lines, "the last reports could not be written")
        finally:  # Ctrl-C may come meanwhile
            observers.end(
                Ended(
                    status=status,
                    how=f"stopped by {stopped_by(reason)}" if reason else status,
                    seconds=seconds,
                    result=result,
                    error=error,
                    checkpoints=list(self.store.ledger.all),
                    advice=advice,
                    storage_works=self._storage_works(end),
                )
            )

    def _storage_works(self, end: RunStateMachine) -> bool:
        return not (end.storage_failed or self.store.is_stalled)

    def _write_start(self) -> None:
        try:
            self._manifest.write("running")
            if self._continued:
                self.store.delete_end_files()
        except OSError as error:
            raise StorageError(
                f"cannot use the run directory {self.store.location}: {without_errno(error)}{advice_on(str(error))}"
            ) from error

    def _write_at_end(self, write: Callable[[], None], complaint: str) -> None:
        """Write a file at the end of the run. If that fails, only warn: the error that has ended the run is raised."""
        if self.store.is_stalled:
            return
        try:
            self.store.directory.clear()
            write()
        except OSError as error:
            warn(f"{complaint}: {error}")

    def _start_without_own(self) -> str | None:
        """Return the checkpoint to start from if the run has none itself. Raise CheckpointError if it is damaged."""
        resume_from = self.request.resume_from
        if resume_from is None:
            return None
        _check_intact(resume_from)
        if resume_from.path and (resume_from.remote_path is None or resume_from.remote_path.given is None):
            return resume_from.path
        return resume_from.to_directory(self.store.paths.staging / "resume_from")

    def _announce(self) -> None:
        wanted, name = self.config.name, self.store.location.name
        if wanted and wanted != name:
            say(f"run {wanted!r} is finished, so this one is called {name}")
        if self._continued:
            latest = self.store.ledger.latest
            fresh = start_without_checkpoint(is_script=self.request.is_script)
            start = f"at {latest.path.name}" if latest else f"from {fresh}"
            say(f"continuing the unfinished run {self.store.location} {start}")
        say(f"{self._headline()}; run directory {self.store.location}")

    def _headline(self) -> str:
        """Return what begins now."""
        if self.group is not None:
            launcher = self.group.launcher
            return f"training in the {launcher.world_size} processes that {launcher.name} has started"
        shares = workers_by_host([transport.host for transport in self.transports], self.request.scaling)
        workers, hosts = sum(shares.values()), sum(map(bool, shares.values()))
        what = f"starting {workers} worker{'s' if workers > 1 else ''}" if workers else "training in this process"
        return what + (f" on {hosts} hosts" if hosts > 1 else "")

    def _ranks(self, request: RunRequest) -> tuple[Ranks, RunRequest]:
        """Return where the ranks live, and what is asked of them. Ranks of another launcher meet here."""
        if self.group is not None:
            joined = self.group.join_up(self.store, request.run_id)
            return joined, request_for_adopted(request, self.group.plan)
        if not self._starts_workers:
            request = request_for_adopted(request)
            return InProcessRank(request, self.work), request
        return Connections(self.transports, request, stale_id=self._manifest.stale_id), request

    # -- the end --------------------------------------------------------------------------------------------------

    def _conclude(self, engine: Engine) -> tuple[Result, BaseException | None]:
        """Make the Result, and the exception to raise if the run did not finish."""
        value = engine.machine.value
        if value is not None:
            self._write_at_end(
                lambda: write_atomically(self.store.paths.return_value, value),
                "the return value of train_func is only in this Result, because it could not be written",
            )
        last = engine.reports.last
        if last is None and self._continued:
            last = last_record(self.store.paths.metrics)
        result = make_result(
            self.store.location,
            self.store.ledger.all,
            self.config.checkpoint_config,
            last=last,
            return_value=None if value is None else job.unpickle_return_value(value),
        )
        if engine.machine.state is RunState.FINISHED:
            return result, None
        error = self._run_errors(engine).error()
        if isinstance(error, TrainingFailedError):
            error.result = result
            failed = error
            self._write_at_end(lambda: self._write_error(failed), "the error of the run could not be written")
        return result, error

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
        write_atomically(self.store.paths.error_text, json.dumps(text, indent=1).encode())
        if (blob := pickle_or_none(error)) is not None:
            write_atomically(self.store.paths.error_pickle, blob)

    def _run_errors(self, engine: Engine) -> RunErrors:
        end, evidence, progress, store = engine.machine, engine.evidence, self._status.progress, self.store
        latest, logs = store.ledger.latest, store.paths.log(end.attempt, 0).parent
        has_logs = self._starts_workers and end.attempt >= self._manifest.first_attempt
        has_page = self._storage_works(end) and not store.is_remote  # else it is not certain to be written
        facts = {
            "step": "{:,} of {:,}".format(*progress) if progress else None,
            "checkpoint": f"{latest.path.name}, at {latest.place}" if latest else None,
            "logs": store.display_path(logs) if has_logs else None,
            "evidence": None if evidence.is_empty else store.display_path(evidence.folder()),
            "page" if has_page else "run": str(store.paths.page if has_page else store.location),
        }
        return RunErrors(
            end=end,
            exceptions=engine.ranks.errors,
            name=store.location.name,
            is_script=self.request.is_script,
            facts=facts,
            last_lines=engine.outputs.last_words(),
            where=engine.hangs.locations(end.stopped_ranks),
            collectives=engine.hangs.collectives(),
            is_stuck=self._continued and engine.reports.last is None,
        )


def workers_by_host(hosts: Iterable[HostSpec], scaling: ScalingConfig) -> dict[str, int]:
    """Return how many workers each host gets while no host is lost. Raises ResourcesError."""
    slots = {host.name: host.slots for host in hosts}
    return shares_of(slots, workers_on(slots, scaling))


def _check_intact(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a checkpoint that does not exist or is damaged."""
    if not checkpoint.exists():
        raise CheckpointError(f"resume_from_checkpoint: {absence_of(checkpoint.path)}")
    if checkpoint.path and (Path(checkpoint.path) / "run.json").exists():
        raise CheckpointError(f"resume_from_checkpoint: {checkpoint.path} is a run; name a checkpoint in it")
    damage = None
    try:
        if checkpoint.path:
            damage = damage_of(checkpoint.remote_path or Path(checkpoint.path), needs_manifest=False)
    except OSError as error:
        damage = f"it cannot be read: {error}"
    if damage is not None:
        raise CheckpointError(f"resume_from_checkpoint: {checkpoint.path} is damaged: {damage}")


def _plain_run_config(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a RunConfig that run.json has nowhere else."""
    kept = ("storage_path", "log_dir", "stop_grace_s", "logging_config", "shipping_config")
    settings: dict[str, Any] = plain({name: getattr(config, name) for name in kept})
    log_dir = None if config.log_dir is None else str(absolute(config.log_dir))
    return {**settings, "log_dir": log_dir}


def absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()
