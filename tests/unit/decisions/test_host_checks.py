"""Questions to hosts, and findings from their answers: no process, no network."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.api.backend import BackendConfig
from distrain.decisions.events import SendMessage
from distrain.decisions.host_checks import (
    MOST_PEERS,
    Finding,
    HostChecks,
    clock_findings,
    disk_findings,
    must_connect,
    peers_of,
    refusal,
    version_findings,
)
from distrain.system import __version__
from distrain.tensorflow.config import TensorflowConfig
from distrain.torch.config import TorchConfig
from tests.unit.decisions.test_run_machine import order, request

if TYPE_CHECKING:
    from collections.abc import Sequence

HELLO = {"wire": wire.WIRE_VERSION, "distrain": __version__, "python": "3.11.7"}
OWN = {"torch": "2.13.0", "cloudpickle": "3.1.2"}
PROBED = wire.HostProbed(nonce="nonce", versions=OWN)


# -- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", ["3.11.7", "3.11.0", "3.11.9+", "3.11.0rc1"])
def test_another_patch_of_the_same_python_is_welcome(python: str) -> None:
    assert refusal(HELLO, python) is None


@pytest.mark.parametrize("python", ["3.10.7", "3.1.1", "4.11.7"])
def test_another_python_is_refused(python: str) -> None:
    found = refusal(HELLO, python)
    assert found is not None
    assert f"it has Python 3.11.7, this machine {python}" in found


@pytest.mark.parametrize("other", [{"wire": 99}, {"distrain": "9.9.9"}, {"distrain": "9.9.9", "python": "2.7"}])
def test_another_distrain_is_refused_first_of_all(other: dict[str, Any]) -> None:
    found = refusal({**HELLO, **other}, "3.11.7")
    assert found is not None
    assert f"pip install distrain=={__version__}" in found


def findings(**theirs: str | None) -> list[tuple[str, bool]]:
    return [(found.text, found.is_fatal) for found in version_findings("alpha", {**OWN, **theirs}, OWN)]


def test_a_package_that_is_not_there_is_fatal() -> None:
    [(text, is_fatal)] = findings(torch=None)
    assert is_fatal
    assert text.startswith("its interpreter has no torch; install there: torch==2.13.0; or name")


@pytest.mark.parametrize("own", ["2.13.0", "2.13.0+cpu"])
def test_a_build_of_a_version_is_no_finding_and_is_not_asked_for(own: str) -> None:
    """No index has 2.13.0+cpu under this name, and a host with GPUs needs another build than a laptop."""
    assert version_findings("alpha", {"torch": "2.13.0+cu130"}, {"torch": own}) == []
    for theirs in ("2.12.1", None):
        [found] = version_findings("alpha", {"torch": theirs}, {"torch": own})
        assert "torch==2.13.0" in found.text
        assert "torch==2.13.0+" not in found.text


@pytest.mark.parametrize(("version", "is_fatal"), [("3.0.0", False), ("3.1.3", False), ("2.2.1", True)])
def test_only_another_generation_of_cloudpickle_is_fatal(version: str, is_fatal: bool) -> None:
    [(text, found_fatal)] = findings(cloudpickle=version)
    assert found_fatal == is_fatal
    assert ("pickles may not be compatible" in text) == is_fatal


# -- details ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free_bytes", "texts"),
    [(1 << 40, []), (-1, []), (3_000_000, ["only 3.0 MB are free"]), (0, ["only 0 B are free wh"])],
)
def test_a_disk_that_is_nearly_full_is_a_warning(free_bytes: int, texts: list[str]) -> None:
    """-1 means that it is not known."""
    found = disk_findings("alpha", free_bytes)
    assert [one.text[:20] for one in found] == texts
    assert not any(one.is_fatal for one in found)


@pytest.mark.parametrize(("ahead_s", "words"), [(7.04, "7.0 s ahead of"), (-3600.0, "3600.0 s behind")])
def test_a_clock_that_is_wrong_is_a_warning(ahead_s: float, words: str) -> None:
    [found] = clock_findings("alpha", ahead_s, 0.1)
    assert f"its clock is {words} this machine's" in found.text
    assert not found.is_fatal


# -- connections -----------------------------------------------------------------------------------------------------


def opened(number: int) -> wire.HostProbed:
    return replace(PROBED, address=f"10.0.0.{number}", port=1000 + number, interface="eth0")


def result(**failed: str) -> wire.HostProbed:
    return wire.HostProbed(nonce="nonce", failed_peers=failed)


def three() -> HostChecks:
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    return HostChecks(dict.fromkeys(addresses, wire.ProbeHost(nonce="")), addresses, nonce="nonce")


def questions(steps: Sequence[SendMessage | Finding]) -> dict[str, wire.ProbeHost]:
    assert all(isinstance(step, SendMessage) for step in steps)
    return {step.host: step.message for step in steps if isinstance(step, SendMessage)}


def found_in(steps: Sequence[SendMessage | Finding]) -> list[Finding]:
    assert all(isinstance(step, Finding) for step in steps)
    return [step for step in steps if isinstance(step, Finding)]


def test_who_cannot_connect_to_whom_is_reported_once_for_each_host() -> None:
    checks = three()
    for number, host in enumerate("abc", start=1):
        checks.handle(host, opened(number))
    checks.handle("a", result(c="no answer within 4 s"))
    assert checks.handle("b", result(c="no answer within 4 s", a="Connection refused")) == []
    first, second = found_in(checks.handle("c", result()))
    assert (first.host, first.is_fatal) == ("a", True)
    assert first.text.startswith("b cannot connect to it at 10.0.0.1 (eth0): Connection refused; allow TCP")
    assert second.text.startswith("a, b cannot connect to it at 10.0.0.3 (eth0): no answer within 4 s")
    assert checks.handle("c", result()) == []


def test_a_host_that_cannot_open_a_port_is_reported_and_nobody_connects_to_it() -> None:
    checks = three()
    checks.handle("a", opened(1))
    checks.handle("b", wire.HostProbed(nonce="nonce", failed="Network is unreachable"))
    asked = questions(checks.handle("c", opened(3)))
    assert {name: list(probe.peers) for name, probe in asked.items()} == {
        "a": ["c"], "b": ["a", "c"], "c": ["a"],
    }  # fmt: skip
    [found] = checks.connection_findings()
    assert found.host == "b"
    assert "other hosts can't reach it: Network is unreachable" in found.text


# -- a launch --------------------------------------------------------------------------------------------------------


def launch(**options: Any) -> HostChecks:
    """Return the checks of two hosts before they train together."""
    asked = request(["one", "two"], 2, **{"backend": TorchConfig(), **options})
    addresses = {host: f"at-{host}" for host in asked.hosts}
    questions = dict.fromkeys(asked.hosts, wire.ProbeHost(nonce="", packages=[*OWN]))
    return HostChecks(questions, addresses, nonce="nonce", own_versions=OWN, must_connect=must_connect(asked))


def blocked(checks: HostChecks) -> list[tuple[str, bool]]:
    checks.handle("one", opened(1))
    checks.handle("two", opened(2))
    assert checks.handle("one", result(two="no answer")) == []
    return [(found.host, found.is_fatal) for found in found_in(checks.handle("two", result()))]


@pytest.mark.parametrize(
    ("backend", "is_fatal"), [(TorchConfig(), True), (TensorflowConfig(), True), (BackendConfig(), False)]
)
def test_a_blocked_connection_is_fatal_only_where_ranks_meet(backend: BackendConfig, is_fatal: bool) -> None:
    assert blocked(launch(backend=backend)) == [("two", is_fatal)]


@pytest.mark.parametrize("name", ["MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_a_blocked_connection_is_a_warning_where_the_user_has_named_another_network(name: str) -> None:
    orders = {"one": order(1), "two": order(1, environment={name: "ib0"})}
    assert blocked(launch(hosts=orders)) == [("two", False)]


# -- many hosts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [MOST_PEERS + 2, 1000])
def test_many_hosts_connect_to_the_first_and_the_next(count: int) -> None:
    hosts = [f"h{number}" for number in range(count)]
    peers = peers_of(hosts)
    assert max(len(names) for names in peers.values()) <= MOST_PEERS + 1
    for position, host in enumerate(hosts):
        assert host not in peers[host]
        assert hosts[(position + 1) % count] in peers[host]
        assert host == "h0" or "h0" in peers[host]
    callers = Counter(name for names in peers.values() for name in names)
    assert min(callers.values()) >= MOST_PEERS
