"""Training without workers (``num_workers=0``): train_func runs in the user's process, where a debugger works.

Runs in: coordinator. Reports, checkpoints, retries and results are those of any run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.api.context import TrainContext
from distrain.api.observer import AttemptBegan, AttemptEnded
from distrain.coordinator.launched.local_channel import InProcessChannel
from distrain.coordinator.launched.rank_process import (
    current_session,
    environment,
    module_path,
    only_one,
    signals,
    stop_reason,
)
from distrain.coordinator.report_handler import ReportHandler
from distrain.coordinator.stop_signals import note_stop, stop_signals
from distrain.coordinator.validations import WAITING, Validations
from distrain.decisions.blame import RunSummary, failure_of
from distrain.decisions.placement import (
    Rendezvous,
    endpoints_of,
    make_plan,
    rendezvous_address,
    visible_devices,
    worker_spec,
)
from distrain.decisions.retries import RetryPolicy
from distrain.decisions.states import RunState
from distrain.errors import StorageError
from distrain.hosts.host_info import host_info
from distrain.hosts.ports import reserve_port
from distrain.system.background import Background
from distrain.system.log import say, warn
from distrain.worker.session import Session
from distrain.worker.user_code import RankResult, run_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distrain.api.config import CheckpointConfig
    from distrain.coordinator.manifest import RunManifest
    from distrain.coordinator.observers import Observers
    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.events import RunRequest
    from distrain.hosts.world import WorldPlan
    from distrain.worker.job.job import Work


class InProcessRun:
    """One run in this process. After :meth:`run`, ``end`` is its summary."""

    def __init__(
        self,
        request: RunRequest,
        work: Work,
        store: RunStore,
        checkpoint_config: CheckpointConfig,
        observers: Observers,
        *,
        manifest: RunManifest,
    ) -> None:
        self.end = RunSummary(state=RunState.CONNECTING, attempt=request.first_attempt - 1)
        self._request = request
        self._work = work
        self._store = store
        self._manifest = manifest
        self._checkpoint = request.checkpoint
        self._retries = RetryPolicy(request.failure_config, request.checkpoint, is_script=request.is_script)
        self._storage_problem: str | None = None
        self._channel = InProcessChannel()
        self._validations = Validations(request, store)
        self._report_handler = ReportHandler(
            store,
            checkpoint_config,
            observers,
            send=self._channel.answer,
            upload=self._upload,
            on_commit=self._on_commit,
            validations=self._validations,
        )
        self._observers = observers
        self._channel.handle = self._handle
        self._channel.idle = self._idle

    @property
    def metrics(self) -> dict[str, Any] | None:
        """The metrics of the last report."""
        return self._report_handler.metrics

    def last_lines(self) -> dict[int, Sequence[str]]:
        """Return nothing: the output is on the user's console."""
        return {}

    def where(self) -> Sequence[str]:
        """Return nothing: distrain stops no rank."""
        return ()

    def run(self) -> None:
        """Train, with as many retries as the FailureConfig allows.

        Raises ResourcesError, and LaunchError if another thread trains in this process.
        """
        with only_one():
            self._run()

    def _run(self) -> None:
        self._store.on_failure = self._storage_failed
        inline = Background(None, "storage")
        self._store.start(None, inline, self._request.run_id, self._request.python_flags)
        self._validations.start(None)
        try:
            while not self._attempt(self.end.attempt + 1).is_terminal:
                failure, reports = self.end.failures[0], self._report_handler.report_counts.get(0, 0)
                if not self._retries.allow(failure, reports=reports, checkpoint=self._checkpoint):
                    self.end = replace(self.end, state=RunState.FAILED, no_retry=self._retries.refusal)
                    return
                warn(f"{failure.summary}; {self._retries} in this process")
                time.sleep(self._retries.delay_s())
        finally:
            self._close()

    def _close(self) -> None:
        if self.end.state is RunState.FINISHED:
            try:
                if self._validations.busy:
                    say(WAITING)
                while self._validations.busy:
                    self._validations.pump(1.0)
            except KeyboardInterrupt:
                self._validations.give_up("SIGINT has ended the wait for it")
        self._validations.abort()
        try:
            self._store.wait_until_idle()
            self._report_handler.close()
        except StorageError:  # noted by _storage_failed()
            self.end = replace(
                self.end, state=RunState.FAILED, failures=(), problem=self._storage_problem, storage_failed=True
            )

    def _attempt(self, attempt: int) -> RunState:
        self._observers.tell(AttemptBegan(attempt, ["localhost"], time.monotonic()))
        self._report_handler.begin(attempt, 1)
        with _rank(self._request, attempt) as (context, plan):
            self._manifest.attempt_begins(attempt, plan)
            self._manifest.attempt_trains()
            self._retries.ever_entered = True
            checkpoint = context.get_storage().checkpoint(self._checkpoint) if self._checkpoint else None
            executed = self._train(Session(self._channel, context, checkpoint))
        outcome, error = executed.outcome, executed.error
        with contextlib.suppress(StorageError):  # noted by _storage_failed()
            self._report_handler.handle(outcome)
            self._report_handler.end()
        failure = failure_of(0, "localhost", 1, outcome=outcome, exited=None)
        told = [failure] if failure is not None and error is not None and not stop_reason(error) else []
        self._observers.tell(AttemptEnded(attempt, told, None, lambda: {0: error} if error is not None else {}))
        stopped = stop_reason(error) or (self._channel.stop_reason if outcome.stopped else None)
        why = self._storage_problem or (f"stopped by {stopped}" if stopped else None)
        self._manifest.attempt_ended([failure] if failure else [], why)
        self.end = RunSummary(
            state=self._state(outcome, error),
            attempt=attempt,
            value=outcome.body if outcome.ok else None,
            failures=[failure] if failure and not self._storage_problem else [],
            errors={} if error is None else {0: error},
            stop_reason=stopped,
            problem=self._storage_problem,
            storage_failed=self._storage_problem is not None,
            entered=True,
        )
        return self.end.state

    def _train(self, session: Session) -> RankResult:
        work = self._work.fresh()
        with current_session(session), signals(stop_signals(self._request.stop_signals), self._takes_signal):
            executed = run_rank(lambda: work, session, self._channel)
            if executed.outcome.stage == "run":  # else the backend was not set up
                with contextlib.suppress(Exception):
                    work.backend.teardown(session.context)
        return executed

    def _takes_signal(self, number: int) -> bool:
        """Let the first signal make should_stop() true if train_func calls it."""
        note_stop(number)
        channel = self._channel
        if not channel.uses_should_stop or channel.stop_reason is not None:
            return False
        channel.stop_reason = signal.Signals(number).name
        channel.answer(wire.StopDecision(attempt=self.end.attempt + 1, rank=0))
        return True

    def _state(self, outcome: wire.Outcome, error: BaseException | None) -> RunState:
        if self._storage_problem:  # also if train_func has caught the exception
            return RunState.FAILED
        if outcome.ok:
            return RunState.ABORTED if outcome.stopped else RunState.FINISHED
        return RunState.ABORTED if stop_reason(error) else RunState.STOPPING

    def _handle(self, message: wire.FromWorker) -> None:
        match message:
            case wire.StopVote(call=0):
                self._channel.uses_should_stop = True
            case wire.StopVote(attempt=attempt, rank=rank, call=call):
                self._channel.answer(wire.StopDecision(attempt=attempt, rank=rank, call=call, final=True))
            case _:
                if self._storage_problem:
                    raise StorageError(self._storage_problem)  # no checkpoint that train_func may wait for is committed
                self._report_handler.handle(message)
                self._report_handler.flush()
                self._store.wait_until_idle()
                self._validations.pump(0.0)

    def _idle(self, timeout_s: float) -> None:
        self._validations.pump(timeout_s)
        self._report_handler.tick()

    def _upload(self, order: wire.Upload) -> None:
        self._store.upload(order, self._on_uploaded)

    def _on_uploaded(self, done: wire.Message) -> None:
        assert isinstance(done, wire.FromWorker)
        self._report_handler.handle(done)

    def _on_commit(self, path: str | None) -> None:
        self._checkpoint = path

    def _storage_failed(self, why: str) -> None:
        """Note why the run fails, and make report() raise StorageError, which ends train_func."""
        self._storage_problem = self._storage_problem or why
        raise StorageError(why)


