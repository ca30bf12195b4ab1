"""The ranks that another launcher has started, such as torchrun or srun, and how they meet. Runs in: coordinator.

:func:`join` makes this process one of the ranks. Rank 0 opens the run directory, drives the run in a thread
(:class:`JoinedRanks`), and tells the others at the end what its fit() returns or raises. The address at which they
connect to it reaches them over the framework's own process group.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from textwrap import indent
from typing import TYPE_CHECKING

from distrain import wire
from distrain.api.context import TrainContext
from distrain.coordinator.ranks.adopted import AdoptedRanks
from distrain.coordinator.ranks.rank_channel import Entrance, Passwords, RankChannel, connect
from distrain.coordinator.ranks.stop_signals import STOP_SIGNALS
from distrain.coordinator.ranks.this_process import OwnRank, Signals, environment, module_path, only_one
from distrain.decisions.placement import RANK_DEFAULTS, make_plan, rendezvous_network
from distrain.errors import ControllerError, LaunchError, WorkerGroupError
from distrain.hosts.host import chosen_interface, collective_variables, interface_problem
from distrain.hosts.host_info import host_info
from distrain.hosts.inspection import storage_problem
from distrain.hosts.network import interface_variables, interfaces
from distrain.hosts.world import RankPlan, WorldPlan
from distrain.system import process
from distrain.system.log import warn
from distrain.system.loop import Loop, SignalRelay
from distrain.system.pickling import pickled
from distrain.worker.job.job import unpickle_return_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distrain.api.result import Result
    from distrain.coordinator.ranks.outer_launcher import OuterLauncher
    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.events import RunRequest
    from distrain.errors import DistrainError
    from distrain.worker.job.job import Work

_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
"""Batch systems send the last two some time before they end a job, if they are asked to."""
_FAREWELL_S = 1.0
"""Seconds without progress for which ranks may take the end of the run from rank 0, which may exit then."""
_SILENT_S = 5.0
"""Seconds after which rank 0 says that it waits for the others before train_func. They wait three times as long."""
_VERDICT_S = 10.0
"""Seconds for which a rank that has failed waits for what rank 0 says about the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The message of rank 0 to the other ranks before the training.

    port, passwords: of its :class:`Entrance`. storage: the run directory, empty if it is remote. probe_file: a file in
    it that has the ``run_id``.
    """

    port: int
    passwords: Passwords
    run_id: str
    storage: str
    probe_file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """The message of each rank when all ranks meet.

    devices, shares_gpu: as in :class:`~distrain.hosts.world.WorkerFacts`.
    offer, refusal: of rank 0; a refusal is the reason why there will be no training.
    """

    host: str
    launcher: OuterLauncher
    devices: tuple[int, ...]
    shares_gpu: bool
    offer: Offer | None = None
    refusal: str = ""


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
    variables = {**unset, **settings.environment, **launcher.environment}
    facts_of_rank = replace(
        request.worker_facts(plan, placed, request.first_attempt),
        world_rank=launcher.rank,
        world_size=launcher.world_size,
        local_rank=launcher.local_rank,
        local_world_size=launcher.local_world_size,
        node_rank=launcher.node_rank or 0,
    )
    with only_one(), environment(variables), module_path(settings.sys_path):
        group = RankGroup(launcher, TrainContext(**asdict(facts_of_rank)), work, request.stop_signals)
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


@dataclass(eq=False)
class RankGroup:
    """The ranks that a launcher has started, as one of them sees it. ``context``: what it knows by itself."""

    launcher: OuterLauncher
    context: TrainContext
    work: Work
    stop_signals: Sequence[str] | None
    plan: WorldPlan = field(default_factory=lambda: WorldPlan(ranks=()))
    """All ranks, in the order of their hosts."""
    ranks: JoinedRanks | None = None
    """On rank 0, once the ranks are connected."""
    _is_set_up: bool = False
    _has_exchanged: bool = False

    def set_up(self) -> None:
        """Set up the framework."""
        try:
            with self._saying_whom_it_waits_for():
                self.work.backend.setup(self.context)
        except Exception as error:
            rank = self.launcher.rank
            raise WorkerGroupError(
                f"rank {rank}, started by {self.launcher.name}: {error} (before train_func, while setting up)",
                worker_failures={rank: error},
                culprit=rank,
            ) from error
        self._is_set_up = True

    @contextlib.contextmanager
    def _saying_whom_it_waits_for(self) -> Iterator[None]:
        own = self.launcher
        text = (
            f"rank {own.rank} of {own.world_size} waits for all ranks, which {own.name} has started, to call fit() and "
            f"to meet at {own.address}:{own.port}. {own.cure}"
        )
        timer = threading.Timer(3 * _SILENT_S if own.rank else _SILENT_S, warn, [text])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def leave(self) -> None:
        """Leave the process group, so that peers that wait for this rank fail at once."""
        if self._is_set_up:
            self._is_set_up = False
            with contextlib.suppress(Exception):
                self.work.backend.teardown(self.context)

    # -- the meeting ----------------------------------------------------------------------------------------------

    def exchange_offers(self, offer: Offer | None, refusal: str = "") -> Offer:
        """Meet all ranks, and return rank 0's offer. Raises LaunchError if rank 0 refuses to train."""
        self._has_exchanged = True
        own = _Arrival(
            host=socket.gethostname(),
            launcher=self.launcher,
            devices=self.context.devices,
            shares_gpu=self.context.shares_gpu,
            offer=offer,
            refusal=refusal,
        )
        with self._saying_whom_it_waits_for():
            arrivals: list[_Arrival] = self.work.backend.gather(own)
        names = list(dict.fromkeys(arrival.host for arrival in arrivals))
        placed = [
            RankPlan(
                rank=rank,
                host=arrival.host,
                local_rank=arrival.launcher.local_rank,
                local_world_size=arrival.launcher.local_world_size,
                node_rank=names.index(arrival.host) if (node := arrival.launcher.node_rank) is None else node,
                devices=arrival.devices,
            )
            for rank, arrival in enumerate(arrivals)
        ]
        self.plan = WorldPlan(ranks=tuple(placed), shares_gpu=any(arrival.shares_gpu for arrival in arrivals))
        accepted = arrivals[0].offer
        if accepted is None:
            raise LaunchError(f"rank 0 on {names[0]} cannot begin the run: {arrivals[0].refusal}")
        os.environ[process.WITHIN_RUN] = accepted.run_id  # until the block of join() ends
        return accepted

    def agree(self, problem: str | None) -> None:
        """Raise LaunchError, on all ranks, if one of them has a problem."""
        problems = [
            f"rank {rank} on {self.plan.ranks[rank].host}: {found}"
            for rank, found in enumerate(self.work.backend.gather(problem))
            if found is not None
        ]
        if problems:
            raise LaunchError("\n".join(problems))

    # -- training -------------------------------------------------------------------------------------------------

    def _own_rank(self, connection: socket.socket) -> OwnRank:
        """Make this process a rank of a run."""
        rank = self.launcher.rank
        channel = RankChannel(connection, rank=rank, on_stop=lambda name: signals.order(name))
        names = self.stop_signals
        numbers = _SIGNALS if names is None else [signal.Signals[name] for name in names]
        signals = Signals(numbers, channel, relay=None if rank else SignalRelay())
        return OwnRank(
            channel,
            signals,
            fresh=lambda: replace(self.work.fresh(), initialises_backend=False),  # it is set up already
            around=lambda spec: contextlib.nullcontext(),
            leave=lambda executed, context: self.leave(),
        )

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
        if self.ranks is not None:
            self.ranks.say_goodbye(_pickled_end(result, error))
        elif not self._has_exchanged:
            with contextlib.suppress(Exception):
                self.exchange_offers(None, refusal=str(error) or type(error).__name__)

    def join_up(self, store: RunStore, run_id: str) -> JoinedRanks:
        """Meet the other ranks, and return all.

        Raises LaunchError if a rank does not see the run directory, or cannot connect to this process.
        """
        entrance = Entrance(self.launcher.world_size, only_here=self.launcher.is_one_host)
        with contextlib.closing(entrance):
            offer = Offer(
                port=entrance.port,
                passwords=entrance.passwords,
                run_id=run_id,
                storage="" if store.is_remote else str(store.paths.root),
                probe_file=str(store.paths.manifest),
            )
            self.exchange_offers(offer)
            self.agree(None)
            connections = entrance.connections()
        theirs, ours = socket.socketpair()
        self.ranks = JoinedRanks({0: theirs, **connections}, self._own_rank(ours), port=self.launcher.port)
        return self.ranks

    # -- the other ranks ------------------------------------------------------------------------------------------

    def follow(self) -> Result:
        """Train as another rank than 0. Return or raise what rank 0 does; raise WorkerGroupError if that is not known.

        A rank that has failed puts its own exception into the error.
        """
        offer, connection = self.exchange_offers(None), None
        problem = self._storage_problem(offer)
        address = "127.0.0.1" if self.launcher.is_one_host else self.launcher.address
        with contextlib.ExitStack() as stack:
            if problem is None:
                try:
                    connection = stack.enter_context(connect(address, offer.port, offer.passwords, self.launcher.rank))
                except OSError as error:
                    problem = f"cannot connect to rank 0 on {address}, port {offer.port}: {error}; open that port"
            self.agree(problem)
            assert connection is not None
            own = self._own_rank(connection)
            stack.callback(own.channel.close)
            with own.signals:
                own.serve()
                end = own.channel.await_end(None if own.error is None else _VERDICT_S)
        return self._result(end, own)

    def _storage_problem(self, offer: Offer) -> str | None:
        why = storage_problem(offer.storage, offer.probe_file, offer.run_id) if offer.storage else None
        return why and (
            f"the run directory {offer.storage} {why}. Set RunConfig(storage_path=...) to a directory that all hosts "
            "share, or to a URL such as s3://bucket/runs"
        )

    def _result(self, end: bytes | None, own: OwnRank) -> Result:
        rank = self.launcher.rank
        if end is None:
            raise self._own_error(own)
        result, error = _unpickled_end(end)
        if isinstance(error, WorkerGroupError) and own.error is not None and rank in error.worker_failures:
            error.worker_failures[rank] = own.error
        if error is not None:
            raise error
        assert result is not None
        return result

    def _own_error(self, own: OwnRank) -> DistrainError:
        """Return the error of a rank that does not know what rank 0 says."""
        if own.executed is None or own.error is None:
            return own.channel.error()
        rank, outcome, error = self.launcher.rank, own.executed.outcome, own.error
        text = f"rank {rank}, started by {self.launcher.name}: {outcome.error}\n{indent(outcome.traceback, '  ')}"
        return WorkerGroupError(text.rstrip(), worker_failures={rank: error}, culprit=rank)


