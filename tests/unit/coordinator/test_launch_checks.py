"""Checks of a launch: the questions that it sends, and its reaction to answers. No process, no network."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.coordinator import launch_checks
from distrain.coordinator.launch_checks import LaunchChecks
from distrain.decisions.host_checks import ANSWER_TIMEOUT_S
from distrain.decisions.placement import make_plan
from distrain.hosts.host import HostInfo
from distrain.system.background import Background
from tests.unit.decisions.test_host_checks import INSPECTED, OWN
from tests.unit.decisions.test_run_machine import order, request

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.hosts.world import WorldPlan

OWN_VERSIONS = {"cloudpickle": OWN["cloudpickle"]}
GOOD = replace(INSPECTED, versions=OWN_VERSIONS)
LACKING = replace(GOOD, versions={"cloudpickle": None})


class Launch:
    """The checks of a launch on hosts ``one`` and ``two``; collects questions, refusals and timers."""

    def __init__(self, **options: Any) -> None:
        self.request = request(["one", "two"], 2, **options)
        self.sent: list[tuple[str, type[wire.Message]]] = []
        self.refused: list[tuple[str, str]] = []
        self.timers: dict[str, Callable[[], None]] = {}
        loop: Any = SimpleNamespace(call_in=self._call_in)
        self.checks = LaunchChecks(
            loop,
            self.request,
            Background(None, "files"),
            send=lambda host, message: self.sent.append((host, type(message))),
            refuse=lambda host, why: self.refused.append((host, why)),
        )

    def _call_in(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        assert delay_s == ANSWER_TIMEOUT_S
        self.timers[name] = callback

    def plan(self, *networks: str) -> WorldPlan:
        hosts = [
            HostInfo(name=name, cpus=1, memory_bytes=0, slots=1, network=network, address=f"at-{name}")
            for name, network in zip(self.request.hosts, networks, strict=True)
        ]
        return make_plan(hosts, self.request.scaling)


@pytest.fixture(autouse=True)
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(launch_checks, "warn", texts.append)
    monkeypatch.setattr(launch_checks, "package_versions", lambda packages, path: OWN_VERSIONS)
    return texts


def test_hosts_of_two_networks_are_inspected_and_connect_to_each_other() -> None:
    launch = Launch()
    launch.checks.begin(launch.plan("a", "b"))
    both = ("one", "two")
    assert launch.sent == [
        *((host, wire.OpenProbePort) for host in both),
        *((host, wire.InspectHost) for host in both),
    ]
    assert launch.checks.is_under_way


def test_hosts_of_one_machine_meet_without_being_tried() -> None:
    launch = Launch()
    launch.checks.begin(launch.plan("same", "same"))
    assert launch.sent == [("one", wire.InspectHost), ("two", wire.InspectHost)]


def test_this_machine_alone_is_not_checked() -> None:
    launch = Launch(hosts={name: order(1, is_local=True) for name in ("one", "two")})
    launch.checks.begin(launch.plan("same", "same"))
    assert launch.sent == []
    assert not launch.checks.is_under_way


def test_a_host_that_cannot_train_is_refused_and_another_problem_is_a_warning(warnings: list[str]) -> None:
    launch = Launch()
    launch.checks.begin(launch.plan("same", "same"))
    launch.checks.handle("one", LACKING)
    launch.checks.handle("two", replace(GOOD, versions={"cloudpickle": "3.0.0"}))
    [(host, why)] = launch.refused
    assert (host, why[:36]) == ("one", "its interpreter has no cloudpickle; ")
    [text] = warnings
    assert text.startswith("two: it has cloudpickle 3.0.0, this machine 3.1.2")
    assert not launch.checks.is_under_way


def test_hosts_that_were_checked_are_not_checked_again_unless_they_were_lost() -> None:
    launch = Launch()
    plan = launch.plan("same", "same")
    launch.checks.begin(plan)
    for host in ("one", "two"):
        launch.checks.handle(host, GOOD)
    launch.checks.begin(plan)
    assert len(launch.sent) == 2
    launch.checks.lost("one")
    launch.checks.begin(plan)
    assert len(launch.sent) == 4


def test_a_file_system_that_hangs_is_a_warning_and_a_later_answer_is_ignored(warnings: list[str]) -> None:
    launch = Launch()
    launch.checks.begin(launch.plan("same", "same"))
    launch.checks.handle("two", GOOD)
    launch.timers["checks"]()
    assert warnings == ["one: it could not look at /work within 15 s: does the file system hang there?"]
    assert not launch.checks.is_under_way
    launch.checks.handle("one", LACKING)
    assert launch.refused == []
