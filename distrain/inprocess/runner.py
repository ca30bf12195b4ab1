"""Training without workers (``num_workers=0``): train_func runs in the user's process, where a debugger works.

Runs in: coordinator. Reports, checkpoints, retries and results are those of any run. Under torchrun, whose processes
are the ranks then, rank 0 keeps the run directory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from textwrap import indent
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.backend import BackendConfig
from distrain.context import TrainContext
from distrain.coordinator.preemption import STOP_SIGNALS, note_stop
from distrain.coordinator.report_handler import ReportHandler
from distrain.coordinator.validations import WAITING, Validations
from distrain.decisions.events import RunSummary
from distrain.decisions.failures import failure_of
from distrain.decisions.placement import (
    RANK_DEFAULTS,
    endpoints_of,
    make_plan,
    rank_environment,
    rendezvous_address,
    rendezvous_network,
    visible_devices,
)
from distrain.decisions.retries import RetryPolicy
from distrain.decisions.states import RunState
from distrain.errors import LaunchError, StorageError, WorkerGroupError
from distrain.hosts.host_info import host_info
from distrain.hosts.ports import reserve_port
from distrain.inprocess.local_channel import InProcessChannel
from distrain.inprocess.torchrun import TorchrunChannel, TorchrunWork, torchrun_rank
from distrain.result import Result, make_result
from distrain.system.background import Background
from distrain.system.log import say, warn
from distrain.system.loop import handler_of
from distrain.worker.session import Session
from distrain.worker.user_code import Executed, Terminated, execute, terminate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from distrain.config import CheckpointConfig
    from distrain.coordinator.callbacks import Callbacks
    from distrain.coordinator.manifest import RunManifest
    from distrain.decisions.events import RunRequest
    from distrain.hosts.world import WorldPlan
    from distrain.storage.run_store import RunStore
    from distrain.work.job import Work

# -- who started this process ----------------------------------------------------------------------------------------


def check_launcher(num_workers: int, backend: BackendConfig) -> None:
    """Raises LaunchError where it is not clear which processes are to train, or where they cannot do it together."""
    if num_workers == 0:
        with _only_one():
            pass
    if num_workers == 0 and Session.current is not None:
        raise LaunchError(
            "fit() with num_workers=0 was called in a distrain worker, where it is not clear which ranks should train; "
            "call the function itself, or start the script with python or torchrun"
        )
    can_talk = type(backend).gather is not BackendConfig.gather
    if num_workers == 0 and torchrun_rank() is not None and os.environ["WORLD_SIZE"] != "1" and not can_talk:
        raise LaunchError(
            "under torchrun, num_workers=0 needs a trainer whose ranks can talk to each other, such as TorchTrainer"
        )
    if not num_workers:
        return
    session = Session.current
    ours = session is not None and session.runs_script
    if ours or ("TORCHELASTIC_RUN_ID" in os.environ and torchrun_rank() is not None):
        size = session.context.world_size if session is not None else int(os.environ["WORLD_SIZE"])
        if size != 1:
            launcher = "python -m distrain.launch" if ours else "torchrun"
            instead = (
                "the hosts, if any, named by DISTRAIN_HOSTFILE"
                if ours
                else "or let torchrun's processes be the workers: ScalingConfig(num_workers=0)"
            )
            raise LaunchError(
                f"fit() was called under {launcher}, in each of its {size} processes, and would start {num_workers} "
                f"worker(s) in each. Start the script with `python`, {instead}"
            )


_training_here = threading.RLock()


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Raise LaunchError if another thread trains in this process."""
    if not _training_here.acquire(blocking=False):
        raise LaunchError(
            "fit() with num_workers=0 was called while another thread trains in this process, which has only one "
            "environment; call one after the other, or let them start workers (num_workers=1)"
        )
    try:
        yield
    finally:
        _training_here.release()


# -- rank 0 ----------------------------------------------------------------------------------------------------------


