"""Checks of a launch: its reaction to answers, and to none. No process, no network."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distrain.coordinator import launch_checks
from distrain.coordinator.launch_checks import LaunchChecks
from distrain.decisions.events import WorkersStart
from distrain.decisions.host_checks import ANSWER_TIMEOUT_S, Finding
from distrain.decisions.placement import make_plan
from distrain.hosts.host import HostInfo
from distrain.system.background import Background
from tests.unit.decisions.test_host_checks import OWN, PROBED
from tests.unit.decisions.test_run_machine import request

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.hosts.world import WorldPlan

NONCE = "0" * 32
OWN_VERSIONS = {"cloudpickle": OWN["cloudpickle"]}
GOOD = replace(PROBED, nonce=NONCE, versions=OWN_VERSIONS)
LACKING = replace(GOOD, versions={"cloudpickle": None})


class Launch:
    """The checks of a launch on hosts ``one`` and ``two``; collects findings and timers."""

    def __init__(self, **options: Any) -> None:
        self.request = request(["one", "two"], 2, **options)
        self.found: list[Finding] = []
        self.timers: dict[str, Callable[[], None]] = {}
        loop: Any = SimpleNamespace(call_in=self._call_in)
        ranks: Any = SimpleNamespace(send=lambda host, message: None)
        files: Any = SimpleNamespace(loop=loop, background=Background(None, "files"), ranks=ranks, imports=tuple)
        self.checks = LaunchChecks(self.request, files, self.found.append)

    def _call_in(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        assert delay_s == ANSWER_TIMEOUT_S
        self.timers[name] = callback

    def plan(self) -> WorldPlan:
        hosts = [HostInfo(name=name, cpus=1, memory_bytes=0, slots=1, network="same") for name in self.request.hosts]
        return make_plan(hosts, self.request.scaling)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_checks, "package_versions", lambda packages, path: OWN_VERSIONS)
    monkeypatch.setattr(launch_checks.uuid, "uuid4", lambda: SimpleNamespace(hex=NONCE))


@pytest.mark.parametrize("checks_hosts", [False, True])
def test_a_host_that_hangs_is_reported_once_and_only_a_check_of_hosts_fails(checks_hosts: bool) -> None:
    launch = Launch(checks_hosts=checks_hosts)
    launch.checks.begin(WorkersStart(launch.plan()))
    launch.checks.handle("two", GOOD)
    launch.timers["checks"]()
    launch.timers["checks"]()
    [found] = launch.found
    assert (found.host, found.text[:31], found.is_fatal) == ("one", "it has not answered within 15 s", checks_hosts)
    assert not launch.checks.is_under_way
    launch.checks.handle("one", LACKING)
    assert launch.found == [found]
