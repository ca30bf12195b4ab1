"""The order of a queue: fair share by user over the last day, then first come; and small jobs in between.

A job that finds too few free units reserves the ones that it will get. A later job may take a reserved unit only if it
ends before, by what its user says it takes. So a small job may go first, but delays no bigger one. This is conservative
backfilling (Mu'alem and Feitelson, IEEE Transactions on Parallel and Distributed Systems 12(6), 2001). A job of unknown
length may end at any moment: what it has counts as free right now for reservations, and it never gets what is reserved.

Each waiter decides anew every few seconds, and then keeps what it had reserved as long as nothing is free sooner: a job
that goes before must not have a bigger one choose other units, which others count on.

Pure: no I/O, no clock. Runs in: waiter, commands.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrain.jobs.desk import DAY_S

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distrain.jobs.desk import Ticket

Units = dict[str, list[str]]
"""Names of GPUs or slots, by host."""


@dataclass(slots=True)
class _Unit:
    """A GPU or a slot.

    free_at: 0 if it is free. since: when the job that has it began. reserved_at: from when on a waiting job has it.
    """

    host: str
    name: str
    free_at: float = 0.0
    since: float = 0.0
    reserved_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Turn:
    """The decision about a waiting job.

    units: those that it gets now. why: it waits. begins: when it will get what is ``reserved``; None if unknown.
    """

    units: Units | None
    why: str = ""
    begins: float | None = None
    reserved: Units = field(default_factory=dict)


def used_by(tickets: Iterable[Ticket], now: float) -> Counter[str]:
    """Return the seconds that the users have used units in the last day, times the number of units."""
    used = Counter[str]()
    for one in tickets:
        if one.began:
            until = now if one.is_active else one.ended or now - one.silent_s
            used[one.user] += one.size * max(0.0, until - max(one.began, now - DAY_S))  # type: ignore[assignment]
    return used


def turns(
    tickets: Collection[Ticket], kind: str, users: Mapping[str, Mapping[str, str]], now: float
) -> dict[str, Turn]:
    """Decide about all waiting jobs that need units of a kind. Return what each gets, by name, in their order.

    users: by host, who uses each of its units; empty for nobody.
    """
    alike = [one for one in tickets if one.kind == kind]
    units, used = _units(alike, users, now), used_by(alike, now)
    waiting = [one for one in alike if one.state == "waiting" and one.is_active]
    found = {}
    for one in sorted(waiting, key=lambda one: (used[one.user], one.submitted, one.name)):
        unfinished = [name for name in one.after if _is_unfinished(name, tickets)]
        if unfinished:
            found[one.name] = Turn(None, f"it comes after {', '.join(unfinished)}")
        else:
            found[one.name] = _turn(one, units, now)
    return found


def _is_unfinished(name: str, tickets: Iterable[Ticket]) -> bool:
    return any(one.name == name and one.is_active for one in tickets)


def _units(tickets: Iterable[Ticket], users: Mapping[str, Mapping[str, str]], now: float) -> list[_Unit]:
    """Return all units, with the moments at which they will be free."""
    held: dict[tuple[str, str], tuple[float, float]] = {}
    for one in tickets:
        if one.state == "running" and one.is_active:
            end = max(now, one.began + one.expected_s) if one.expected_s else now
            held |= {(host, name): (end, one.began) for host, names in one.units.items() for name in names}
    return [
        _Unit(host, name, *held.get((host, name), (math.inf if user else 0.0, 0.0)))
        for host, found in users.items()
        for name, user in found.items()
    ]


def _turn(job: Ticket, units: Sequence[_Unit], now: float) -> Turn:
    end = now + job.expected_s if job.expected_s else math.inf
    free = [unit for unit in units if unit.free_at == 0.0]
    sizes = Counter(unit.host for unit in units)
    if (found := _choose(job, [unit for unit in free if end <= unit.reserved_at], sizes)) is not None:
        for unit in found:
            unit.free_at, unit.since = (end if math.isfinite(end) else now), now
        return Turn(_by_host(found))
    unreserved = [unit for unit in units if math.isinf(unit.reserved_at) and math.isfinite(unit.free_at)]
    # First what jobs have that began before this one came, then what is free, then what others got in the meantime.
    unreserved.sort(key=lambda unit: 1 if unit.free_at == 0.0 else 0 if unit.since < job.submitted else 2)
    for moment in sorted({max(unit.free_at, now) for unit in unreserved}):
        if (found := _choose(job, [unit for unit in unreserved if unit.free_at <= moment], sizes)) is not None:
            for unit in found:
                unit.reserved_at = moment
            return Turn(None, _shortage(job, free), moment if moment > now else None, _by_host(found))
    return Turn(None, _shortage(job, free))


def _choose(job: Ticket, units: Sequence[_Unit], sizes: Mapping[str, int]) -> list[_Unit] | None:
    """Choose units for a job: those that it has reserved, if they are among these. Return None if there are too few."""
    own = [unit for unit in units if unit.name in job.reserved.get(unit.host, ())]
    return own if len(own) == job.size else _fit(job, units, sizes)


def _fit(job: Ticket, units: Sequence[_Unit], sizes: Mapping[str, int]) -> list[_Unit] | None:
    """Choose units for a job, the first ones of each host. Return None if there are too few.

    One host for all workers is better than several: the smallest one that has room. Of several, the largest come first.
    sizes: how many units each host has.
    """
    by_host = {host: [unit for unit in units if unit.host == host] for host in job.hosts}
    rooms = {host: len(found) // job.each for host, found in by_host.items()}
    for host, most in job.hosts.items():
        rooms[host] = min(rooms[host], job.workers if most is None else most)
    order = sorted(rooms, key=lambda host: sizes[host])
    alone = [host for host in order if rooms[host] >= job.workers]
    found: list[_Unit] = []
    for host in alone[:1] or order[::-1]:
        workers = min(rooms[host], job.workers - len(found) // job.each)
        found += by_host[host][: workers * job.each]
    return found if len(found) == job.size else None


def _by_host(units: Collection[_Unit]) -> Units:
    return {
        host: [unit.name for unit in units if unit.host == host] for host in dict.fromkeys(one.host for one in units)
    }


def _shortage(job: Ticket, free: Collection[_Unit]) -> str:
    here = sum(unit.host in job.hosts for unit in free)
    kind = "GPUs" if job.kind == "gpu" else "slots"
    return f"{here} of {job.size} {kind} are free"
