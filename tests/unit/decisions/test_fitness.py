"""Which host or connection is slow, from measurements with noise."""

from __future__ import annotations

import random

import pytest

from distrain.decisions.fitness.pairs import Verdict, first_round, second_round, verdicts
from distrain.decisions.fitness.rates import slow_hosts, slow_pairs, slow_result

HOSTS = [f"host{number}" for number in range(16)]


def judged(hosts: list[str], rate, rng: random.Random) -> list[Verdict]:
    """Measure pairs as a check does: what looks slow is measured again, and the better result counts."""
    results: dict[tuple[str, str], dict[str, float]] = {}

    def measure(pair: tuple[str, str]) -> None:
        value = rate(pair) * rng.gauss(1.0, 0.1)
        results[pair] = {"send": max(value, results.get(pair, {}).get("send", 0.0))}

    first = first_round(hosts)
    for pairs in (first, lambda: second_round(first, slow_pairs(results, {}))):
        for pair in pairs if isinstance(pairs, list) else pairs():
            measure(pair)
        for pair in slow_pairs(results, {}):
            measure(pair)
    return verdicts(list(results), slow_pairs(results, {}))


@pytest.mark.parametrize("count", [4, 5, 16])
def test_a_slow_host_is_named_in_50_of_50_trials(count: int) -> None:
    for seed in range(50):
        rng = random.Random(seed)
        slow = rng.choice(HOSTS[:count])
        found = judged(HOSTS[:count], lambda pair, slow=slow: 3.0 if slow in pair else 10.0, rng)
        assert found == [Verdict("host", (slow,))], seed


def test_a_slow_connection_is_named_in_50_of_50_trials() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        slow = rng.choice([*first_round(HOSTS), *second_round(first_round(HOSTS), ())])
        found = judged(HOSTS, lambda pair, slow=slow: 3.0 if pair == slow else 10.0, rng)
        assert found == [Verdict("link", slow)], seed


def test_noise_is_no_alarm_in_50_of_50_trials() -> None:
    for seed in range(50):
        assert judged(HOSTS, lambda pair: 10.0, random.Random(seed)) == []


def test_two_slow_hosts_that_meet_each_other_are_both_named() -> None:
    found = judged(HOSTS, lambda pair: 3.0 if {"host4", "host5"} & {*pair} else 10.0, random.Random(0))
    assert found == [Verdict("host", ("host4",)), Verdict("host", ("host5",))]


def test_where_the_pairs_cannot_tell_it_is_said() -> None:
    assert verdicts([("a", "b")], [("a", "b")]) == [Verdict("either", ("a", "b"))]
    first = first_round(HOSTS[:4])
    pairs = [*first, *second_round(first, first)]
    assert len(pairs) == 4
    assert verdicts(pairs, pairs) == [Verdict("all", tuple(HOSTS[:4]))]


def test_each_host_is_in_a_pair_and_no_pair_is_measured_twice() -> None:
    for count in range(2, 20):
        hosts = [f"host{number}" for number in range(count)]
        first = first_round(hosts)
        assert {host for pair in first for host in pair} == set(hosts)
        for slow in ([], first[:1], first[1:], first):
            pairs = [frozenset(pair) for pair in [*first, *second_round(first, slow)]]
            assert len(set(pairs)) == len(pairs)
            assert all(len(pair) == 2 for pair in pairs)
    assert first_round(["alone"]) == []


def test_hosts_are_compared_with_their_kind_and_their_past() -> None:
    results = {"old": {"cpu": 1.0}, "a": {"cpu": 4.0}, "b": {"cpu": 4.2}, "c": {"cpu": 1.5}}
    kinds = {"old": "small", "a": "large", "b": "large", "c": "large"}
    assert list(slow_hosts(results, kinds, {})) == ["c"]
    [slow] = slow_hosts({"old": {"cpu": 1.0}}, kinds, {"old": [{"cpu": 2.0}] * 3})["old"]
    assert str(slow) == "CPU 1 TFLOP/s, 50% of its own median of 3 checks (2)"
    assert not slow_hosts({"old": {"cpu": 1.0}}, kinds, {"old": [{"cpu": 2.0}] * 2})


def test_pairs_of_busy_hosts_must_be_much_slower() -> None:
    results = {("a", "b"): {"send": 5.0}, ("c", "d"): {"send": 10.0}, ("e", "f"): {"send": 2.0}}
    assert list(slow_pairs(results, {})) == [("a", "b"), ("e", "f")]
    assert list(slow_pairs(results, {}, ["b", "e"])) == [("e", "f")]


def test_a_latency_must_be_much_higher_to_be_slow() -> None:
    assert slow_result("latency", 250.0, [50.0, 60.0], []) is None
    assert str(slow_result("latency", 5000.0, [100.0], [])) == "latency 5000 µs, 50.0 times the median of 1 other (100)"