@contextlib.contextmanager
def _rank(request: RunRequest, attempt: int) -> Iterator[tuple[TrainContext, WorldPlan]]:
    """Make this process the only rank within the block."""
    facts = replace(host_info(with_gpus=request.scaling.use_gpu), name="localhost")
    plan = make_plan([facts], request.scaling, num_workers=1)
    [settings] = request.hosts.values()
    [rank] = plan.ranks
    with contextlib.ExitStack() as stack:
        address = rendezvous_address(plan)
        reserved = [stack.enter_context(reserve_port()) for _ in range(1 + request.backend.has_endpoints)]
        ports = [port.getsockname()[1] for port in reserved]
        endpoints = endpoints_of(plan, {facts.name: address}, {facts.name: ports[1:]})
        rendezvous = Rendezvous(address=address, port=ports[0], endpoints=endpoints)
        spec = worker_spec(request, plan, rank, attempt=attempt, checkpoint=None, rendezvous=rendezvous)
        defaults = {name: os.environ.get(name, value) for name, value in spec.defaults.items()}
        loopback = {"MASTER_ADDR": address, "MASTER_PORT": str(ports[0])}  # the user's own may be for other hosts
        own = {**defaults, **visible_devices(rank), **settings.environment, **spec.environment, **loopback}
        stack.enter_context(environment(own))
        stack.enter_context(module_path(settings.sys_path))
        yield TrainContext(**asdict(request.worker_facts(plan, rank, attempt))), plan
