"""``distrain check --deep``: measure each host, then pairs of hosts, and find what is slow. Runs in: coordinator.

Each step has a timeout, and a host that does not answer in time is named. Hosts that are on the same machine, such as
containers, take turns, because they would slow each other down.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.decisions.fitness.pairs import first_round, second_round, verdicts
from distrain.decisions.fitness.rates import LEAST_SHM_BYTES, MOST_BUSY, RULES, shown, slow_hosts, slow_pairs
from distrain.decisions.host_checks import Finding
from distrain.system.text import size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from distrain.decisions.fitness.pairs import Pair, Verdict
    from distrain.decisions.fitness.rates import Slow
    from distrain.system.loop import Loop

TIMEOUTS_S = {"start": 60.0, "compute": 15.0, "memory": 10.0, "disk": 20.0, "shm": 10.0, "pair": 25.0}
"""Seconds that a host, or a pair of hosts, has for each step. ``start`` imports torch. The last one is for pairs."""
_REPETITIONS = 2
"""How often a pair that looks slow is measured again. The best result counts."""
_STEPS = {"compute": ("cpu", "gpu"), "memory": ("memory",), "disk": ("disk_write", "disk_read"), "shm": ("shm",)}
"""The steps of each host alone, and what they measure."""


@dataclass(slots=True, kw_only=True)
class HostFitness:
    """The measurements of one host.

    machine: hosts with the same one take turns. address, interface: where others connect; an empty address is unknown.
    kind: what must be equal for a comparison with others, empty if it cannot be measured. results: by the names of
    :data:`~distrain.decisions.fitness.rates.OF_HOST`. busy: names of results that other programs have disturbed. links:
    by the names of its partners. is_slow: it is to blame.
    """

    machine: str
    address: str
    interface: str
    kind: str = ""
    has_gpus: bool = False
    shm_bytes: float = 0.0
    results: dict[str, float] = field(default_factory=dict)
    links: dict[str, dict[str, float]] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    is_slow: bool = False

    def judged(self) -> dict[str, float]:
        """Return the results that other programs have not disturbed."""
        return {name: value for name, value in self.results.items() if name not in self.busy}

    def best_link(self) -> dict[str, float]:
        """Return the best result of its pairs, by the names of :data:`~distrain.decisions.fitness.rates.OF_PAIR`."""
        found: dict[str, float] = {}
        for link in self.links.values():
            _keep_better(found, link)
        return found


@dataclass(slots=True, eq=False)
class _Task:
    """A step of one host, or of a pair of hosts. awaited: the hosts that owe an answer."""

    what: str
    hosts: tuple[str, ...]
    until: float = 0.0
    awaited: set[str] = field(default_factory=set)


class DeepCheck:
    """The measurements of hosts. :meth:`begin` starts them; ``is_done`` is true at their end.

    folder: the storage path, where disks are measured. history: by host, its records of earlier checks. send: sends an
    order to a host. report: gets the problems.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        folder: str,
        history: Mapping[str, Iterable[Mapping[str, Any]]],
        send: Callable[[str, wire.Message], None],
        report: Callable[[Finding], None],
    ) -> None:
        self._loop = loop
        self._folder = folder
        self._history = history
        self._send = send
        self._report = report
        self.hosts: dict[str, HostFitness] = {}
        """The hosts that were not lost, and have not hung."""
        self.is_done = False
        self._numbers = itertools.count(1)
        self._waiting: list[_Task] = []
        self._running: dict[int, _Task] = {}
        self._hung: set[str] = set()
        """Hosts whose measurers may still be busy with an order."""
        self._links: dict[Pair, dict[str, float]] = {}
        self._why: dict[Pair, str] = {}
        """Why a pair has no result."""
        self._steps: Generator[list[_Task]] | None = None

    def begin(self, hosts: Mapping[str, HostFitness]) -> None:
        """Measure these hosts, if that has not begun."""
        if self._steps is None:
            self.hosts = dict(hosts)
            self._steps = self._all_steps()
            self._continue()

    # -- the steps ------------------------------------------------------------------------------------------------

    def _all_steps(self) -> Generator[list[_Task]]:
        """Yield tasks that may be done at the same time. The generator continues when all of them have ended."""
        yield [_Task("start", (host,)) for host in self.hosts]
        for what in _STEPS:
            yield [_Task(what, (host,)) for host, one in self.hosts.items() if one.kind]
        slow = {host: {one.name for one in found} for host, found in self._slow_hosts().items()}
        doubtful = {host: slow.get(host, set()) | one.busy for host, one in self.hosts.items()}
        for what, names in _STEPS.items():
            yield [_Task(what, (host,)) for host, found in doubtful.items() if found & {*names}]
        pairs = first = first_round([host for host, one in self.hosts.items() if one.address and one.kind])
        for _ in range(2):
            yield [_Task("pair", pair) for pair in pairs]
            for _ in range(_REPETITIONS):
                yield [_Task("pair", pair) for pair in self._slow()]
            pairs = second_round(first, self._slow())
        self._conclude()

    def _past(self) -> dict[str, list[Mapping[str, float]]]:
        return {
            host: [past["results"] for past in self._history.get(host, ()) if past.get("kind") == one.kind]
            for host, one in self.hosts.items()
        }

    def _slow_hosts(self) -> dict[str, list[Slow]]:
        measured = {host: one for host, one in self.hosts.items() if one.kind}
        results = {host: one.judged() for host, one in measured.items()}
        return slow_hosts(results, {host: one.kind for host, one in measured.items()}, self._past())

    def _slow(self) -> dict[Pair, Slow | None]:
        return slow_pairs(self._links, self._past(), [host for host, one in self.hosts.items() if one.busy])

    # -- tasks ----------------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Start tasks whose machines are free. If none is left, take the next step."""
        while not self._waiting and not self._running and not self.is_done:
            assert self._steps is not None
            tasks = next(self._steps, None)
            self.is_done = tasks is None
            self._waiting = [task for task in tasks or () if self.hosts.keys() >= set(task.hosts)]
        for task in list(self._waiting):
            if not any(self._shares_machine(task, other) for other in self._running.values()):
                self._waiting.remove(task)
                self._start(task)
        if self._running:
            self._loop.call_at("deep check", min(task.until for task in self._running.values()), self._time_out)

    def _shares_machine(self, one: _Task, other: _Task) -> bool:
        machines = [{self.hosts[host].machine for host in task.hosts if host in self.hosts} for task in (one, other)]
        return one.what != "start" and bool(machines[0] & machines[1])

    def _start(self, task: _Task) -> None:
        number = next(self._numbers)
        task.until, task.awaited = time.monotonic() + TIMEOUTS_S[task.what], {task.hosts[0]}
        self._running[number] = task
        if task.what == "pair":
            self._links.setdefault((task.hosts[0], task.hosts[1]), {})
            self._order(task.hosts[0], number, "listen", address=self.hosts[task.hosts[0]].address)
        else:
            self._order(task.hosts[0], number, task.what, folder=self._folder)

    def _order(self, host: str, number: int, what: str, **more: Any) -> None:
        self._send(host, wire.Measure(number=number, what=what, afresh=host in self._hung, **more))
        self._hung.discard(host)

    def handle(self, host: str, answer: wire.Measured) -> None:
        """Take the answer of a host."""
        task = self._running.get(answer.number)
        if task is None or host not in task.awaited:
            return
        task.awaited.discard(host)
        if answer.failed is not None:
            self._failed(task, host, answer.failed)
        elif answer.port:
            self._meet(task, answer)
        elif task.what == "pair":
            _keep_better(self._links[task.hosts[0], task.hosts[1]], answer.results)
        else:
            self._note(self.hosts[host], answer)
        if not task.awaited:
            del self._running[answer.number]
            self._continue()

    def _meet(self, task: _Task, answer: wire.Measured) -> None:
        """Have both hosts of a pair connect to the port of the first one."""
        where = {"address": self.hosts[task.hosts[0]].address, "port": answer.port}
        on_gpu = all(self.hosts[host].has_gpus for host in task.hosts)
        task.awaited = set(task.hosts)
        for rank, host in enumerate(task.hosts):
            interface = self.hosts[host].interface
            self._order(host, answer.number, "pair", rank=rank, interface=interface, on_gpu=on_gpu, **where)

    def _note(self, host: HostFitness, answer: wire.Measured) -> None:
        if facts := answer.facts:
            host.kind, host.has_gpus = ", ".join([facts["cpu"], *facts["gpus"]]), bool(facts["gpus"])
        host.shm_bytes = answer.results.pop("shm_bytes", host.shm_bytes)
        is_busy = answer.results.pop("busy", 0.0) > MOST_BUSY
        host.busy = host.busy | answer.results.keys() if is_busy else host.busy - answer.results.keys()
        _keep_better(host.results, answer.results)

    def _failed(self, task: _Task, host: str, why: str) -> None:
        if task.what == "pair":
            self._why.setdefault((task.hosts[0], task.hosts[1]), f"{host}: {why}")
        else:
            needs = "; it needs torch there" if task.what == "start" else ""
            self._report(Finding(host, f"cannot measure it ({task.what}): {why}{needs}", is_fatal=False))

    def _time_out(self) -> None:
        """Give up tasks that take too long. A host that hangs alone is measured no more."""
        for number, task in list(self._running.items()):
            if task.until > time.monotonic():
                continue
            del self._running[number]
            self._hung |= task.awaited
            text = f"it hangs: not done within {TIMEOUTS_S[task.what]:g} s"
            for host in sorted(task.awaited):
                self._failed(task, host, text)
                if task.what != "pair":
                    self._drop(host)
                    cure = "look there for a driver, a disk or a file system that does not answer (dmesg, ps)"
                    self._report(Finding(host, f"{text} when it is measured ({task.what}); {cure}"))
        self._continue()

    def lost(self, host: str) -> None:
        """Continue without a lost host. Nobody is blamed for its pairs."""
        if host in self.hosts:
            self._drop(host)
            self._running = {number: task for number, task in self._running.items() if host not in task.hosts}
            self._continue()

    def _drop(self, host: str) -> None:
        self.hosts.pop(host)
        self._waiting = [task for task in self._waiting if host not in task.hosts]
        self._links = {pair: results for pair, results in self._links.items() if host not in pair}

    # -- the end --------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        for (host, other), results in self._links.items():
            self.hosts[host].links[other] = self.hosts[other].links[host] = results
        for host, fitness in self.hosts.items():
            if 0 < fitness.shm_bytes < LEAST_SHM_BYTES:
                text = f"its shared memory has only {size(int(fitness.shm_bytes))}, too little for DataLoader workers"
                cure = "start the container with --shm-size=8g or --ipc=host"
                self._report(Finding(host, f"{text}; {cure}", is_fatal=False))
            if fitness.busy:
                names = ", ".join(rule.name for name, rule in RULES.items() if name in fitness.busy)
                text = f"other programs use more than {MOST_BUSY:.0%} of its CPUs, so its {names} was not judged"
                self._report(Finding(host, f"{text}; look there with top", is_fatal=False))
        for host, found in self._slow_hosts().items():
            self.hosts[host].is_slow = True
            for one in found:
                self._report(Finding(host, f"slow: {one}; {one.rule.cure}", is_fatal=False))
        pairs = self._slow()
        for verdict in verdicts(list(self._links), pairs):
            of_host = verdict.kind == "host"
            meant = (pair for pair in pairs if (verdict.hosts[0] in pair if of_host else {*pair} <= {*verdict.hosts}))
            self._judge(verdict, {pair: pairs[pair] for pair in meant})

    def _judge(self, verdict: Verdict, slow: Mapping[Pair, Slow | None]) -> None:
        """Report what the pairs of hosts say. ``slow``: the slow pairs that show it."""
        pair, worst = next(((pair, one) for pair, one in slow.items() if one is not None), (next(iter(slow)), None))
        how = "slow" if worst is not None else "broken"
        why = str(worst) if worst is not None else self._why.get(pair, "no answer")
        between = f"the connection between {' and '.join(pair)} is {how}"
        texts = {
            "host": f"its network is {how}, with each of the hosts that were tried: {why}",
            "link": f"{between}, but not those to other hosts: {why}",
            "either": f"{between}, or one of the two hosts is, which a check with more hosts would tell: {why}",
            "all": f"all connections are {how}, so none of the hosts can be singled out: {why}",
        }
        if verdict.kind == "host":
            self.hosts[verdict.hosts[0]].is_slow = True
        cure = RULES["send"].cure if worst is None else worst.rule.cure
        for host in verdict.hosts:
            self._report(Finding(host, f"{texts[verdict.kind]}; {cure}", is_fatal=worst is None))


def columns(fitness: HostFitness) -> dict[str, str]:
    """Return the cells of a host for a table."""
    found = fitness.results | fitness.best_link()
    return {
        f"{rule.name} {rule.unit}": shown(found[name]) for name, rule in RULES.items() if rule.unit and name in found
    }


def _keep_better(results: dict[str, float], others: Mapping[str, float]) -> None:
    for name, value in others.items():
        results[name] = RULES[name].better(value, results.get(name))
