"""``distrain check --deep``: measure each host, then pairs of hosts, and find what is slow. Runs in: coordinator.

Hosts that are on the same machine, such as containers, take turns, because they would slow each other down.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrain import wire
from distrain.decisions.fitness.rates import keep_better
from distrain.decisions.fitness.verdicts import Fitness, first_round, second_round
from distrain.decisions.host_checks import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from distrain.decisions.fitness.verdicts import Hosts, Measurements
    from distrain.system.loop import Loop

TIMEOUT_S = 60.0
"""Seconds that a host has for an answer. The first one takes longest, because the host imports torch."""
_MOST_TRIES = 3
"""How often something is measured that looks slow. The best result counts."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a host. address, interface: where others connect; an empty address is unknown."""

    machine: str
    address: str
    interface: str


@dataclass(slots=True, eq=False)
class DeepCheck:
    """The measurements of hosts. :meth:`begin` starts them; ``is_done`` is true at their end.

    folder: the storage path, where disks are measured. send: sends an order to a host. report: gets the problems.
    """

    loop: Loop
    folder: str
    found: Measurements
    send: Callable[[str, wire.Message], None]
    report: Callable[[Finding], None]
    is_done: bool = False
    _places: dict[str, Place] = field(default_factory=dict)
    """By host, without those that were lost or have not answered."""
    _ports: dict[str, int] = field(default_factory=dict)
    """By host: the port at which it waits for partners."""
    _awaited: dict[str, Hosts] = field(default_factory=dict)
    """By host that owes an answer: itself, or its pair."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _steps: Generator[Iterable[Hosts]] | None = None

    def begin(self, places: Mapping[str, Place]) -> None:
        """Measure these hosts, if that has not begun."""
        if self._steps is None:
            self._places = dict(places)
            self._steps = self._all_steps()
            self._continue()

    def _all_steps(self) -> Generator[Iterable[Hosts]]:
        """Yield hosts and pairs that may be measured at the same time. The next ones follow when all have answered."""
        yield [(host,) for host in self._places]  # they import torch
        yield from self._in_turns([(host,) for host in self.found.hosts])
        first = first_round([host for host in self._places if self._ports.get(host)])
        yield from self._in_turns(first)
        yield from self._in_turns(second_round(first, self.found.suspects(first)))
        for finding in self.found.judge():
            self.report(finding)
        self.is_done = True

    def _in_turns(self, wanted: list[Hosts]) -> Generator[Iterable[Hosts]]:
        """Yield hosts or pairs so that each machine has one at a time, and again those that look slow."""
        for _ in range(_MOST_TRIES):
            waiting = wanted
            while waiting := [hosts for hosts in waiting if self._places.keys() >= {*hosts}]:
                turn: dict[str, Hosts] = {}
                for hosts in waiting:
                    machines = {self._places[host].machine for host in hosts}
                    if turn.keys().isdisjoint(machines):
                        turn |= dict.fromkeys(machines, hosts)
                yield dict.fromkeys(turn.values())
                waiting = [hosts for hosts in waiting if hosts not in turn.values()]
            wanted = self.found.suspects(wanted)

    def _continue(self) -> None:
        """Give the next orders, once all hosts have answered."""
        while not self._awaited and not self.is_done:
            assert self._steps is not None
            for hosts in next(self._steps, ()):
                self._order(hosts)
            self.loop.call_in("deep check", TIMEOUT_S, self._time_out)

    def _order(self, hosts: Hosts) -> None:
        number, (first, *_) = next(self._numbers), hosts
        for rank, host in enumerate(hosts):
            self._awaited[host] = hosts
            order = wire.Measure(
                number=number,
                what="pair" if len(hosts) == 2 else "host" if host in self.found.hosts else "start",
                folder=self.folder,
                rank=rank,
                address=self._places[first].address,
                port=self._ports.get(first, 0),
                interface=self._places[host].interface,
                on_gpu=len(hosts) == 2 and all("gpu" in self.found.hosts[one].results for one in hosts),
            )
            self.send(host, order)

    def handle(self, host: str, answer: wire.Measured) -> None:
        """Take the answer of a host."""
        hosts = self._awaited.pop(host, ())
        if hosts and self._places.keys() >= {*hosts}:  # else one of a pair was lost
            self._note(host, hosts, answer)
        self._continue()

    def _note(self, host: str, hosts: Hosts, answer: wire.Measured) -> None:
        if len(hosts) == 2:
            error = f"{host}: {answer.failed}" if answer.failed else ""
            self.found.add_pair(hosts, answer.results or {"send": 0.0}, error)
        elif answer.failed is not None:
            self.report(Finding(host, f"can't measure this host: {answer.failed}; install torch there", is_fatal=False))
        elif host not in self.found.hosts:
            self.found.hosts[host], self._ports[host] = Fitness(answer.model), answer.port
        else:
            self.found.hosts[host].busy = answer.busy
            keep_better(self.found.hosts[host].results, answer.results)

    def _time_out(self) -> None:
        for host in list(self._awaited):
            text = f"it hangs: no answer within {TIMEOUT_S:g} s when it is measured"
            cure = "look there for a driver, a disk or a file system that does not answer (dmesg, ps)"
            self.report(Finding(host, f"{text}; {cure}"))
            self.lost(host)

    def lost(self, host: str) -> None:
        """Continue without a host. Nobody is blamed for its pairs."""
        if self._places.pop(host, None) is not None:
            self._awaited.pop(host, None)
            self.found.remove(host)
            self._continue()
