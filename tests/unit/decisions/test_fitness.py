"""Which host or connection is slow, from measurements with noise."""

from __future__ import annotations

import random

import pytest

from distrain.decisions.fitness.rates import slow_results
from distrain.decisions.fitness.verdicts import Fitness, Hosts, Measurements, first_round, second_round

HOSTS = [f"host{number}" for number in range(16)]


def judged(hosts: list[str], rate, rng: random.Random) -> list[str]:
    """Measure pairs as a check does; return the slow hosts, or the ends of slow connections after a star."""
    found = Measurements({host: Fitness("4 x CPU") for host in hosts})

    def measure(pairs: list[Hosts]) -> None:
        for _ in range(2):  # the better result counts
            for pair in pairs:
                found.add_pair(pair, {"send": rate(pair) * rng.gauss(1.0, 0.1)}, "")
            pairs = found.suspects(pairs)

    first = first_round(hosts)
    measure(first)
    measure(second_round(first, found.suspects(first)))
    findings = found.judge()
    slow = [host for host, one in found.hosts.items() if one.slow]
    return [*slow, *(f"*{finding.host}" for finding in findings if "the connection between" in finding.text)]


@pytest.mark.parametrize("count", [3, 4, 5, 16])
def test_a_slow_host_is_named_in_50_of_50_trials(count: int) -> None:
    for seed in range(50):
        rng = random.Random(seed)
        slow = rng.choice(HOSTS[:count])
        found = judged(HOSTS[:count], lambda pair, slow=slow: 3.0 if slow in pair else 10.0, rng)
        assert found == [slow], seed


def test_a_slow_connection_is_named_in_50_of_50_trials() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        slow = rng.choice(first_round(HOSTS))
        found = judged(HOSTS, lambda pair, slow=slow: 3.0 if pair == slow else 10.0, rng)
        assert found == [f"*{host}" for host in slow], seed


def test_noise_is_no_alarm_in_50_of_50_trials() -> None:
    for seed in range(50):
        assert judged(HOSTS, lambda pair: 10.0, random.Random(seed)) == []


def test_hosts_are_compared_with_their_kind() -> None:
    results = {"old": {"cpu": 1.0}, "a": {"cpu": 4.0}, "b": {"cpu": 4.2}, "c": {"cpu": 1.5}}
    kinds = {"old": "small", "a": "large", "b": "large", "c": "large"}
    assert list(slow_results(results, kinds, [])) == ["c"]


def test_busy_hosts_are_not_judged_by_their_cpus_and_their_network_must_be_much_slower() -> None:
    results = {"a": {"cpu": 1.0, "send": 5.0}, "b": {"cpu": 10.0, "send": 2.0}, "c": {"cpu": 10.0, "send": 10.0}}
    found = slow_results(results, dict.fromkeys(results, ""), ["a", "b"])
    doubts = {(host, one.name): one.is_doubtful for host, several in found.items() for one in several}
    assert doubts == {("a", "cpu"): True, ("a", "send"): True, ("b", "send"): False}
