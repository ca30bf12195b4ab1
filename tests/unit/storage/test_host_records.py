"""The memory of hosts: what is kept, what is forgiven, and files that others write or damage."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from distrain.storage.host_records import KEPT_S, change_records, read_records

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "distrain" / "hosts.json"


def add(what: str, text: str = "", host: str = "me@box/2") -> None:
    change_records(lambda known: known.add_trouble(host, what, text, "r1"))


def test_the_latest_checks_are_kept() -> None:
    assert read_records().checks == {}
    for number in range(25):
        change_records(lambda known, number=number: known.add_check("alpha", "small", {"cpu": float(number)}))
    assert [one["results"]["cpu"] for one in read_records().checks["alpha"]] == [float(cpu) for cpu in range(5, 25)]


def test_troubles_are_forgiven_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    add("lost")
    assert list(read_records().bad_hosts()) == ["me@box/2"]
    change_records(lambda known: known.forgive(["me@box/2"]))
    for number in range(3):
        assert read_records().bad_hosts() == {}
        add("failed", str(number))
    assert read_records().bad_hosts()["me@box/2"]["text"] == "2"
    now = read_records().troubles[-1]["time"]
    monkeypatch.setattr("time.time", lambda: now + KEPT_S + 1)
    assert read_records().troubles == []


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"troubles": [{}]}', '{"else": 1}', "\x00\xff"])
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
