"""A check of hosts, which answer in this process: no problem of one hides what the others say."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from distrain import ScalingConfig, wire
from distrain.coordinator import host_check
from distrain.coordinator.host_check import HostCheck
from distrain.coordinator.host_files import Shipping
from distrain.decisions.events import HostLost
from tests.unit.decisions.test_run_machine import hello, order, request

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.coordinator.host_check import HostFacts
    from distrain.system.loop import Loop

QUESTION = wire.SetUpHost(files=[], folders=[], place="run", storage="/runs", probe_file="p", nonce="n")
OPENING = wire.OpenStorage(url="memory://runs", filesystem="")


class Hosts:
    """They answer at once, except those that ``odd`` names."""

    odd: dict[str, str]

    def __init__(self, transports: Any, request: Any) -> None:
        self.turned_away = 0

    def open(self, loop: Loop, on_message: Callable[[str, wire.Message], None], on_lost: Any) -> None:
        self.loop, self.on_message, self.on_lost = loop, on_message, on_lost

    def connect(self, name: str) -> None:
        match self.odd.get(name):
            case "is lost":
                self.later(name, lambda: self.on_lost(HostLost(name, "no route")))
            case "turns away" if not self.turned_away:
                self.turned_away += 1
                self.later(name, lambda: self.on_lost(HostLost(name, "busy", turned_away=True)))
            case "is silent":
                pass
            case _:
                self.later(name, lambda: self.on_message(name, hello(network=name, address="10.0.0.1")))

    def later(self, name: str, do: Callable[[], None]) -> None:
        self.loop.call_in(f"{name} {time.monotonic_ns()}", 0.0, do)

    def send(self, name: str, message: wire.Message) -> None:
        if (answer := self.answer(self.odd.get(name), message)) is not None:
            self.later(name, lambda: self.on_message(name, answer))

    def answer(self, odd: str | None, message: wire.Message) -> wire.Message | None:
        match message:
            case wire.SetUpHost():
                return wire.HostSetUp(storage_problem="cannot be opened" if odd == "sees nothing" else None)
            case wire.Prepare() if odd == "cannot prepare":
                return wire.HostFailed(text="no worker can run in /work")
            case wire.OpenStorage():
                return wire.OrderDone(failed="denied" if odd == "cannot write" else None)
            case wire.ProbeHost(nonce=nonce):
                now = time.time() - (100 if odd == "is late" else 0)
                return wire.HostProbed(nonce=nonce, versions={"cloudpickle": "3"}, received=now, sent=now)
        return None

    def stream_argv(self, name: str) -> list[str]:
        return [name]

    def close(self, *, keep: bool) -> None:
        assert not keep


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_check, "Connections", Hosts)
    monkeypatch.setattr("distrain.coordinator.launch_checks.package_versions", lambda packages, path: {})
    monkeypatch.setattr("distrain.decisions.run.host_pool.RECONNECT_INTERVAL_S", 0.01)


def check(**odd: str) -> tuple[list[str], dict[str, HostFacts]]:
    """Check hosts that are odd in these ways, and one that is not."""
    Hosts.odd = odd
    names = ["good", *odd]
    asked = request(
        names, 1, scaling=ScalingConfig(num_workers=(1, len(names))), hosts={name: order(1) for name in names},
        checks_hosts=True,
    )  # fmt: skip
    found, facts = HostCheck(asked, [], Shipping(question=QUESTION), OPENING).look()
    return sorted(f"{'✗' if one.is_fatal else '!'} {one.host}: {one.text.partition(';')[0]}" for one in found), facts


def test_hosts_that_are_well_are_connected_prepared_and_asked() -> None:
    found, facts = check(other="")
    assert found == []
    assert [bool(one.hello and one.probed and one.sees_storage) for one in facts.values()] == [True, True]


def test_each_problem_is_found() -> None:
    found, facts = check(
        lost="is lost", busy="turns away", blind="sees nothing", broken="cannot prepare", denied="cannot write",
        late="is late",
    )  # fmt: skip
    assert found == [
        "! blind: it does not see the storage, which cannot be opened",
        "! late: its clock is 100.0 s behind this machine's, so times in logs do not compare",
        "✗ broken: no worker can run in /work",
        "✗ denied: it cannot use the storage: denied",
        "✗ lost: no route",
    ]
    assert [name for name, one in facts.items() if one.hello is None] == ["lost"]
    assert not facts["blind"].sees_storage


def test_a_silent_host_is_given_up_and_the_others_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("distrain.coordinator.host_check", "distrain.decisions.run.host_pool"):
        monkeypatch.setattr(f"{module}.HOST_ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr("distrain.decisions.run.host_pool.SLOW_HOST_S", 0.1)
    found, facts = check(mute="is silent")
    assert found == ["✗ mute: no answer within 0.2 s"]
    assert facts["good"].probed is not None