class InProcessRun:
    """One run in this process. After :meth:`run`, ``end`` tells how it ended."""

    def __init__(
        self,
        request: RunRequest,
        work: Work,
        store: RunStore,
        checkpoint_config: CheckpointConfig,
        *,
        manifest: RunManifest,
        callbacks: Callbacks,
    ) -> None:
        self.end = RunSummary(state=RunState.CONNECTING, attempt=request.first_attempt - 1)
        self._request = request
        self._work = work
        self._store = store
        self._manifest = manifest
        self._checkpoint = request.checkpoint
        self._retries = RetryPolicy(request.failure_config, request.checkpoint)
        self._storage_problem: str | None = None
        self._outer = torchrun_rank() is not None
        self._desk = TorchrunChannel(work.backend) if self._outer else InProcessChannel()
        self._validations = Validations(request, store)
        self._ledger = ReportHandler(
            store,
            checkpoint_config,
            tell=self._desk.answer,
            upload=self._upload,
            saved=self._saved,
            callbacks=callbacks,
            validations=self._validations,
        )
        self._callbacks = callbacks
        self._desk.hear = self._keep
        self._desk.idle = self._validations.pump

    def run(self) -> None:
        """Train, with as many retries as the FailureConfig allows; under torchrun, restarts are its own. Raises
        ResourcesError, and LaunchError if another thread trains here.
        """
        with _only_one():
            self._run()

    def _run(self) -> None:
        self._store.on_failure = self._storage_failed
        inline = Background(None, "storage")
        self._store.start(None, inline, self._request.run_id, self._request.python_flags)
        self._validations.start(None)
        try:
            while not self._attempt(self.end.attempt + 1).is_terminal:
                failure, reports = self.end.failures[0], self._ledger.reports.get(0, 0)
                if self._outer or not self._retries.allow(failure, reports=reports, checkpoint=self._checkpoint):
                    self.end = replace(self.end, state=RunState.FAILED, no_retry=self._retries.refusal)
                    return
                warn(f"{failure.summary}; restart {self._retries.used} ({self._retries.budget}) in this process")
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
            self._ledger.close()
        except StorageError:  # noted by _storage_failed()
            self.end = replace(
                self.end, state=RunState.FAILED, failures=(), problem=self._storage_problem, storage_failed=True
            )

    def _attempt(self, attempt: int) -> RunState:
        self._ledger.begin(attempt, world_size=1)
        with _rank(self._request, attempt, outer=self._outer) as (context, plan):
            self._manifest.attempt_begins(attempt, plan)
            self._retries.ever_entered = True
            checkpoint = context.get_storage().checkpoint(self._checkpoint) if self._checkpoint else None
            session = Session(self._desk, context, checkpoint)
            executed = _train(session, self._shared(session), self._desk)
        outcome, error = executed.outcome, executed.error
        with contextlib.suppress(StorageError):  # noted by _storage_failed()
            self._ledger.handle(outcome)
            self._ledger.end()
        if error is not None and not _stop_reason(error):
            self._callbacks.after_exception(lambda: {0: error})
        failure = failure_of(0, "localhost", 1, outcome=outcome, exited=None)
        stopped = _stop_reason(error) or (self._desk.stop_asked if outcome.stopped else None)
        why = self._storage_problem or (f"stopped by {stopped}" if stopped else None)
        self._manifest.attempt_ended([failure] if failure else [], why)
        self.end = RunSummary(
            state=self._state(outcome, error),
            attempt=attempt,
            metrics=self._ledger.metrics,
            value=outcome.body if outcome.ok else None,
            failures=[failure] if failure and not self._storage_problem else [],
            errors={} if error is None else {0: error},
            stop_reason=stopped,
            problem=self._storage_problem,
            storage_failed=self._storage_problem is not None,
        )
        return self.end.state

    def _shared(self, session: Session) -> Work:
        work = self._work.fresh()
        if not self._outer:
            return work
        assert isinstance(self._desk, TorchrunChannel)
        return TorchrunWork(backend=work.backend, work=work, session=session, desk=self._desk, store=self._store)

    def _state(self, outcome: wire.Outcome, error: BaseException | None) -> RunState:
        if self._storage_problem:  # also if train_func caught the exception and went on
            return RunState.FAILED
        if outcome.ok:
            return RunState.ABORTED if outcome.stopped else RunState.FINISHED
        return RunState.ABORTED if _stop_reason(error) else RunState.STOPPING

    def _keep(self, message: wire.FromWorker) -> None:
        match message:
            case wire.UsesShouldStop():
                self._desk.listens = not self._outer  # torchrun's other ranks would not hear of it
            case wire.StopVote(attempt=attempt, rank=rank, call=call):
                self._desk.answer(wire.StopAtReport(attempt=attempt, rank=rank, call=call))
            case _:
                self._ledger.handle(message)
                self._ledger.flush()
                self._store.wait_until_idle()
                self._validations.pump(0.0)

    def _upload(self, order: wire.Upload | wire.Clear) -> None:
        self._store.upload(order, self._on_uploaded)

    def _on_uploaded(self, done: wire.Message) -> None:
        assert isinstance(done, wire.FromWorker)
        self._ledger.handle(done)

    def _saved(self, path: str) -> None:
        self._checkpoint = path

    def _storage_failed(self, why: str) -> None:
        """Ends train_func, which waits in report()."""
        self._storage_problem = self._storage_problem or why
        raise StorageError(why)


def _train(session: Session, work: Work, desk: InProcessChannel) -> Executed:
    with _current(session), _stop_signals(session, desk):
        executed = execute(lambda: work, session, desk)
        if executed.outcome.stage == "run":  # what was not set up is not ours to take down
            with contextlib.suppress(Exception):
                work.backend.teardown(session.context)
    return executed


