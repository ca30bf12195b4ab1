"""A job in the queue: from its ticket to the units that it gets, and to the end of its run. Runs in: waiter."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain.coordinator.connection.transport import by_ssh
from distrain.errors import DistrainError, LaunchError, ResourcesError, StorageError
from distrain.hosts.claims import CLAIM
from distrain.hosts.hostfile import HostSpec, parse_hosts
from distrain.jobs.desk import DAY_S, Desk, Ticket
from distrain.jobs.far import Far
from distrain.jobs.place import QUEUE, state_folder
from distrain.jobs.turn import Turn, Units, turns
from distrain.system import process
from distrain.system.log import say
from distrain.system.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from distrain.coordinator.connection.transport import Transport

_BEAT_S = 3.0
_POLL_S = 2.0
_LOOK_S = 5.0
"""Seconds for which a look at a host counts."""
_LONG_S = 20.0
"""Seconds after which another job than the first one looks, as that may be dead or far away."""
_RETRY_S = 30.0
"""Seconds until a host that has not answered is tried again."""


class FarDesk:
    """A :class:`Desk` on another machine, which is connected again when the connection has been lost."""

    def __init__(self, connect: Callable[[], Far], folder: str) -> None:
        self._folder, self._connect, self._far = folder, connect, connect()
        self._lock = threading.Lock()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with self._lock:
                if self._far.is_lost:
                    self._far.close()
                    self._far = self._connect()
                return self._far.ask("desk", folder=self._folder, method=method, arguments=list(arguments))

        return call


def open_desk() -> Desk | FarDesk:
    """Open the queue of this user: the one that DISTRAIN_QUEUE names, else a directory of their own.

    Raises StorageError or LaunchError.
    """
    given = os.environ.get(QUEUE) or state_folder() / "queue"
    host, _, folder = str(given).removeprefix("ssh://").partition("/")
    if str(given).startswith("ssh://"):
        (spec,) = parse_hosts(host, QUEUE)
        return FarDesk(partial(Far, by_ssh(spec), "queue"), f"/{folder}")
    return Desk(given)


@contextmanager
def locked(desk: Desk | FarDesk) -> Iterator[dict[str, Ticket]]:
    """Lock a queue, and give its tickets."""
    while not desk.lock():
        time.sleep(0.05)
    try:
        yield tickets_in(desk)
    finally:
        with suppress(LaunchError):  # the lock has ended with the connection
            desk.unlock()


def tickets_in(desk: Desk | FarDesk) -> dict[str, Ticket]:
    """Return the tickets of a queue by name."""
    return {name: Ticket.of(found) for name, found in desk.read().items()}


class Waiter:
    """A job that waits, and then has its units until it ends. transports: to the hosts of the ticket."""

    def __init__(self, desk: Desk | FarDesk, ticket: Ticket, transports: Mapping[str, Transport]) -> None:
        self._desk = desk
        self.ticket = ticket
        self._transports = transports
        self._links: dict[str, Far] = {}
        self._retry_at: dict[str, float] = {}
        self._over = threading.Event()
        self.is_cancelled = False

    def enter(self, stem: str = "", taken: Collection[str] = ()) -> None:
        """Put the ticket into the queue. Raise StorageError if another job has its name.

        stem: begins the name of a ticket that has none. taken: names that it must not get.
        """
        with locked(self._desk) as tickets:
            now = self._desk.now()
            for old in tickets.values():
                if old.user == self.ticket.user and not old.is_active and now - max(old.ended, old.submitted) > DAY_S:
                    self._desk.delete(old.name)
            free = (f"{stem}-{number}" for number in itertools.count(1))
            name = self.ticket.name or next(name for name in free if name not in tickets and name not in taken)
            former, since = tickets.get(name), now
            if former is not None and former.token == self.ticket.token:
                since = former.submitted
            elif former is not None:
                if former.is_active or former.user != self.ticket.user:
                    raise StorageError(f"the queue has a job {name!r} already; give this one another --name")
                self._desk.delete(name)
            self._write(name=name, submitted=since)

    def _write(self, **changes: Any) -> None:
        ticket = replace(self.ticket, **changes)
        self._desk.write(asdict(ticket))
        self.ticket = ticket

    # -- signs of life --------------------------------------------------------------------------------------------

    def _repeat(self, action: Callable[[], None]) -> None:
        """Do something every few seconds, in a thread of its own: what does not answer must not hold up the others."""
        while not self._over.wait(_BEAT_S):
            with suppress(DistrainError):
                action()

    def _beat(self) -> None:
        """Show the hosts that this process lives."""
        for link in list(self._links.values()):
            link.beat()

    def _touch(self) -> None:
        """Show the queue that this process lives. A cancelled job that runs ends as after SIGTERM."""
        if self._desk.touch(self.ticket.name) and not self.is_cancelled:
            self.is_cancelled = True
            if self.ticket.state == "running":
                process.kill(os.getpid(), signal.SIGTERM)

    def _claim_again(self) -> None:
        """Claim the units of a running job on hosts that have lost its claims, as after a restart of the host."""
        for name, link in list(self._links.items()):
            if name in self.ticket.units and link.is_lost:
                link.close()
                self._links[name] = link = Far(self._transports[name], self.ticket.label)
                try:
                    if link.ask("claim", names=self.ticket.units[name]):
                        continue
                except LaunchError:
                    link.close()  # it is tried again
                    raise
                self._links.pop(name).close()  # the agent there still has them

    # -- the turn comes -------------------------------------------------------------------------------------------

    def wait(self) -> list[HostSpec]:
        """Wait until this job has its units. Return its hosts, each with as many slots as it gets.

        Raises ResourcesError if the hosts will never have enough, and KeyboardInterrupt if the job is cancelled.
        """
        for action in (self._beat, self._touch, self._claim_again):
            threading.Thread(
                target=self._repeat, args=(action,), name=f"distrain-{action.__name__}", daemon=True
            ).start()
        said, units = "", None
        while units is None:
            if self.is_cancelled:
                raise KeyboardInterrupt
            try:
                units, why = self._try(), self.ticket.why
            except LaunchError as error:  # the machine of the queue, or a host, does not answer
                why = str(error)
                self._close_links()  # and so are the claims that it may have by now
            if units is None and why != said:
                said = why
                say(f"{self.ticket.name} waits: {said}")
            if units is None:
                time.sleep(_POLL_S)
        say(f"{self.ticket.name} has {in_words(units, self.ticket.kind)}")
        return [self._host(name, names) for name, names in units.items()]

    def _host(self, name: str, names: Sequence[str]) -> HostSpec:
        """Return a host, restricted to its units."""
        host = self._transports[name].host
        gpus = tuple(names) if self.ticket.kind == "gpu" else host.gpus
        environment = {**host.environment, CLAIM: names[0]}
        return replace(host, slots=len(names) // self.ticket.each, gpus=gpus, environment=environment)

    def _try(self) -> Units | None:
        """Return the units if it is this job's turn and nobody else has them; else note why it waits."""
        with locked(self._desk) as tickets:
            tickets[self.ticket.name] = self.ticket  # the file may look dead, as after a machine was suspended
            found = self._turns(tickets, is_hopeful=True)
            turn, led = found[self.ticket.name], self._led(tickets, found)
            stale = self._stale(tickets, led)
            if turn.units is None and not stale:
                self._note(turn)
                if not led:
                    self._close_links()
                return None
        for name in turn.units or stale:
            self._connect(name)
        self._look()
        with locked(self._desk) as tickets:
            self._look()
            tickets[self.ticket.name] = self.ticket
            turn = self._turns(tickets)[self.ticket.name]
            self._check_size()
            if turn.units is None or not self._claim(turn.units):
                self._note(turn)
                return None
            self._write(state="running", began=self._desk.now(), units=turn.units, why="", begins=None, reserved={})
            return turn.units

    def _turns(self, tickets: Mapping[str, Ticket], *, is_hopeful: bool = False) -> dict[str, Turn]:
        """Decide about all jobs. is_hopeful: units of jobs that have ended are free, whatever the last look says."""
        looks = newest_looks(tickets.values(), self.ticket.kind)
        over = {one.label for one in tickets.values() if not one.is_active} if is_hopeful else set()
        users = {
            host: {name: "" if user in over else user for name, user in look["users"].items()}
            for host, look in looks.items()
        }
        return turns(tickets.values(), self.ticket.kind, users, self._desk.now())

    def _led(self, tickets: Mapping[str, Ticket], found: Mapping[str, Turn]) -> set[str]:
        """Return the hosts of this job for which no other one waits that comes before it."""
        hosts = set(self.ticket.hosts)
        for name in itertools.takewhile(lambda name: name != self.ticket.name, found):
            hosts -= tickets[name].hosts.keys()
        return hosts

    def _stale(self, tickets: Mapping[str, Ticket], led: Collection[str]) -> list[str]:
        """Return the hosts at which this job should look, as nobody has for a while."""
        looks, now = newest_looks(tickets.values(), self.ticket.kind), self._desk.now()
        age_s = {host: now - looks[host]["at"] if host in looks else math.inf for host in self.ticket.hosts}
        due = [host for host, age in age_s.items() if age > (_LOOK_S if host in led else _LONG_S)]
        return [host for host in due if self._retry_at.get(host, 0.0) <= time.monotonic()]

    def _connect(self, name: str) -> None:
        if name not in self._links and self._retry_at.get(name, 0) <= time.monotonic():
            self._links[name] = Far(self._transports[name], self.ticket.label)

    def _look(self) -> None:
        """Look at all hosts that are connected."""
        now = self._desk.now()
        for name, link in list(self._links.items()):
            try:
                found = link.ask("look", kind=self.ticket.kind, slots=self._transports[name].host.slots)
                self.ticket.looks[name] = {**found, "at": now}
            except DistrainError as error:
                self.ticket.looks[name] = {"users": {}, "at": now, "problem": str(error)}
                self._retry_at[name] = time.monotonic() + _RETRY_S
                self._links.pop(name).close()

    def _check_size(self) -> None:
        """Raise ResourcesError if all hosts have answered, and have too few units in all."""
        looks = [self.ticket.looks.get(host, {"problem": "it was not asked"}) for host in self.ticket.hosts]
        if not any("problem" in look for look in looks):
            rooms = zip(
                self.ticket.hosts.values(), (len(look["users"]) // self.ticket.each for look in looks), strict=True
            )
            most = sum(room if limit is None else min(room, limit) for limit, room in rooms)
            if most < self.ticket.workers:
                each = f" with {count(self.ticket.each, 'GPU')} each" if self.ticket.kind == "gpu" else ""
                raise ResourcesError(
                    f"{self.ticket.name} needs {count(self.ticket.workers, 'worker')}{each}, but "
                    f"{', '.join(self.ticket.hosts)} {'has' if len(self.ticket.hosts) == 1 else 'have'} room for {most}"
                )

    def _claim(self, units: Units) -> bool:
        """Claim the units on all hosts, or on none."""
        taken = all(
            name in self._links and self._links[name].ask("claim", names=names) for name, names in units.items()
        )
        if not taken:
            self._close_links()
        return taken

    def _note(self, turn: Turn) -> None:
        """Note why the job waits."""
        problems = [look["problem"] for look in self.ticket.looks.values() if "problem" in look]
        why = "; ".join([turn.why or "others were faster", *problems])
        noted = replace(self.ticket, why=why, begins=turn.begins, reserved=turn.reserved)
        if noted != self.ticket or self._links:  # with these, it has looked
            self._write(why=why, begins=turn.begins, reserved=turn.reserved)

    # -- the end --------------------------------------------------------------------------------------------------

    def began(self, run: str) -> None:
        """Note where the run directory is."""
        with suppress(DistrainError), locked(self._desk):
            self._write(run=run)

    def end(self, how: str, why: str = "") -> None:
        """Note how the job has ended, and why, and give its units back."""
        self._over.set()
        self._close_links()
        with suppress(DistrainError), locked(self._desk):
            self._write(state="ended", how=how, why=why, ended=self._desk.now(), looks={})

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()


def newest_looks(tickets: Iterable[Ticket], kind: str) -> dict[str, dict[str, Any]]:
    """Return the latest look at each host, for units of a kind."""
    found: dict[str, dict[str, Any]] = {}
    for host, look in (item for one in tickets if one.kind == kind for item in one.looks.items()):
        if host not in found or look["at"] > found[host]["at"]:
            found[host] = look
    return found


def in_words(units: Units, kind: str) -> str:
    """Return what a job has, such as ``2 GPUs of alpha, 1 GPU of beta``."""
    noun = "GPU" if kind == "gpu" else "slot"
    return ", ".join(f"{count(len(names), noun)} of {host}" for host, names in units.items())
