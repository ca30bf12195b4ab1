"""Training without workers (``num_workers=0``): train_func runs in the user's process, where a debugger works.

Runs in: coordinator. Reports, checkpoints, retries and results are those of any run. Under torchrun its processes are
the ranks, and rank 0 writes the run directory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from textwrap import indent
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.backend import BackendConfig
from distrain.context import TrainContext
from distrain.coordinator.report_handler import ReportHandler
from distrain.coordinator.stop_signals import STOP_SIGNALS, note_stop
from distrain.coordinator.validations import WAITING, Validations
from distrain.decisions.events import RunSummary
from distrain.decisions.failures import failure_of
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
from distrain.worker.user_code import RankResult, Terminated, run_rank, terminate

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

# -- the launcher of this process ------------------------------------------------------------------------------------


def check_launcher(num_workers: int, backend: BackendConfig) -> None:
    """Raise LaunchError if it is not clear which processes should train, or if they cannot train together."""
    if Session.current is not None and Session.current.runs_script:
        raise LaunchError(
            "this script was started by `python -m distrain.launch`, and calls fit(), which starts workers of its own. "
            "Run it with `python script.py`; if it does not name its hosts, set DISTRAIN_HOSTS=alpha:4,beta:4 or "
            "DISTRAIN_HOSTFILE=FILE"
        )
    if num_workers:
        _check_launcher_of_workers(num_workers)
    else:
        _check_launcher_in_process(backend)


def _check_launcher_in_process(backend: BackendConfig) -> None:
    with _only_one():
        pass
    if Session.current is not None:
        raise LaunchError(
            "fit() with num_workers=0 was called in a distrain worker, where it is not clear which ranks should train; "
            "call the function itself, or start the script with python or torchrun"
        )
    has_gather = type(backend).gather is not BackendConfig.gather
    if torchrun_rank() is not None and os.environ["WORLD_SIZE"] != "1" and not has_gather:
        raise LaunchError(
            "under torchrun, num_workers=0 needs a trainer whose ranks can talk to each other, such as TorchTrainer"
        )


def _check_launcher_of_workers(num_workers: int) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ and torchrun_rank() is not None and os.environ["WORLD_SIZE"] != "1":
        raise LaunchError(
            f"fit() was called under torchrun, in each of its {os.environ['WORLD_SIZE']} processes, and would start "
            f"{num_workers} worker(s) in each. Start the script with `python`, or let torchrun's processes be the "
            "workers: ScalingConfig(num_workers=0)"
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
    """One run in this process. After :meth:`run`, ``end`` is its summary."""

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
        self._by_torchrun = torchrun_rank() is not None
        self._channel = TorchrunChannel(work.backend) if self._by_torchrun else InProcessChannel()
        self._validations = Validations(request, store)
        self._report_handler = ReportHandler(
            store,
            checkpoint_config,
            send=self._channel.answer,
            upload=self._upload,
            on_commit=self._on_commit,
            callbacks=callbacks,
            validations=self._validations,
        )
        self._callbacks = callbacks
        self._channel.handle = self._handle
        self._channel.idle = self._validations.pump

    def run(self) -> None:
        """Train, with as many retries as the FailureConfig allows; under torchrun without retries.

        Raises ResourcesError, and LaunchError if another thread trains in this process.
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
                failure, reports = self.end.failures[0], self._report_handler.report_counts.get(0, 0)
                if self._by_torchrun or not self._retries.allow(failure, reports=reports, checkpoint=self._checkpoint):
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
            self._report_handler.close()
        except StorageError:  # noted by _storage_failed()
            self.end = replace(
                self.end, state=RunState.FAILED, failures=(), problem=self._storage_problem, storage_failed=True
            )

    def _attempt(self, attempt: int) -> RunState:
        self._report_handler.begin(attempt, world_size=1)
        with _rank(self._request, attempt, under_torchrun=self._by_torchrun) as (context, plan):
            self._manifest.attempt_begins(attempt, plan)
            self._retries.ever_entered = True
            checkpoint = context.get_storage().checkpoint(self._checkpoint) if self._checkpoint else None
            session = Session(self._channel, context, checkpoint)
            executed = _train(session, self._shared(session), self._channel)
        outcome, error = executed.outcome, executed.error
        with contextlib.suppress(StorageError):  # noted by _storage_failed()
            self._report_handler.handle(outcome)
            self._report_handler.end()
        if error is not None and not _stop_reason(error):
            self._callbacks.after_exception(lambda: {0: error})
        failure = failure_of(0, "localhost", 1, outcome=outcome, exited=None)
        stopped = _stop_reason(error) or (self._channel.stop_reason if outcome.stopped else None)
        why = self._storage_problem or (f"stopped by {stopped}" if stopped else None)
        self._manifest.attempt_ended([failure] if failure else [], why)
        self.end = RunSummary(
            state=self._state(outcome, error),
            attempt=attempt,
            metrics=self._report_handler.metrics,
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
        if not self._by_torchrun:
            return work
        assert isinstance(self._channel, TorchrunChannel)
        return TorchrunWork(backend=work.backend, work=work, session=session, channel=self._channel, store=self._store)

    def _state(self, outcome: wire.Outcome, error: BaseException | None) -> RunState:
        if self._storage_problem:  # also if train_func has caught the exception
            return RunState.FAILED
        if outcome.ok:
            return RunState.ABORTED if outcome.stopped else RunState.FINISHED
        return RunState.ABORTED if _stop_reason(error) else RunState.STOPPING

    def _handle(self, message: wire.FromWorker) -> None:
        match message:
            case wire.UsesShouldStop():
                self._channel.uses_should_stop = not self._by_torchrun  # torchrun's other ranks would not stop
            case wire.StopVote(attempt=attempt, rank=rank, call=call):
                self._channel.answer(wire.StopAtReport(attempt=attempt, rank=rank, call=call))
            case _:
                self._report_handler.handle(message)
                self._report_handler.flush()
                self._store.wait_until_idle()
                self._validations.pump(0.0)

    def _upload(self, order: wire.Upload) -> None:
        self._store.upload(order, self._on_uploaded)

    def _on_uploaded(self, done: wire.Message) -> None:
        assert isinstance(done, wire.FromWorker)
        self._report_handler.handle(done)

    def _on_commit(self, path: str) -> None:
        self._checkpoint = path

    def _storage_failed(self, why: str) -> None:
        """Note why the run fails, and make report() raise StorageError, which ends train_func."""
        self._storage_problem = self._storage_problem or why
        raise StorageError(why)


def _train(session: Session, work: Work, channel: InProcessChannel) -> RankResult:
    with _current(session), _stop_signals(session, channel):
        executed = run_rank(lambda: work, session, channel)
        if executed.outcome.stage == "run":  # else the backend was not set up
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
def _stop_signals(session: Session, channel: InProcessChannel) -> Iterator[None]:
    """Handle signals within the block, except those for which the user has a handler.

    The first signal makes should_stop() true if train_func calls it. Otherwise, and the second time, train_func is
    ended by an exception.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        note_stop(number)
        if channel.uses_should_stop and channel.stop_reason is None:
            channel.stop_reason = signal.Signals(number).name
            context = session.context
            channel.answer(wire.AnnounceStop(attempt=context.attempt, rank=context.world_rank))
        else:
            (signal.default_int_handler if number == signal.SIGINT else terminate)(number, frame)

    usual: dict[int, Any] = {**dict.fromkeys(STOP_SIGNALS, signal.SIG_DFL), signal.SIGINT: signal.default_int_handler}
    is_main = threading.current_thread() is threading.main_thread()
    replaced = {n: handler for n, handler in usual.items() if is_main and handler_of(n) is handler}
    for number in replaced:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


# -- this process as a rank ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _rank(request: RunRequest, attempt: int, *, under_torchrun: bool) -> Iterator[tuple[TrainContext, WorldPlan]]:
    """Make this process a rank within the block.

    under_torchrun: torchrun has set the environment variables of the rank already.
    """
    workers = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun else 1
    facts = replace(host_info(with_gpus=request.scaling.use_gpu), name="localhost")
    plan = make_plan([facts], request.scaling, num_workers=workers)
    [settings] = request.hosts.values()
    rank = plan.ranks[int(os.environ["LOCAL_RANK"]) if under_torchrun else 0]
    with contextlib.ExitStack() as stack:
        variables = {**visible_devices(rank), **settings.environment}
        if not under_torchrun:
            address = rendezvous_address(plan)
            reserved = [stack.enter_context(reserve_port()) for _ in range(1 + request.backend.has_endpoints)]
            ports = [port.getsockname()[1] for port in reserved]
            endpoints = endpoints_of(plan, {facts.name: address}, {facts.name: ports[1:]})
            rendezvous = Rendezvous(address=address, port=ports[0], endpoints=endpoints)
            spec = worker_spec(request, plan, rank, attempt=attempt, checkpoint=None, rendezvous=rendezvous)
            defaults = {name: os.environ.get(name, value) for name, value in spec.defaults.items()}
            loopback = {"MASTER_ADDR": address, "MASTER_PORT": str(ports[0])}  # the user's own may be for other hosts
            variables = {**defaults, **variables, **spec.environment, **loopback}
        stack.enter_context(_environment(variables))
        stack.enter_context(_module_path(settings.sys_path))
        worker = replace(  # the plan is of this host only, torchrun may have started more
            request.worker_facts(plan, rank, attempt),
            world_rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            node_rank=int(os.environ.get("GROUP_RANK", "0")),
        )
        yield TrainContext(**asdict(worker)), plan


@contextlib.contextmanager
def _module_path(path: Sequence[str | None]) -> Iterator[None]:
    """Use this ``sys.path`` within the block, as a worker does."""
    before = sys.path[:]
    sys.path[:] = filter(None, path)
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and undo all changes of the environment after the block."""
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
    """Train as one of torchrun's ranks other than 0, whose reports are not kept.

    Raises WorkerGroupError from the exception of train_func.
    """
    channel = TorchrunChannel(work.backend)
    with _only_one(), _rank(request, request.first_attempt, under_torchrun=True) as (context, _):
        session = Session(channel, context, None)
        shared = TorchrunWork(backend=work.backend, work=work.fresh(), session=session, channel=channel)
        executed = _train(session, shared, channel)
    if executed.error is not None:
        rank, outcome = context.world_rank, executed.outcome
        text = f"rank {rank}, started by torchrun: {outcome.error}\n{indent(outcome.traceback, '  ')}".rstrip()
        raise WorkerGroupError(text, worker_failures={rank: executed.error}, culprit=rank)
    run = session.context.get_storage().run
    return make_result(run, shared.kept, checkpoint_config, metrics=channel.metrics, return_value=executed.value)
