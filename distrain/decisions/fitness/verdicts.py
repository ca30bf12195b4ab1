"""Which host or connection is slow, from the measurements of a deep check. Runs in: coordinator.

In a first round of pairs, each host is measured with one other. Both hosts of a slow pair are suspects. In the second
round, each suspect is measured with a host that is known to be good. A host whose best connection is slow is to blame.
If each of two hosts has a good one, the connection between them is.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from distrain.decisions.fitness.rates import OF_PAIR, RULES, keep_better, slow_results
from distrain.decisions.host_checks import Finding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from distrain.decisions.fitness.rates import Results, Slow

Hosts: TypeAlias = tuple[str, ...]
"""A host, or a pair."""
MOST_BUSY = 0.15
"""Share of the CPU time that other programs may use. If it is more, results that depend on CPUs are not judged."""


@dataclass(slots=True)
class Fitness:
    """The findings of a deep check about a host.

    kind: what must be equal for a comparison with others; empty if the host was not measured. error: why a link is
    broken; it has 0 GB/s. busy: the share of the CPU time that other programs use. Known in the end: slow, why the host
    is to blame, empty if it is not; links, by the names of its partners; and among the results, those of the best link.
    """

    kind: str = ""
    results: Results = field(default_factory=dict)
    links: dict[str, Results] = field(default_factory=dict)
    error: str = ""
    busy: float = 0.0
    slow: str = ""


@dataclass(slots=True)
class Measurements:
    """The results of a deep check."""

    hosts: dict[str, Fitness] = field(default_factory=dict)
    pairs: dict[Hosts, Results] = field(default_factory=dict)

    def add_pair(self, pair: Hosts, results: Results, error: str) -> None:
        """Add a measurement of a pair. Of several, the better one counts. error: why there is none."""
        keep_better(self.pairs.setdefault(pair, {}), results)
        for host in pair:
            self.hosts[host].error = error or self.hosts[host].error

    def remove(self, host: str) -> None:
        """Forget a host and its pairs."""
        self.hosts.pop(host, None)
        self.pairs = {pair: link for pair, link in self.pairs.items() if host not in pair}

    def results(self) -> dict[str, Results]:
        """Return the results of each host, with those of its best link."""
        found = {host: dict(one.results) for host, one in self.hosts.items()}
        for pair, link in self.pairs.items():
            for host in pair:
                keep_better(found[host], link)
        return found

    def slow(self) -> dict[Hosts, list[Slow]]:
        """Return the slow results of each host, and of each pair, that has any."""
        busy = {host for host, one in self.hosts.items() if one.busy > MOST_BUSY}
        hosts = slow_results(self.results(), {host: one.kind for host, one in self.hosts.items()}, busy)
        pairs = slow_results(self.pairs, {}, [pair for pair in self.pairs if not busy.isdisjoint(pair)])
        return {**{(host,): slow for host, slow in hosts.items()}, **pairs}

    def suspects(self, measured: Iterable[Hosts]) -> list[Hosts]:
        """Return the hosts or pairs that look slow, and pairs with a host whose best connection does."""
        slow = self.slow()
        apart = {
            hosts[0] for hosts, found in slow.items() if len(hosts) == 1 and any(one.name in OF_PAIR for one in found)
        }
        return [hosts for hosts in measured if hosts in slow or (len(hosts) == 2 and not apart.isdisjoint(hosts))]

    def judge(self) -> list[Finding]:
        """Return the problems, and note for each host whether it is slow, and the results of its best link."""
        findings = []
        for names, slow in ((names, slow) for names, several in self.slow().items() for slow in several):
            hosts, rule = [self.hosts[name] for name in names], RULES[slow.name]
            why = f"slow: {slow.text}; {rule.cure}" if slow.value else f"broken: {hosts[0].error}"
            if slow.is_doubtful:
                why = f"other programs use more than {MOST_BUSY:.0%} of its CPUs, so its {rule.name} was not judged"
            elif len(hosts) == 1:
                hosts[0].slow = hosts[0].slow or why
            elif any(host.slow for host in hosts):
                continue
            else:
                why = f"the connection between {' and '.join(names)}, but not those to other hosts, is {why}"
            findings += [Finding(name, why, is_fatal=not slow.value) for name in names]
        for host, results in self.results().items():
            self.hosts[host].results = results
        for (one, other), link in self.pairs.items():
            self.hosts[one].links[other] = self.hosts[other].links[one] = link
        return findings


def first_round(hosts: Sequence[str]) -> list[Hosts]:
    """Return pairs with all hosts. If their number is odd, the last host is measured with both hosts of the first pair.

    So each host is left out of one pair, to which its own can be compared.

    >>> first_round(["a", "b", "c"])
    [('a', 'b'), ('a', 'c'), ('b', 'c')]
    """
    pairs: list[Hosts] = list(zip(hosts[::2], hosts[1::2], strict=False))
    return [*pairs, *((host, hosts[-1]) for host in hosts[:2])] if len(hosts) % 2 and pairs else pairs


def second_round(first: Sequence[Hosts], slow: Collection[Hosts]) -> list[Hosts]:
    """Return new pairs of suspects with good hosts; without any good host, of suspects. ``slow``: of the first round.

    >>> second_round([("a", "b"), ("c", "d"), ("e", "f")], slow=[("a", "b")])
    [('a', 'f'), ('b', 'e')]
    """
    good = dict.fromkeys(host for pair in first if pair not in slow for host in pair)
    suspects = [host for host in dict.fromkeys(itertools.chain(*slow)) if host not in good]
    # The first two hosts may have met the last one, so they come last.
    partners = itertools.cycle([*reversed(good)] or [*suspects[1:], *suspects[:1]])
    met = {frozenset(pair) for pair in first}
    return [pair for pair in zip(suspects, partners, strict=False) if frozenset(pair) not in met]