def _stop_reason(error: BaseException | None) -> str | None:
    if isinstance(error, KeyboardInterrupt):
        return "SIGINT"
    return signal.Signals(error.number).name if isinstance(error, Terminated) else None


@contextlib.contextmanager
def _current(session: Session) -> Iterator[None]:
    Session.current = session
    try:
        yield
    finally:
        Session.current = None


@contextlib.contextmanager
def _stop_signals(session: Session, desk: InProcessChannel) -> Iterator[None]:
    """Handle the signals for which the user has no handlers: should_stop() becomes true if train_func calls it;
    otherwise, and the second time, they unwind train_func.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        note_stop(number)
        if desk.listens and desk.stop_asked is None:
            desk.stop_asked = signal.Signals(number).name
            context = session.context
            desk.answer(wire.AnnounceStop(attempt=context.attempt, rank=context.world_rank))
        else:
            (signal.default_int_handler if number == signal.SIGINT else terminate)(number, frame)

    usual: dict[int, Any] = {**dict.fromkeys(STOP_SIGNALS, signal.SIG_DFL), signal.SIGINT: signal.default_int_handler}
    is_main = threading.current_thread() is threading.main_thread()
    ours = {n: handler for n, handler in usual.items() if is_main and handler_of(n) is handler}
    for number in ours:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


# -- this process as a rank ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _rank(request: RunRequest, attempt: int, *, outer: bool) -> Iterator[tuple[TrainContext, WorldPlan]]:
    """The environment of a rank, for as long as it trains; ``outer``: torchrun has made it already."""
    workers = int(os.environ["LOCAL_WORLD_SIZE"]) if outer else 1
    facts = replace(host_info(with_gpus=request.scaling.use_gpu), name="localhost")
    plan = make_plan([facts], request.scaling, num_workers=workers)
    [here] = request.hosts.values()
    rank = plan.ranks[int(os.environ["LOCAL_RANK"]) if outer else 0]
    with contextlib.ExitStack() as stack:
        variables = {**visible_devices(rank), **here.environment}
        if not outer:
            address, network = rendezvous_address(plan), rendezvous_network(plan)
            keepers = [stack.enter_context(reserve_port()) for _ in range(1 + request.backend.has_endpoints)]
            ports = [keeper.getsockname()[1] for keeper in keepers]
            endpoints = endpoints_of(plan, {facts.name: address}, {facts.name: ports[1:]})
            defaults = {**network, **RANK_DEFAULTS, **request.backend.defaults}
            variables = {**{name: os.environ.get(name, value) for name, value in defaults.items()}, **variables}
            variables |= rank_environment(
                plan,
                rank,
                address=address,
                port=ports[0],
                run_id=request.run_id,
                attempt=attempt - request.first_attempt,
                max_restarts=max(request.failure_config.max_failures, 0),
            )
            variables |= request.backend.environment(plan, rank, endpoints)
        stack.enter_context(_environment(variables))
        stack.enter_context(_module_path(here.sys_path))
        context = TrainContext(
            world_rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            local_rank=rank.local_rank,
            local_world_size=rank.local_world_size,
            node_rank=int(os.environ.get("GROUP_RANK", "0")),
            run_name=request.run_name,
            storage_path=request.storage_path,
            filesystem=request.filesystem,
            validates=request.validator is not None,
            attempt=attempt,
            devices=rank.devices,
            shares_gpu=plan.shares_gpu,
            run_id=request.run_id,
            metadata=request.metadata,
            resources=request.scaling.worker_resources,
        )
        yield context, plan


@contextlib.contextmanager
def _module_path(path: Sequence[str | None]) -> Iterator[None]:
    """Where train_func's modules are found, as in a worker."""
    before = sys.path[:]
    sys.path[:] = filter(None, path)
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What train_func and libraries change in it goes, as it does with a worker."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


# -- the other ranks of torchrun -------------------------------------------------------------------------------------


def follow(request: RunRequest, work: Work, checkpoint_config: CheckpointConfig) -> Result:
    """Train as one of torchrun's ranks other than 0, whose reports are not kept. Raises WorkerGroupError from what
    train_func raises.
    """
    desk = TorchrunChannel(work.backend)
    with _only_one(), _rank(request, request.first_attempt, outer=True) as (context, _):
        session = Session(desk, context, None)
        shared = TorchrunWork(backend=work.backend, work=work.fresh(), session=session, desk=desk)
        executed = _train(session, shared, desk)
    if executed.error is not None:
        rank, outcome = context.world_rank, executed.outcome
        text = f"rank {rank}, started by torchrun: {outcome.error}\n{indent(outcome.traceback, '  ')}".rstrip()
        raise WorkerGroupError(text, worker_failures={rank: executed.error}, culprit=rank)
    run = session.context.get_storage().run
    return make_result(run, shared.kept, checkpoint_config, metrics=desk.metrics, return_value=executed.value)
