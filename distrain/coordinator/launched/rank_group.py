"""The ranks that another launcher has started, such as torchrun or srun, and how they meet. Runs in: coordinator.

:func:`join` makes this process one of the ranks. Rank 0 opens the run directory
(:mod:`distrain.coordinator.launched.launched`), serves the other ranks from a thread
(:mod:`distrain.coordinator.launched.rank_server`), and tells them at the end what its fit() returns or raises. The
address of that thread reaches them over the framework's own process group.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import time
from dataclasses import asdict, dataclass, replace
from textwrap import indent
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.api.context import TrainContext
from distrain.coordinator.launched.handshake import HandshakeError
from distrain.coordinator.launched.rank_channel import RankChannel, connect
from distrain.coordinator.launched.rank_process import current_session, environment, module_path, only_one, signals
from distrain.coordinator.stop_signals import STOP_SIGNALS, note_stop, preempted
from distrain.decisions.placement import RANK_DEFAULTS, make_plan, rendezvous_network, visible_devices
from distrain.errors import ControllerError, DistrainError, LaunchError, PreemptionError, WorkerGroupError
from distrain.hosts.host import chosen_interface, collective_variables, interface_problem
from distrain.hosts.host_info import host_info
from distrain.hosts.inspection import storage_problem
from distrain.hosts.network import interface_variables, interfaces
from distrain.hosts.world import RankPlan, WorldPlan
from distrain.system import process
from distrain.system.pickling import pickled
from distrain.worker.job.job import Work, unpickle_return_value
from distrain.worker.session import Session
from distrain.worker.user_code import RankResult, run_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distrain.api.result import Result
    from distrain.coordinator.launched.outer_launcher import OuterLauncher
    from distrain.coordinator.launched.rank_server import RankServer
    from distrain.decisions.events import RunRequest

_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
"""Batch systems send the last two some time before they end a job, if they are asked to."""
_ONE_REQUEST_S = 1.0
"""Seconds in which several signals are one request: a terminal and a launcher may both pass a Ctrl-C on."""
_VERDICT_S = 10.0
"""Seconds for which a rank that has failed waits for what rank 0 says about the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The message of rank 0 to the other ranks before the training.

    port, secret: of its :class:`Entrance`. storage: the run directory, empty if it is remote. probe_file: a file in it
    that has the ``run_id``.
    """

    port: int
    secret: str
    run_id: str
    run_name: str
    storage_path: str
    filesystem: str
    attempt: int
    checkpoint: str | None
    storage: str
    probe_file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """The message of each rank when all ranks meet.

    offer, refusal: of rank 0; a refusal is the reason why there will be no training.
    """

    host: str
    launcher: OuterLauncher
    offer: Offer | None = None
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class _ReadyWork(Work):
    """Work whose framework is set up already."""

    work: Work
    initialises_backend = False

    def run(self) -> Any:
        return self.work.run()


@contextlib.contextmanager
def join(launcher: OuterLauncher, request: RunRequest, work: Work) -> Iterator[RankGroup]:
    """Make this process a rank within the block, and set up its framework.

    Raises ResourcesError, LaunchError if another thread trains in this process, and WorkerGroupError if the framework
    cannot be set up.
    """
    facts = replace(host_info(with_gpus=request.scaling.use_gpu), name="localhost")
    is_bound = request.scaling.use_gpu and "CUDA_VISIBLE_DEVICES" in os.environ  # as by srun --gpus-per-task=1
    has_own_gpus = is_bound and len(facts.gpus or ()) == request.scaling.gpus_per_worker
    plan = make_plan([facts], request.scaling, num_workers=1 if has_own_gpus else launcher.local_world_size)
    placed = plan.ranks[0 if has_own_gpus else launcher.local_rank]
    [settings] = request.hosts.values()
    defaults = {
        **_network(launcher, plan, request.scaling.interface or ""),
        **RANK_DEFAULTS,
        **request.backend.defaults,
    }
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    variables = {**unset, **visible_devices(placed), **settings.environment, **launcher.environment}
    facts_of_rank = replace(
        request.worker_facts(plan, placed, request.first_attempt),
        world_rank=launcher.rank,
        world_size=launcher.world_size,
        local_rank=launcher.local_rank,
        local_world_size=launcher.local_world_size,
        node_rank=launcher.node_rank or 0,
    )
    with only_one(), environment(variables), module_path(settings.sys_path):
        group = RankGroup(launcher, TrainContext(**asdict(facts_of_rank)), work)
        try:
            group.set_up()
            yield group
        finally:
            group.leave()


def _network(launcher: OuterLauncher, plan: WorldPlan, wanted: str) -> dict[str, str]:
    """Return the variables that name the interface over which the ranks connect; none if that is not known.

    wanted: interfaces that the user has chosen. Raises LaunchError if this host has none of them.
    """
    if launcher.is_one_host:
        return rendezvous_network(plan)
    found = interfaces() if wanted else {}
    if problem := interface_problem(wanted, found):
        raise LaunchError(f"{socket.gethostname()}: {problem}")
    if wanted:
        return collective_variables(chosen_interface(wanted, found))
    with contextlib.suppress(OSError):
        variables = interface_variables(launcher.address)
        if "lo" not in variables.values():  # rank 0 may know itself by such an address
            return variables
    return {}


class RankGroup:
    """The ranks that a launcher has started, as one of them sees it."""

    def __init__(self, launcher: OuterLauncher, context: TrainContext, work: Work) -> None:
        self.launcher = launcher
        self.context = context
        self.hosts: list[str] = []
        """The host of each rank."""
        self.plan = WorldPlan(ranks=())
        """All ranks, in the order of their hosts."""
        self.server: RankServer | None = None
        """On rank 0, once the ranks are connected."""
        self._work = work
        self._backend = work.backend
        self._is_set_up = False
        self._has_met = False
        self._asked_at: float | None = None
        """When a signal first asked the run to stop (time.monotonic)."""

    def set_up(self) -> None:
        """Set up the framework."""
        try:
            self._backend.setup(self.context)
        except Exception as error:
            rank = self.launcher.rank
            raise WorkerGroupError(
                f"rank {rank}, started by {self.launcher.name}: {error} (before train_func, while setting up)",
                worker_failures={rank: error},
                culprit=rank,
            ) from error
        self._is_set_up = True

    def leave(self) -> None:
        """Leave the process group, so that peers that wait for this rank fail at once."""
        if self._is_set_up:
            self._is_set_up = False
            with contextlib.suppress(Exception):
                self._backend.teardown(self.context)

    # -- the meeting ----------------------------------------------------------------------------------------------

    def meet(self, offer: Offer | None, refusal: str = "") -> Offer:
        """Meet all ranks, and return rank 0's offer. Raises LaunchError if rank 0 refuses to train."""
        self._has_met = True
        own = _Arrival(host=socket.gethostname(), launcher=self.launcher, offer=offer, refusal=refusal)
        arrivals: list[_Arrival] = self._backend.gather(own)
        self.hosts = [arrival.host for arrival in arrivals]
        names = list(dict.fromkeys(self.hosts))
        placed = [
            RankPlan(
                rank=rank,
                host=arrival.host,
                local_rank=arrival.launcher.local_rank,
                local_world_size=arrival.launcher.local_world_size,
                node_rank=names.index(arrival.host) if (node := arrival.launcher.node_rank) is None else node,
            )
            for rank, arrival in enumerate(arrivals)
        ]
        self.plan = WorldPlan(ranks=tuple(sorted(placed, key=lambda rank: (rank.node_rank, rank.rank))))
        accepted = arrivals[0].offer
        if accepted is None:
            raise LaunchError(f"rank 0 on {self.hosts[0]} cannot begin the run: {arrivals[0].refusal}")
        self.context = replace(
            self.context,
            node_rank=placed[self.launcher.rank].node_rank,
            run_name=accepted.run_name,
            storage_path=accepted.storage_path,
            filesystem=accepted.filesystem,
            attempt=accepted.attempt,
            run_id=accepted.run_id,
        )
        os.environ[process.WITHIN_RUN] = accepted.run_id  # until the block of join() ends
        return accepted

    def agree(self, problem: str | None) -> None:
        """Raise LaunchError, on all ranks, if one of them has a problem."""
        problems = [
            f"rank {rank} on {self.hosts[rank]}: {found}"
            for rank, found in enumerate(self._backend.gather(problem))
            if found is not None
        ]
        if problems:
            raise LaunchError("\n".join(problems))

    # -- training -------------------------------------------------------------------------------------------------

    def session(self, channel: RankChannel, offer: Offer) -> Session:
        """Make the session of this rank."""
        storage = self.context.get_storage()
        return Session(channel, self.context, storage.checkpoint(offer.checkpoint) if offer.checkpoint else None)

    @contextlib.contextmanager
    def signals(self, channel: RankChannel) -> Iterator[None]:
        """Pass signals that ask this rank to stop on to all ranks, within the block."""

        def takes(number: int) -> bool:
            note_stop(number)
            if self._asked_at is not None:
                return time.monotonic() < self._asked_at + _ONE_REQUEST_S
            self._asked_at = time.monotonic()
            context, name = self.context, signal.Signals(number).name
            with contextlib.suppress(DistrainError):
                channel.send(wire.StopVote(attempt=context.attempt, rank=context.world_rank, reason=name))
            return channel.uses_should_stop

        with signals(_SIGNALS, takes):
            yield

    def train(self, session: Session, channel: RankChannel) -> RankResult:
        """Run the work. After a success, wait for the other ranks."""
        ready = _ReadyWork(backend=self._backend, run_datasets=self._work.run_datasets, work=self._work.fresh())
        with current_session(session):
            executed = run_rank(lambda: ready, session, channel)
            with contextlib.suppress(DistrainError):
                channel.send(executed.outcome)
                if executed.outcome.ok:
                    channel.uses_should_stop = True  # a signal is for the other ranks now
                    session.wait_for_release()
            self.leave()
        return executed

    # -- rank 0 ---------------------------------------------------------------------------------------------------

    def lead(self, train: Callable[[], Result]) -> Result:
        """Train as rank 0, and tell the other ranks what comes of it."""
        try:
            result = train()
        except BaseException as error:
            self._share(None, error)
            raise
        self._share(result, None)
        return result

    def _share(self, result: Result | None, error: BaseException | None) -> None:
        if self.server is not None:
            self.server.say_goodbye(_pickled_end(result, error))
        elif not self._has_met:
            with contextlib.suppress(Exception):
                self.meet(None, refusal=str(error) or type(error).__name__)

    # -- the other ranks ------------------------------------------------------------------------------------------

    def follow(self) -> Result:
        """Train as another rank than 0. Return or raise what rank 0 does; raise WorkerGroupError if that is not known.

        A rank that has failed puts its own exception into the error.
        """
        offer, connection = self.meet(None), None
        problem = self._storage_problem(offer)
        address = "127.0.0.1" if self.launcher.is_one_host else self.launcher.address
        with contextlib.ExitStack() as stack:
            if problem is None:
                try:
                    connection = stack.enter_context(connect(address, offer.port, offer.secret, self.launcher.rank))
                except (OSError, HandshakeError) as error:
                    problem = f"cannot connect to rank 0 on {address}, port {offer.port}: {error}"
            self.agree(problem)
            assert connection is not None
            channel = RankChannel(connection, self.context.get_storage().run)
            stack.callback(channel.close)
            with self.signals(channel):
                executed = self.train(self.session(channel, offer), channel)
                end = channel.await_end(None if executed.error is None else _VERDICT_S)
        return self._result(end, executed)

    def _storage_problem(self, offer: Offer) -> str | None:
        why = storage_problem(offer.storage, offer.probe_file, offer.run_id) if offer.storage else None
        return why and (
            f"the run directory {offer.storage} {why}. Set RunConfig(storage_path=...) to a directory that all hosts "
            "share, or to a URL such as s3://bucket/runs"
        )

    def _result(self, end: bytes | None, executed: RankResult) -> Result:
        rank, own = self.launcher.rank, executed.error
        if end is None:
            raise self._own_error(executed)
        result, error = _unpickled_end(end)
        if isinstance(error, WorkerGroupError) and own is not None and rank in error.worker_failures:
            error.worker_failures[rank] = own
        if isinstance(error, PreemptionError):
            raise preempted(str(error), signal.Signals(error.exit_code - 128).name)
        if error is not None:
            raise error
        assert result is not None
        return result

    def _own_error(self, executed: RankResult) -> WorkerGroupError:
        """Return the error of a rank that does not know what rank 0 says."""
        rank, outcome, error = self.launcher.rank, executed.outcome, executed.error
        if error is None:
            return WorkerGroupError(
                "rank 0 has ended before the run, or its host is lost", worker_failures={}, culprit=0
            )
        text = f"rank {rank}, started by {self.launcher.name}: {outcome.error}\n{indent(outcome.traceback, '  ')}"
        return WorkerGroupError(text.rstrip(), worker_failures={rank: error}, culprit=rank)


def _pickled_end(result: Result | None, error: BaseException | None) -> bytes:
    """Pickle the end of the run. The return value is a pickle within it: no rank fails for want of that."""
    value = b"" if result is None else _pickled(result.return_value)
    if result is not None:
        result = replace(result, return_value=None)
    unknown = ControllerError(str(error) or "what rank 0 returns cannot be pickled")
    return _pickled((result, error, value)) or pickle.dumps((None, unknown, b""))


def _pickled(value: object) -> bytes:
    """Return the pickle of the value, empty if there can be none."""
    for dumps in (pickle.dumps, pickled):  # classes of __main__ are the same on all ranks, for the first one
        with contextlib.suppress(Exception):
            return dumps(value)
    return b""


def _unpickled_end(body: bytes) -> tuple[Result | None, BaseException | None]:
    try:
        result, error, value = pickle.loads(body)  # noqa: S301 - rank 0 knew the secret
    except Exception as error:
        return None, ControllerError(f"what fit() returns or raises on rank 0 cannot be unpickled here: {error!r}")
    return (result and replace(result, return_value=unpickle_return_value(value))), error
