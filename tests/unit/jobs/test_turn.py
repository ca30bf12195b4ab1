"""The order of a queue, played with a clock of its own: many users, jobs, hosts and deaths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest

from distrain.jobs.desk import SILENCE_S, Ticket
from distrain.jobs.turn import Turn, Units, turns

POLL_S = 2.0


@dataclass
class Play:
    """A queue with hosts. Every waiter acts on what it sees itself, in any order, as the processes do.

    lengths: seconds that each job takes. grants: begin, end and units of each that has run.
    """

    hosts: dict[str, int]
    now: float = 1000.0
    tickets: dict[str, Ticket] = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)
    grants: list[tuple[str, float, float, Units]] = field(default_factory=list)
    held: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)
    """The claims on hosts: the label, and until when it is held."""

    def submit(self, ticket: Ticket, seconds: float) -> None:
        self.tickets[ticket.name] = replace(ticket, submitted=self.now)
        self.lengths[ticket.name] = seconds

    @property
    def users(self) -> dict[str, dict[str, str]]:
        return {
            host: {f"GPU-{n}": self._holder(host, f"GPU-{n}") for n in range(count)}
            for host, count in self.hosts.items()
        }

    def _holder(self, host: str, name: str) -> str:
        label, until = self.held.get((host, name), ("", 0.0))
        return label if until > self.now else ""

    def turns(self) -> dict[str, Turn]:
        return turns(list(self.tickets.values()), "gpu", self.users, self.now)

    def free(self, name: str) -> None:
        """Let a job end now."""
        job = self.tickets[name]
        self.tickets[name] = replace(job, state="ended", ended=self.now)
        self.held = {key: found for key, found in self.held.items() if found[0] != job.label}

    def end_those_whose_time_is_over(self) -> None:
        for name, job in self.tickets.items():
            if job.state == "running" and job.is_active and self.now >= job.began + self.lengths[name]:
                self.tickets[name] = replace(job, state="ended", ended=job.began + self.lengths[name])

    def poll(self, name: str, found: Turn) -> bool:
        """Do what a waiter does. Return whether it has begun."""
        job = self.tickets[name]
        if found.units is None:
            self.tickets[name] = replace(job, begins=found.begins, reserved=found.reserved)
            return False
        end = self.now + self.lengths[name]
        for host, names in found.units.items():
            assert len(names) % job.each == 0
            assert len(names) // job.each <= (job.hosts[host] or math.inf)
            for one in names:
                assert self._holder(host, one) == "", "a GPU was given twice"
                self.held[host, one] = job.label, end
        assert sum(map(len, found.units.values())) == job.size
        self.grants.append((name, self.now, end, found.units))
        self.tickets[name] = replace(job, state="running", began=self.now, units=found.units)
        return True

    def kill(self, name: str, lingers_s: float) -> None:
        """The process of a job dies; its claims linger, until the agents have emptied the hosts."""
        job = self.tickets[name]
        self.tickets[name] = replace(job, silent_s=SILENCE_S + 1)
        for key, (label, until) in list(self.held.items()):
            if label == job.label:
                self.held[key] = label, min(until, self.now + lingers_s)

    def step(self, order: random.Random) -> None:
        """Pass some time; jobs whose time is over end, and all waiters poll."""
        self.now += POLL_S
        self.end_those_whose_time_is_over()
        waiting = [name for name, job in self.tickets.items() if job.state == "waiting" and job.is_active]
        seen: dict[str, Turn] = {}
        for name in order.sample(waiting, len(waiting)):
            seen = seen or self.turns()  # they are the same as long as nothing changes
            if self.poll(name, seen[name]):
                seen = {}

    def play(self, order: random.Random, until: float = math.inf) -> None:
        """Play until no living job waits or runs."""
        while any(job.state != "ended" and job.is_active for job in self.tickets.values()) and self.now < until:
            self.step(order)


def some_job(random: random.Random, name: str, play: Play, users: int, *, knows: float) -> tuple[Ticket, float]:
    """A job that fits on the hosts, and how long it takes. knows: how often its user says how long, at most."""
    each = random.choice([1, 1, 1, 2])
    rooms = {host: count // each for host, count in play.hosts.items()}
    chosen = random.sample(list(play.hosts), random.randint(1, len(play.hosts)))
    most = sum(rooms[host] for host in chosen)
    if not most:
        return some_job(random, name, play, users, knows=knows)
    seconds = random.choice([5.0, 20.0, 60.0, 300.0]) * random.uniform(0.5, 1.0)
    ticket = Ticket(
        name=name,
        user=f"user-{random.randrange(users)}",
        kind="gpu",
        workers=random.randint(1, most),
        each=each,
        hosts=dict.fromkeys(chosen),
        expected_s=seconds * random.choice([1.0, 1.5]) if random.random() < knows else None,
    )
    return ticket, seconds


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(200))
def test_no_gpu_is_given_twice_and_every_job_runs(seed: int) -> None:
    draw = random.Random(seed)
    play = Play({host: draw.choice([1, 2, 4, 8]) for host in ("alpha", "beta", "gamma")[: draw.randint(1, 3)]})
    for number in range(30):
        play.submit(*some_job(draw, f"job-{number}", play, users=3, knows=draw.choice([0.0, 0.5, 1.0])))
        for _ in range(draw.randrange(10)):
            play.step(draw)
        alive = [name for name, job in play.tickets.items() if job.state != "ended" and job.is_active]
        if alive and draw.random() < 0.2:
            play.kill(draw.choice(alive), lingers_s=draw.choice([0.0, 5.0, 30.0]))
    play.play(draw, until=play.now + 2 * sum(play.lengths.values()) + 1000)
    assert [job.name for job in play.tickets.values() if job.is_active] == []


@pytest.mark.sample(15)
@pytest.mark.parametrize("knows", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(100))
def test_nobody_is_delayed_by_those_who_come_later(seed: int, knows: float) -> None:
    """Whoever begins before an earlier job leaves its promised beginning as it was.

    And once the jobs have ended that ran when it became the first to wait, that job begins: nobody of unknown length
    who got something in the meantime is in its way.
    """
    draw = random.Random(seed)
    play = Play({"alpha": draw.choice([2, 4]), "beta": draw.choice([2, 4])})
    first, ran = "", set[str]()
    for number in range(40):
        job, seconds = some_job(draw, f"job-{number:02}", play, users=1, knows=knows)
        play.submit(replace(job, expected_s=job.expected_s and seconds), seconds)
        for _ in range(draw.randrange(6)):
            before = len(play.grants)
            play.now += POLL_S
            play.end_those_whose_time_is_over()
            order = list(play.turns())
            for name, turn in play.turns().items():  # a job that has come in this moment has no promise yet
                play.tickets[name] = replace(play.tickets[name], reserved=turn.reserved)
            promises = {name: turn.begins for name, turn in play.turns().items()}
            if order and order[0] != first:
                first, ran = order[0], {name for name, job in play.tickets.items() if job.state == "running"}
            for name in draw.sample(order, len(order)):
                play.poll(name, play.turns()[name])
            later = {name: turn.begins for name, turn in play.turns().items()}
            for begun, *_ in play.grants[before:]:
                for name in set(order[: order.index(begun)]) & later.keys():
                    assert (later[name] or play.now) <= (promises[name] or play.now) + 1e-6, (begun, name)
            if first in later:
                imagined = replace(play, tickets=dict(play.tickets), held=dict(play.held))
                for name, job in play.tickets.items():
                    if name in ran or (job.state == "running" and job.expected_s):
                        imagined.free(name)
                assert imagined.turns()[first].units is not None, first


def test_a_big_job_is_not_starved_by_a_stream_of_small_ones() -> None:
    draw = random.Random(0)
    play = Play({"alpha": 4})
    for number in range(60):
        play.submit(Ticket(name=f"small-{number}", user="ann", kind="gpu", workers=1, hosts={"alpha": None}), 30.0)
        if number == 20:
            play.submit(Ticket(name="big", user="ann", kind="gpu", workers=4, hosts={"alpha": None}), 30.0)
        for _ in range(2):
            play.step(draw)
    began = next(began for name, began, _, _ in play.grants if name == "big")
    earlier = [name for name, begin, _, _ in play.grants if begin <= began]
    assert len(earlier) <= 25


def test_a_small_job_goes_first_if_that_delays_no_bigger_one() -> None:
    draw = random.Random(0)
    play = Play({"alpha": 4})
    play.submit(Ticket(name="runs", kind="gpu", workers=3, hosts={"alpha": None}, expected_s=100.0), 100.0)
    play.step(draw)
    play.submit(Ticket(name="big", kind="gpu", workers=4, hosts={"alpha": None}, expected_s=100.0), 100.0)
    for name, seconds in (("short", 50.0), ("long", 200.0)):
        play.submit(Ticket(name=name, kind="gpu", workers=1, hosts={"alpha": None}, expected_s=seconds), seconds)
    play.submit(Ticket(name="unknown", kind="gpu", workers=1, hosts={"alpha": None}), 10.0)
    play.play(draw)
    began = {name: begin for name, begin, _, _ in play.grants}
    assert began["short"] < began["big"] < began["long"]
    assert began["big"] < began["unknown"]
    assert began["big"] <= began["runs"] + 100.0 + POLL_S


def test_users_get_equal_shares_of_a_day() -> None:
    draw = random.Random(1)
    play = Play({"alpha": 2, "beta": 2})
    for number in range(120):
        user = draw.choice(["ann", "ann", "ann", "ann", "bob"])
        ticket = Ticket(name=f"{user}-{number}", user=user, kind="gpu", workers=1, hosts={"alpha": None, "beta": None})
        play.submit(ticket, 60.0)
    play.play(draw, until=play.now + 700.0)
    shares = {user: sum(name.startswith(user) for name, *_ in play.grants) for user in ("ann", "bob")}
    assert shares["bob"] >= 0.4 * sum(shares.values())


def test_after_another_job_whatever_its_end() -> None:
    draw = random.Random(2)
    play = Play({"alpha": 4})
    play.submit(Ticket(name="first", kind="gpu", hosts={"alpha": None}), 20.0)
    play.submit(Ticket(name="second", kind="gpu", hosts={"alpha": None}, after=["first"]), 5.0)
    play.submit(Ticket(name="third", kind="gpu", hosts={"alpha": None}, after=["gone"]), 5.0)
    play.play(draw)
    began = {name: begin for name, begin, _, _ in play.grants}
    assert began["second"] >= began["first"] + 20.0
    assert began["third"] == began["first"]
