"""``distrain check --deep`` of hosts with real measurements, one of which has a slow network."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.hosts.faults import slow_network

if TYPE_CHECKING:
    from tests.hosts.user import User


def test_the_host_with_a_slow_network_is_named_and_remembered(user: User) -> None:
    state = {"XDG_STATE_HOME": str(user.folder / "state")}
    (user.folder / "hosts").write_text(user.lab.hostfile.read_text())
    with slow_network(user.lab, "gamma"):
        ran = user.checks("--deep", "--json", **state)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["ok"]
    [gamma] = [one["text"] for one in found["problems"] if one["host"] == "gamma" and "slow: send" in one["text"]]
    assert "% of the median of 2 others" in gamma
    assert found["hosts"]["gamma"]["slow"]
    assert found["hosts"]["gamma"]["links"].keys() == {"alpha", "beta:2222"}
    assert not any(found["hosts"][name]["slow"] for name in ("alpha", "beta:2222"))
    for host in found["hosts"].values():
        assert host["results"].keys() == {
            "cpus", "cpu", "memory", "disk_write", "disk_read", "shm", "send", "all_reduce", "latency",
        }  # fmt: skip
        assert all(link.keys() == {"send", "all_reduce", "latency"} for link in host["links"].values())
    listed = user.python("-m", "distrain", "hosts", "--json", **state)
    assert [(one["host"], one["what"], one["run"]) for one in json.loads(listed.out)["troubles"]] == [
        ("gamma", "slow", "distrain check --deep")
    ]
    assert user.python("-m", "distrain", "hosts", "--forgive", "all", **state).out == "forgot the troubles of gamma\n"
