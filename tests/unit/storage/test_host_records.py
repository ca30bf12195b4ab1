"""The memory of hosts: what is kept, what is forgiven, and files that others write or damage."""

from __future__ import annotations

import argparse
import copy
import json
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

from distrain import ScalingConfig
from distrain.cli.hosts import run_hosts
from distrain.coordinator.connection.transport import LocalTransport
from distrain.coordinator.fitness.spare_hosts import with_bad_hosts_last
from distrain.hosts.hostfile import HostSpec
from distrain.storage.host_records import KEPT_S, change_records, read_records

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "distrain" / "hosts.json"


def add(what: str, text: str = "", host: str = "me@box/2") -> None:
    change_records(lambda known: known.add_trouble(host, what, text, "r1"))


def test_troubles_are_forgiven_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    add("lost")
    assert list(read_records().bad_hosts()) == ["me@box/2"]
    change_records(lambda known: known.forgive(["me@box/2"]))
    assert read_records().bad_hosts() == {}
    for number in range(3):
        add("slow", str(number))
    assert read_records().bad_hosts()["me@box/2"]["text"] == "2"
    now = read_records().troubles[-1]["time"]
    for wrong_s in (KEPT_S + 1, -KEPT_S - 1):
        monkeypatch.setattr("time.time", lambda wrong_s=wrong_s: now + wrong_s)
        assert read_records().troubles == []


VALUES: list[Any] = [None, True, 7, -1.5, 10**400, "thermal", "", [], [[]], {}, {"a": []}, [{"host": 1}]]


@pytest.mark.parametrize("seed", range(30))
def test_nothing_in_the_file_stops_a_run(state: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Values of any kind are in it, anywhere, as a newer version might write them. What is known stays."""
    dice = random.Random(seed)
    add("slow", "known")
    content: Any = json.loads(state.read_text())
    known = copy.deepcopy(content)
    for number in range(dice.randint(1, 3)):
        trouble = dict(known["troubles"][0], host=f"other{number}")
        trouble[dice.choice([*trouble, "more"])] = dice.choice(VALUES)
        troubles = content["troubles"]
        troubles.insert(dice.randrange(len(troubles) + 1), dice.choice([trouble, dice.choice(VALUES)]))
    content["newer"] = dice.choice(VALUES)
    state.write_text(json.dumps(content))
    transports = [LocalTransport(host=HostSpec(name=name, slots=1)) for name in ("me@box/2", "alpha")]
    assert with_bad_hosts_last(transports, ScalingConfig(num_workers=1))[0].host.name == "alpha"
    assert run_hosts(argparse.Namespace(forgive=None, json=False)) == 0
    assert f"{state} has entries that this version of distrain does not know" in capsys.readouterr().err
    add("slow", "new")
    assert json.loads(state.read_text())["newer"] == content["newer"]
    assert [one["text"] for one in read_records().troubles if one["host"] == "me@box/2"] == ["known", "new"]


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"troubles": [{}]}', '{"else": 1}', "\x00\xff", "[" * 99999])
def test_a_damaged_file_is_ignored_and_replaced(state: Path, damage: str) -> None:
    add("slow", "old")
    state.write_text(damage)
    assert read_records().troubles == []
    add("slow", "new")
    assert [one["text"] for one in read_records().troubles] == ["new"]


def test_a_disk_that_cannot_be_written_is_a_warning(state: Path) -> None:
    state.parent.write_text("a file")
    add("slow")
    assert read_records().troubles == []


def test_writers_at_the_same_time_lose_nothing() -> None:
    def write(name: str) -> None:
        for _ in range(8):
            add("slow", name)

    threads = [threading.Thread(target=write, args=(f"writer{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_records().troubles) == 32
