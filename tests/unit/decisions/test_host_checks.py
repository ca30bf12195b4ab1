"""What is wrong with hosts, from what they have answered: no process, no network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distrain import wire
from distrain.backend import BackendConfig
from distrain.decisions.host_checks import (
    LaunchChecks,
    Pairs,
    clock_findings,
    directory_findings,
    disk_findings,
    refusal,
    storage_findings,
    version_findings,
)
from distrain.decisions.placement import make_plan
from distrain.hosts.host import HostInfo
from distrain.system.version import __version__
from distrain.tensorflow.config import TensorflowConfig
from distrain.torch.config import TorchConfig
from tests.unit.decisions.test_run_machine import order, request

HELLO = {"wire": wire.WIRE_VERSION, "distrain": __version__, "python": "3.11.7"}
OWN = {"torch": "2.13.0", "cloudpickle": "3.1.2"}
INSPECTED = wire.InspectionResult(
    received=0.0, sent=0.0, versions=OWN, directory_problem=None, storage_problem=None, disk_free_bytes=1 << 40,
    memory_free_bytes=1 << 30,
)  # fmt: skip


# -- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", ["3.11.7", "3.11.0", "3.11.9+", "3.11.0rc1"])
def test_another_patch_of_the_same_python_is_welcome(python: str) -> None:
    assert refusal(HELLO, python) is None


@pytest.mark.parametrize("python", ["3.10.7", "3.1.1", "4.11.7"])
def test_another_python_is_refused(python: str) -> None:
    found = refusal(HELLO, python)
    assert found is not None
    assert found[0] == "python"
    assert f"it has Python 3.11.7, this machine {python}" in found[1]


@pytest.mark.parametrize("other", [{"wire": 99}, {"distrain": "9.9.9"}, {"distrain": "9.9.9", "python": "2.7"}])
def test_another_distrain_is_refused_first_of_all(other: dict[str, Any]) -> None:
    found = refusal({**HELLO, **other}, "3.11.7")
    assert found is not None
    assert found[0] == "distrain"
    assert f"pip install distrain=={__version__}" in found[1]


def findings(**theirs: str | None) -> list[tuple[str, bool]]:
    return [(found.text, found.is_fatal) for found in version_findings("alpha", {**OWN, **theirs}, OWN)]


def test_equal_versions_are_no_finding() -> None:
    assert findings() == []


def test_a_package_that_is_not_there_is_fatal() -> None:
    [(text, is_fatal)] = findings(torch=None)
    assert is_fatal
    assert text.startswith("it has no torch; install torch==2.13.0 there")


@pytest.mark.parametrize("version", ["2.13.0+cu130", "2.12.1", "3.0"])
def test_another_torch_is_a_warning(version: str) -> None:
    assert findings(torch=version) == [
        (f"it has torch {version}, this machine 2.13.0; install torch==2.13.0 there", False)
    ]


@pytest.mark.parametrize(("version", "is_fatal"), [("3.0.0", False), ("3.1.3", False), ("2.2.1", True)])
def test_only_another_generation_of_cloudpickle_is_fatal(version: str, is_fatal: bool) -> None:
    [(text, found_fatal)] = findings(cloudpickle=version)
    assert found_fatal == is_fatal
    assert ("pickles may not travel" in text) == is_fatal


def test_a_version_that_nobody_says_is_not_compared() -> None:
    assert findings(torch="") == []
    assert version_findings("alpha", OWN, {"torch": ""}) == []


def test_what_this_machine_does_not_have_others_need_not_have_either() -> None:
    assert version_findings("alpha", {"torch": None}, {"torch": None}) == []


# -- what was inspected ----------------------------------------------------------------------------------------------


def test_what_is_well_is_no_finding() -> None:
    assert not directory_findings("alpha", INSPECTED, "/work")
    assert not storage_findings("alpha", INSPECTED, "/runs")
    assert not disk_findings("alpha", INSPECTED, "/runs")
    assert not disk_findings("alpha", replace(INSPECTED, disk_free_bytes=0), "/runs")  # unknown


def test_directory_and_storage_are_named_with_what_was_seen() -> None:
    bad = replace(INSPECTED, directory_problem="No such file or directory", storage_problem="is another one")
    [directory] = directory_findings("alpha", bad, "/work")
    assert directory.text.startswith("no worker can run in /work: No such file or directory; create it, or set cwd=")
    [storage] = storage_findings("alpha", bad, "/runs")
    assert storage.text.startswith("the storage /runs is another one; mount one that all hosts share there")
    assert directory.is_fatal
    assert storage.is_fatal


def test_a_disk_that_is_nearly_full_is_a_warning() -> None:
    [found] = disk_findings("alpha", replace(INSPECTED, disk_free_bytes=3 << 20), "/runs")
    assert found.text.startswith("only 3 MiB are free in /runs")
    assert not found.is_fatal


@pytest.mark.parametrize(("ahead_s", "uncertain_s"), [(0.9, 0.0), (-1.0, 0.0), (3.0, 2.5), (0.0, 60.0)])
def test_a_clock_may_be_a_little_wrong(ahead_s: float, uncertain_s: float) -> None:
    assert not clock_findings("alpha", ahead_s, uncertain_s)


@pytest.mark.parametrize(("ahead_s", "words"), [(7.04, "7.0 s ahead of"), (-3600.0, "3600.0 s behind")])
def test_a_clock_that_is_wrong_is_a_warning(ahead_s: float, words: str) -> None:
    [found] = clock_findings("alpha", ahead_s, 0.1)
    assert f"its clock is {words} this machine's" in found.text
    assert not found.is_fatal


# -- pairs -----------------------------------------------------------------------------------------------------------


def listening(number: int) -> wire.ProbePortOpened:
    return wire.ProbePortOpened(nonce="nonce", address=f"10.0.0.{number}", port=1000 + number, interface="eth0")


def three(**addresses: str) -> Pairs:
    return Pairs({"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", **addresses}, "nonce")


def all_listen(pairs: Pairs) -> dict[str, wire.Message]:
    assert pairs.heard("a", listening(1)) == {}
    assert pairs.heard("b", listening(2)) == {}
    return pairs.heard("c", listening(3))


def test_every_host_calls_every_other_when_all_listen() -> None:
    pairs = three()
    assert pairs.begin()["b"] == wire.OpenProbePort(address="10.0.0.2", nonce="nonce")
    assert pairs.silent == ["a", "b", "c"]
    said = all_listen(pairs)
    assert said["b"] == wire.ProbePeers(peers={"a": ("10.0.0.1", 1001), "c": ("10.0.0.3", 1003)}, nonce="nonce")
    assert len(said) == 3
    for host, silent in (("b", "abc"), ("a", "ac"), ("c", "c")):
        assert pairs.silent == list(silent)
        assert not pairs.is_done
        assert pairs.heard(host, wire.ProbeResult(nonce="nonce", failed={})) == {}
    assert pairs.is_done
    assert pairs.findings() == []


def test_a_host_that_does_not_know_its_address_finds_it_toward_another() -> None:
    assert three(a="").begin()["a"] == wire.OpenProbePort(address="", nonce="nonce", peer="10.0.0.2")
    assert Pairs({"a": "", "b": ""}, "nonce").begin()["a"] == wire.OpenProbePort(address="", nonce="nonce", peer="")


def test_who_cannot_reach_whom_is_told_once_for_each_host() -> None:
    pairs = three()
    all_listen(pairs)
    pairs.heard("a", wire.ProbeResult(nonce="nonce", failed={"c": "no answer within 4 s"}))
    pairs.heard("b", wire.ProbeResult(nonce="nonce", failed={"c": "no answer within 4 s", "a": "Connection refused"}))
    pairs.heard("c", wire.ProbeResult(nonce="nonce", failed={}))
    first, second = pairs.findings()
    assert (first.host, first.about, first.is_fatal) == ("a", "peers", True)
    assert first.text.startswith("b cannot connect to it at 10.0.0.1 (eth0): Connection refused; let TCP through")
    assert second.text.startswith("a, b cannot connect to it at 10.0.0.3 (eth0): no answer within 4 s")


def test_many_callers_are_not_all_named() -> None:
    names = [f"h{number:02}" for number in range(20)]
    pairs = Pairs(dict.fromkeys(names, "10.0.0.1"), "nonce")
    for name in names:
        pairs.heard(name, listening(1))
    for name in names:
        pairs.heard(name, wire.ProbeResult(nonce="nonce", failed={"h00": "no"} if name != "h00" else {}))
    [found] = pairs.findings()
    assert found.text.startswith("h01, h02, h03, h04, h05, h06, h07, h08 and 11 others cannot connect")


def test_a_host_that_cannot_listen_is_told_and_not_called() -> None:
    pairs = three()
    pairs.heard("a", listening(1))
    pairs.heard("b", wire.ProbePortOpened(nonce="nonce", failed="Network is unreachable"))
    said = pairs.heard("c", listening(3))
    assert {name: list(reach.peers) for name, reach in said.items() if isinstance(reach, wire.ProbePeers)} == {
        "a": ["c"], "b": ["a", "c"], "c": ["a"],
    }  # fmt: skip
    [found] = pairs.findings()
    assert found.host == "b"
    assert "it has no address for the other hosts: Network is unreachable" in found.text


def test_a_host_that_is_lost_is_not_waited_for() -> None:
    pairs = three()
    pairs.heard("a", listening(1))
    pairs.heard("b", listening(2))
    assert pairs.silent == ["c"]
    assert set(pairs.lost("c")) == {"a", "b"}
    pairs.heard("a", wire.ProbeResult(nonce="nonce", failed={}))
    assert pairs.lost("b") == {}
    assert pairs.lost("b") == {}
    assert pairs.is_done


def test_who_was_lost_after_it_was_called_is_no_finding() -> None:
    pairs = three()
    all_listen(pairs)
    pairs.lost("b")
    pairs.heard("a", wire.ProbeResult(nonce="nonce", failed={"b": "no answer within 4 s"}))
    pairs.heard("c", wire.ProbeResult(nonce="nonce", failed={}))
    assert pairs.is_done
    assert pairs.findings() == []


def test_what_belongs_to_another_round_is_passed_over() -> None:
    pairs = three()
    assert pairs.heard("d", listening(4)) == {}
    all_listen(pairs)
    assert pairs.heard("a", wire.ProbePortOpened(nonce="before", address="10.0.0.9", port=9)) == {}
    assert pairs.heard("a", wire.ProbeResult(nonce="before", failed={"c": "no"})) == {}
    assert pairs.silent == ["a", "b", "c"]


# -- a launch --------------------------------------------------------------------------------------------------------


def launch(networks: dict[str, str] | None = None, **options: Any) -> LaunchChecks:
    asked = request(["one", "two"], 2, **{"backend": TorchConfig(), **options})
    networks = networks or {name: name for name in asked.hosts}
    hosts = [
        HostInfo(name=name, cpus=1, memory_bytes=0, slots=1, network=network, address=f"at-{name}")
        for name, network in networks.items()
    ]
    plan = make_plan(hosts, asked.scaling)
    return LaunchChecks(asked, plan, own=OWN, storage="/runs/run", probe_file="/runs/run/run.json", nonce="nonce")


def blocked(checks: LaunchChecks) -> list[tuple[str, bool]]:
    checks.heard("one", listening(1))
    checks.heard("two", listening(2))
    assert checks.heard("one", wire.ProbeResult(nonce="nonce", failed={"two": "no answer"}))[1] == []
    return [
        (found.host, found.is_fatal) for found in checks.heard("two", wire.ProbeResult(nonce="nonce", failed={}))[1]
    ]


def test_a_launch_asks_for_versions_and_storage_and_has_the_hosts_listen() -> None:
    said = launch().begin()
    assert [host for host, _ in said] == ["one", "two", "one", "two"]
    assert said[1][1] == wire.OpenProbePort(address="at-two", nonce="nonce")
    assert said[2][1] == wire.InspectHost(
        directory="/work", sys_path=["/work"], packages=["torch", "cloudpickle"], storage="/runs/run",
        probe_file="/runs/run/run.json", nonce="id",
    )  # fmt: skip


def test_a_launch_hears_of_versions_and_storage() -> None:
    bad = replace(INSPECTED, versions={**OWN, "torch": "2.0"}, storage_problem="is another one")
    said, found = launch().heard("one", bad)
    assert list(said) == []
    assert [(f.about, f.is_fatal) for f in found] == [("torch", False), ("storage", True)]


def test_a_host_whose_storage_hangs_is_a_warning() -> None:
    checks = launch()
    checks.heard("two", INSPECTED)
    [found] = checks.late(15.0)
    assert (found.host, found.is_fatal) == ("one", False)
    assert found.text == "it could not look at the storage /runs/run within 15 s: does it hang there?"


def test_a_launch_does_not_wait_for_a_host_that_is_lost() -> None:
    checks = launch()
    checks.heard("one", listening(1))
    checks.heard("one", INSPECTED)
    assert not checks.is_done
    assert [host for host, _ in checks.lost("two")] == ["one"]
    checks.heard("one", wire.ProbeResult(nonce="nonce", failed={}))
    assert checks.is_done
    assert checks.late(15.0) == []


def test_a_blocked_pair_ends_a_launch_whose_ranks_are_to_meet() -> None:
    assert blocked(launch()) == [("two", True)]


def test_a_blocked_pair_ends_a_launch_of_tensorflow() -> None:
    assert blocked(launch(backend=TensorflowConfig())) == [("two", True)]


def test_hosts_of_one_machine_meet_without_being_tried() -> None:
    said = launch(networks={"one": "same", "two": "same"}).begin()
    assert [(host, type(message)) for host, message in said] == [("one", wire.InspectHost), ("two", wire.InspectHost)]


def test_a_blocked_pair_is_a_warning_where_ranks_may_never_meet() -> None:
    assert blocked(launch(backend=BackendConfig())) == [("two", False)]


@pytest.mark.parametrize("name", ["MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_a_blocked_pair_is_a_warning_where_the_user_has_named_another_network(name: str) -> None:
    orders = {"one": order(1), "two": order(1, environment={name: "ib0"})}
    assert blocked(launch(hosts=orders)) == [("two", False)]
