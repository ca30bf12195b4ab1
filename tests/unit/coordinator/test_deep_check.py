"""The steps of a deep check, with answers made up for each host; and what runs make of bad hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distrain import wire
from distrain.api.config import ScalingConfig
from distrain.api.observer import AttemptBegan, AttemptEnded
from distrain.coordinator.connection.transport import LocalTransport
from distrain.coordinator.fitness import deep_check
from distrain.coordinator.fitness.deep_check import DeepCheck, Place
from distrain.coordinator.fitness.known_hosts import KnownHosts
from distrain.coordinator.fitness.spare_hosts import with_bad_hosts_last, without_broken_hosts
from distrain.decisions.fitness.verdicts import Measurements
from distrain.decisions.host_checks import Finding
from distrain.errors import LaunchError, RankFailure
from distrain.hosts.hostfile import HostSpec
from distrain.storage.host_records import read_records
from distrain.system.loop import Loop

RESULTS = {"host": {"cpu": 1.0, "memory": 10.0}, "pair": {"send": 5.0, "latency": 50.0}}


def test_a_host_that_hangs_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_check, "TIMEOUT_S", 0.05)
    loop, findings, orders = Loop(), list[Finding](), list[tuple[str, Any]]()
    check = DeepCheck(loop, "", Measurements(), lambda host, order: orders.append((host, order)), findings.append)
    check.begin({name: Place(machine=name, address=name, interface="eth0") for name in "abc"})
    while not check.is_done:
        while orders:
            host, order = orders.pop(0)
            if (host, order.what) != ("b", "host"):
                check.handle(host, wire.Measured(results=RESULTS.get(order.what, {}), model="4 x CPU", port=4000))
        if not check.is_done:
            loop.step()
    [found] = findings
    assert (found.host, found.is_fatal) == ("b", True)
    assert found.text.startswith("it hangs: no answer within 0.05 s when it is measured; look there for")
    assert list(check.found.hosts) == ["a", "c"]
    assert list(check.found.hosts["a"].links) == ["c"]


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