class JoinedRanks(AdoptedRanks):
    """All ranks that a launcher has started. Rank 0 drives them, but never starts them again: the launcher may do that.

    See :class:`~distrain.coordinator.ranks.port.Ranks`.
    """

    def say_goodbye(self, end: bytes) -> None:
        """Send the end of the run to the other ranks, and close the connections."""
        with contextlib.closing(Loop()) as loop:
            self._say_goodbye(loop, end)
            for channel in self._channels.values():
                channel.close()

    def _say_goodbye(self, loop: Loop, end: bytes) -> None:
        channels = self._channels.values()
        for rank, channel in self._channels.items():
            channel.attach(loop, lambda frames: None)  # closing one with unread bytes would destroy what was sent
            channel.queue(wire.RunEnded(attempt=self._attempt, rank=rank, body=end))
        deadline, unsent = time.monotonic() + _FAREWELL_S, 0
        while not all(one.at_end for one in channels) and time.monotonic() < deadline:
            loop.call_at("farewell", deadline, lambda: None)
            loop.step()
            before, unsent = unsent, sum(one.queued_bytes for one in channels)
            if unsent != before:  # a large return value is on its way
                deadline = time.monotonic() + _FAREWELL_S


def _pickled_end(result: Result | None, error: BaseException | None) -> bytes:
    """Pickle the end of the run. The return value is a pickle within it: no rank fails for want of that."""
    value = _pickled(result.return_value) if result else b""
    unknown = ControllerError(str(error) or "what rank 0 returns cannot be pickled")
    return _pickled((result and replace(result, return_value=None), error, value)) or pickle.dumps((None, unknown, b""))


def _pickled(value: object) -> bytes:
    """Return the pickle of the value, empty if there can be none."""
    for by_value in (False, True):  # by name, classes of __main__ are the same on all ranks
        with contextlib.suppress(Exception):
            return pickled(value, by_value=by_value)
    return b""


def _unpickled_end(body: bytes) -> tuple[Result | None, BaseException | None]:
    try:
        result, error, value = pickle.loads(body)  # noqa: S301 - rank 0 knew the password
    except Exception as error:
        return None, ControllerError(f"what fit() returns or raises on rank 0 cannot be unpickled here: {error!r}")
    return (result and replace(result, return_value=unpickle_return_value(value))), error
