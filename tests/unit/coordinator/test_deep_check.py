"""The steps of a deep check, with answers made up for each host; and what runs make of bad hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.api.config import ScalingConfig
from distrain.api.observer import AttemptBegan, AttemptEnded
from distrain.coordinator.connection.transport import LocalTransport
from distrain.coordinator.fitness import deep_check
from distrain.coordinator.fitness.deep_check import DeepCheck, Place
from distrain.coordinator.fitness.known_hosts import KnownHosts
from distrain.coordinator.fitness.spare_hosts import note_check, with_bad_hosts_last, without_broken_hosts
from distrain.coordinator.host_check import HostFacts
from distrain.decisions.fitness.verdicts import Fitness, Measurements
from distrain.decisions.host_checks import Finding
from distrain.errors import LaunchError, RankFailure
from distrain.hosts.hostfile import HostSpec
from distrain.storage.host_records import read_records
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = {
    "host": {"cpu": 1.0, "memory": 10.0, "disk_write": 500.0, "disk_read": 900.0, "shm": 20.0},
    "pair": {"send": 5.0, "all_reduce": 4.0, "latency": 50.0},
}


class Check:
    """A deep check of some hosts.

    answer: gets an order, the usual results, and the host or the two; returns results, or None if the host hangs.
    first: which of the open orders is answered first.
    """

    def __init__(
        self,
        hosts: str,
        answer: Callable[..., dict[str, float] | None] = lambda order, own, *hosts: own,
        *,
        machines: str = "",
        busy: str = "",
        made: list[DeepCheck] | None = None,
        first: int = 0,
    ) -> None:
        self.findings: list[Finding] = []
        self.orders: list[tuple[str, wire.Measure]] = []
        self.at_once: set[tuple[str, int]] = set()
        """Steps, and how many hosts owed an answer at the same time."""
        self._unanswered: list[tuple[str, wire.Measure]] = []
        loop = Loop()
        self.deep = DeepCheck(loop, "", Measurements(), self._send, self.findings.append)
        if made is not None:
            made.append(self.deep)
        machine = dict(zip(hosts, machines or hosts, strict=True))
        self.deep.begin({name: Place(machine=machine[name], address=name, interface="eth0") for name in hosts})
        while not self.deep.is_done:
            while self._unanswered:
                host, order = self._unanswered.pop(first)
                awaited = self.deep._awaited
                self.at_once.add((order.what, len(awaited)))
                results = answer(order, dict(RESULTS.get(order.what, {})), *awaited.get(host, ()))
                if results is not None:
                    is_start, share = order.what == "start", 0.8 if host in busy else 0.0
                    model, port = ("4 x CPU", 4000) if is_start else ("", 0)
                    failed = None if results or is_start else "no route"
                    self.deep.handle(
                        host, wire.Measured(results=results, model=model, port=port, busy=share, failed=failed)
                    )
            if not self.deep.is_done:
                loop.step()

    def _send(self, host: str, order: wire.Message) -> None:
        assert isinstance(order, wire.Measure)
        self.orders.append((host, order))
        self._unanswered.append((host, order))

    @property
    def slow(self) -> list[str]:
        return [name for name, one in self.deep.found.hosts.items() if one.slow]


def test_hosts_that_are_well_are_measured_once_and_meet_another() -> None:
    check = Check("abcd")
    assert check.findings == []
    assert [order.what for host, order in check.orders if host == "a"] == ["start", "host", "pair"]
    assert {len(one.links) for one in check.deep.found.hosts.values()} == {1}


def test_both_hosts_of_a_pair_meet_where_the_first_one_waits() -> None:
    first, second = (order for host, order in Check("ab").orders if order.what == "pair")
    assert (first.rank, second.rank) == (0, 1)
    assert {(one.number, one.address, one.port) for one in (first, second)} == {(first.number, "a", 4000)}


def test_the_order_of_answers_does_not_change_who_meets() -> None:
    for first in (0, -1):
        found = Check("abcd", first=first).deep.found
        assert found.pairs.keys() == {("a", "b"), ("c", "d")}


def test_a_second_measurement_decides() -> None:
    seen: list[str] = []

    def answer(order: wire.Measure, own: dict[str, float], host: str, *others: str) -> dict[str, float]:
        seen.append(f"{host} {order.what}")
        is_bad = (host == "b" and seen.count("b host") == 1) or host == "c"
        return own | {"cpu": 0.5} if order.what == "host" and is_bad else own

    check = Check("abcd", answer)
    assert (check.slow, seen.count("b host"), seen.count("c host")) == (["c"], 2, 3)
    assert [finding.text.partition(";")[0] for finding in check.findings] == [
        "slow: CPU 0.5 TFLOP/s, 50% of the median of 3 others (1)"
    ]


@pytest.mark.parametrize("broken", [False, True])
def test_a_slow_network_names_the_host(broken: bool) -> None:
    def answer(order: wire.Measure, own: dict[str, float], *hosts: str) -> dict[str, float]:
        return ({} if broken else own | {"send": 1.0}) if order.what == "pair" and "c" in hosts else own

    check = Check("abcde", answer)
    [found] = check.findings
    assert (check.slow, found.host, found.is_fatal) == (["c"], "c", broken)
    assert found.text.startswith("broken: " if broken else "slow: send 1 GB/s, 20% of the median of 4 others (5)")


def test_a_slow_connection_names_both_ends_and_blames_neither() -> None:
    def answer(order: wire.Measure, own: dict[str, float], *hosts: str) -> dict[str, float]:
        return own | {"latency": 9000.0} if order.what == "pair" and set(hosts) == {"a", "b"} else own

    check = Check("abcdef", answer)
    assert (check.slow, [finding.host for finding in check.findings]) == ([], ["a", "b"])
    start = "the connection between a and b, but not those to other hosts, is slow: latency 9000 µs, 180.0 times"
    assert {finding.text[: len(start)] for finding in check.findings} == {start}


def test_a_host_that_hangs_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_check, "TIMEOUT_S", 0.05)
    check = Check("abc", lambda order, own, *hosts: None if (order.what, *hosts) == ("host", "b") else own)
    [found] = check.findings
    assert (found.host, found.is_fatal) == ("b", True)
    assert found.text.startswith("it hangs: no answer within 0.05 s when it is measured; look there for")
    assert list(check.deep.found.hosts) == ["a", "c"]
    assert list(check.deep.found.hosts["a"].links) == ["c"]


def test_a_host_that_is_lost_takes_no_part_and_its_partner_is_not_blamed() -> None:
    deep: list[DeepCheck] = []

    def answer(order: wire.Measure, own: dict[str, float], *hosts: str) -> dict[str, float]:
        if order.what == "pair" and "b" in hosts:
            deep[0].lost("b")
            return {}  # a fails, too
        return own

    check = Check("abcd", answer, made=deep)
    assert (check.findings, list(check.deep.found.hosts)) == ([], ["a", "c", "d"])


def test_what_other_programs_disturb_is_not_judged() -> None:
    def answer(order: wire.Measure, own: dict[str, float], *hosts: str) -> dict[str, float]:
        return own | {"cpu": 0.6} if (order.what, *hosts) == ("host", "b") else own

    check = Check("abc", answer, busy="b")
    assert check.slow == []
    assert [finding.text for finding in check.findings] == [
        "other programs use more than 15% of its CPUs, so its CPU was not judged"
    ]
    assert Check("abc", busy="b").findings == []  # its results are good all the same


def test_hosts_on_one_machine_take_turns() -> None:
    assert {at_once for what, at_once in Check("abcd").at_once if what == "host"} == {4, 3, 2, 1}
    assert {at_once for what, at_once in Check("abcd", machines="xxyy").at_once if what == "host"} == {2, 1}


# -- what runs make of it ----------------------------------------------------------------------------------------------


def transports(*names: str) -> list[LocalTransport]:
    return [LocalTransport(host=HostSpec(name=name, slots=1)) for name in names]


def names(found: Any) -> list[str]:
    return [one.host.name for one in found]


def test_broken_hosts_are_left_out() -> None:
    hosts, hangs = transports("a", "b", "c"), [Finding("b", "it hangs"), Finding("c", "slow", is_fatal=False)]
    assert names(without_broken_hosts(hosts, ScalingConfig(num_workers=2), hangs)) == ["a", "c"]
    assert names(without_broken_hosts(hosts, ScalingConfig(num_workers=(1, 3)), hangs)) == ["a", "c"]
    with pytest.raises(LaunchError, match=r"too few hosts are fit for this run.*\n    b: it hangs"):
        without_broken_hosts(hosts, ScalingConfig(num_workers=3), hangs)


def test_hosts_that_were_bad_are_remembered_and_come_last() -> None:
    observer = KnownHosts("run-1")
    lost = RankFailure(
        rank=1, host="b", order=0, summary="gone", traceback="", exit_code=1, consequence=False, kind="lost"
    )
    observer.hear(AttemptBegan(0, ["b", "b"], 0.0))
    observer.hear(AttemptEnded(0, [lost], None, dict))
    assert read_records().troubles == []
    observer.hear(AttemptBegan(1, ["a", "b"], 0.0))
    observer.hear(AttemptEnded(1, [lost], None, dict))
    for number in range(9):
        kind = ("signal", "memory", "hang", "exit", "exception")[number % 5]
        observer.hear(AttemptEnded(1, [replace(lost, host="c", kind=kind)], None, dict))
    assert list(read_records().bad_hosts()) == ["b"], "what the user's code does is no evidence against a host"
    assert read_records().troubles[0] | {"time": 0} == {
        "host": "b", "time": 0, "what": "lost", "text": "gone", "run": "run-1",
    }  # fmt: skip
    hosts = transports("a", "b", "c", "d")
    assert names(with_bad_hosts_last(hosts, ScalingConfig(num_workers=2))) == ["a", "c", "d", "b"]
    assert names(with_bad_hosts_last(hosts, ScalingConfig(num_workers=4))) == ["a", "b", "c", "d"]


def test_slow_hosts_of_a_check_become_spare_ones() -> None:
    facts = {"a": HostFacts(fitness=Fitness("4 x CPU", {"cpu": 0.5}, slow="slow: CPU; look there")), "b": HostFacts()}
    note_check(facts)
    assert read_records().bad_hosts()["a"]["text"] == "slow: CPU"
    assert names(with_bad_hosts_last(transports("a", "b"), ScalingConfig(num_workers=1))) == ["b", "a"]
