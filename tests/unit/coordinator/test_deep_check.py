"""The steps of a deep check, with answers made up for each host; and what runs make of bad hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.api.config import ScalingConfig
from distrain.api.observer import AttemptBegan, AttemptEnded, BecameSlow
from distrain.coordinator.connection.transport import LocalTransport
from distrain.coordinator.fitness import deep_check
from distrain.coordinator.fitness.deep_check import DeepCheck, HostFitness
from distrain.coordinator.fitness.known_hosts import KnownHosts
from distrain.coordinator.fitness.spare_hosts import note_check, with_bad_hosts_last, without_bad_hosts
from distrain.coordinator.host_check import HostFacts
from distrain.decisions.host_checks import Finding
from distrain.errors import LaunchError, RankFailure
from distrain.hosts.hostfile import HostSpec
from distrain.storage.host_records import HostRecords
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = {
    "compute": {"cpu": 1.0, "busy": 0.0},
    "memory": {"memory": 10.0},
    "disk": {"disk_write": 500.0, "disk_read": 900.0},
    "shm": {"shm": 20.0, "shm_bytes": 1e9},
    "pair": {"send": 5.0, "all_reduce": 4.0, "latency": 50.0},
}


class Check:
    """A deep check of some hosts.

    answer: gets an order, the usual results, and the host or the two; returns results, or None if the host hangs.
    """

    def __init__(
        self,
        hosts: str,
        answer: Callable[..., dict[str, float] | None] = lambda order, own, *hosts: own,
        *,
        machines: str = "",
        history: dict[str, Any] | None = None,
    ) -> None:
        self.findings: list[Finding] = []
        self.orders: list[tuple[str, wire.Measure]] = []
        self.at_once: set[tuple[str, int]] = set()
        """Steps, and how many tasks were done at the same time."""
        self._unanswered: list[tuple[str, wire.Measure]] = []
        loop = Loop()
        self.deep = DeepCheck(loop, folder="", history=history or {}, send=self._send, report=self.findings.append)
        machine = dict(zip(hosts, machines or hosts, strict=True))
        self.deep.begin({name: HostFitness(machine=machine[name], address=name, interface="eth0") for name in hosts})
        while not self.deep.is_done:
            while self._unanswered:
                host, order = self._unanswered.pop(0)
                facts = {"cpu": "4 x CPU", "gpus": []} if order.what == "start" else {}
                running = self.deep._running
                self.at_once.add((order.what, len(running)))
                results = answer(order, dict(RESULTS.get(order.what, {})), *running[order.number].hosts)
                if results is not None:
                    port = 4000 if order.what == "listen" else 0
                    self.deep.handle(host, wire.Measured(number=order.number, results=results, facts=facts, port=port))
            if not self.deep.is_done:
                loop.step()

    def _send(self, host: str, order: wire.Message) -> None:
        assert isinstance(order, wire.Measure)
        self.orders.append((host, order))
        self._unanswered.append((host, order))

    @property
    def slow(self) -> list[str]:
        return [name for name, one in self.deep.hosts.items() if one.is_slow]


def test_hosts_that_are_well_are_measured_once_and_meet_two_others() -> None:
    check = Check("abcd")
    assert check.findings == []
    assert [order.what for host, order in check.orders if host == "a" and order.what not in ("listen", "pair")] == [
        "start", "compute", "memory", "disk", "shm",
    ]  # fmt: skip
    assert {len(one.links) for one in check.deep.hosts.values()} == {2}


def test_a_second_measurement_decides() -> None:
    seen: list[str] = []

    def answer(order: wire.Measure, own: dict[str, float], host: str, *others: str) -> dict[str, float]:
        seen.append(f"{host} {order.what}")
        is_bad = (host == "b" and seen.count("b compute") == 1) or host == "c"
        return {name: value / 2 for name, value in own.items()} if order.what == "compute" and is_bad else own

    check = Check("abcd", answer)
    assert check.slow == ["c"]
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
    how = "broken" if broken else "slow"
    assert found.text.startswith(f"its network is {how}, with each of the hosts that were tried: ")


def test_a_slow_connection_names_both_ends_and_blames_neither() -> None:
    def answer(order: wire.Measure, own: dict[str, float], *hosts: str) -> dict[str, float]:
        return own | {"latency": 9000.0} if order.what == "pair" and set(hosts) == {"a", "b"} else own

    check = Check("abcdef", answer)
    assert (check.slow, [finding.host for finding in check.findings]) == ([], ["a", "b"])
    start = "the connection between a and b is slow, but not those to other hosts: latency 9000 µs, 180.0 times"
    assert {finding.text[: len(start)] for finding in check.findings} == {start}


def test_a_host_that_hangs_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_check, "TIMEOUTS_S", dict.fromkeys(deep_check.TIMEOUTS_S, 0.05))
    check = Check("abc", lambda order, own, *hosts: None if (order.what, *hosts) == ("disk", "b") else own)
    [*_, found] = check.findings
    assert (found.host, found.is_fatal) == ("b", True)
    assert found.text.startswith("it hangs: not done within 0.05 s when it is measured (disk); look there for")
    assert list(check.deep.hosts) == ["a", "c"]
    assert list(check.deep.hosts["a"].links) == ["c"]


def test_a_busy_host_is_not_judged_by_its_cpus() -> None:
    def answer(order: wire.Measure, own: dict[str, float], *hosts: str) -> dict[str, float]:
        return {"cpu": 0.1, "busy": 0.8} if (order.what, *hosts) == ("compute", "b") else own

    check = Check("abc", answer)
    assert check.slow == []
    assert [finding.text for finding in check.findings] == [
        "other programs use more than 15% of its CPUs, so its CPU was not judged; look there with top"
    ]


def test_hosts_on_one_machine_take_turns() -> None:
    assert {at_once for what, at_once in Check("abcd").at_once if what == "compute"} == {4, 3, 2, 1}
    assert {at_once for what, at_once in Check("abcd", machines="xxyy").at_once if what == "compute"} == {2, 1}


def test_without_others_the_past_of_the_host_counts() -> None:
    past = [{"what": "check", "kind": "4 x CPU", "results": {"cpu": 3.0}}] * 3
    assert Check("a", history={"a": past}).slow == ["a"]
    other_kind = [{**one, "kind": "8 x CPU"} for one in past]
    assert Check("a", history={"a": other_kind}).slow == []


# -- what runs make of it ----------------------------------------------------------------------------------------------


def transports(*names: str) -> list[LocalTransport]:
    return [LocalTransport(host=HostSpec(name=name, slots=1)) for name in names]


def fit(*, is_slow: bool = False) -> HostFacts:
    return HostFacts(fitness=HostFitness(machine="", address="", interface="", kind="4 x CPU", is_slow=is_slow))


def names(found: Any) -> list[str]:
    return [one.host.name for one in found]


def test_spare_hosts_take_the_place_of_bad_ones() -> None:
    hosts, facts = transports("a", "b", "c"), {"a": fit(), "b": fit(is_slow=True), "c": fit()}
    findings = [Finding("b", "slow", is_fatal=False)]
    assert names(without_bad_hosts(hosts, ScalingConfig(num_workers=2), findings, facts)) == ["a", "c"]
    assert names(without_bad_hosts(hosts, ScalingConfig(num_workers=3), findings, facts)) == ["a", "b", "c"]
    assert names(without_bad_hosts(hosts, ScalingConfig(num_workers=(1, 3)), findings, facts)) == ["a", "c"]
    hangs = [Finding("b", "it hangs")]
    with pytest.raises(LaunchError, match=r"too few hosts are fit for this run.*\n    b: it hangs"):
        without_bad_hosts(hosts, ScalingConfig(num_workers=3), hangs, facts)


def test_hosts_that_were_bad_are_remembered_and_come_last(caplog: pytest.LogCaptureFixture) -> None:
    observer = KnownHosts("run-1")
    lost = RankFailure(
        rank=1, host="b", order=0, summary="gone", traceback="", exit_code=1, consequence=False, kind="lost"
    )
    observer.hear(AttemptBegan(0, ["b", "b"], 0.0))
    observer.hear(AttemptEnded(0, [lost], None, dict))
    assert HostRecords().hosts() == []
    observer.hear(AttemptBegan(1, ["a", "b"], 0.0))
    observer.hear(AttemptEnded(1, [lost], None, dict))
    for attempt in range(2, 5):
        assert HostRecords().latest_trouble("c") is None
        observer.hear(AttemptBegan(attempt, ["a", "c"], 0.0))
        for _ in range(2):
            observer.hear(BecameSlow(0, "c", 2.0, "reports", None, "", 0.0))
    assert HostRecords().troubles("b")[0] | {"time": 0} == {"time": 0, "what": "lost", "text": "gone", "run": "run-1"}
    hosts = transports("a", "b", "c", "d")
    assert names(with_bad_hosts_last(hosts, ScalingConfig(num_workers=2))) == ["a", "d", "b", "c"]
    assert names(with_bad_hosts_last(hosts, ScalingConfig(num_workers=4))) == ["a", "b", "c", "d"]
    note_check({"d": fit(is_slow=True)}, [Finding("d", "slow: CPU; look there", is_fatal=False)])
    assert HostRecords().latest_trouble("d")["text"] == "slow: CPU"
