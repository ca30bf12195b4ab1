"""The memory of hosts: what is kept, what is forgiven, and files that others write or damage."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from distrain.storage.host_records import KEPT_S, HostRecords

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_checks_of_the_same_kind_are_compared(tmp_path: Path) -> None:
    records = HostRecords(tmp_path / "hosts")
    assert (records.hosts(), records.of("alpha")) == ([], [])
    for number in range(60):
        records.add("alpha", "check", kind="large" if number % 2 else "small", results={"cpu": float(number)})
    assert len(records.of("alpha")) == 50
    assert [one["cpu"] for one in records.checks("alpha", "large")][-2:] == [57.0, 59.0]


def test_troubles_are_forgiven_and_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = HostRecords(tmp_path)
    records.add("me@box/2", "lost", text="no answer", run="r1")
    assert records.hosts() == ["me@box/2"]
    assert records.troubles("me@box/2")[0]["run"] == "r1"
    records.add("me@box/2", "forgiven")
    assert records.latest_trouble("me@box/2") is None
    for number in range(3):
        assert records.latest_trouble("me@box/2") is None
        records.add("me@box/2", "failed", text=str(number), run="r2")
    assert records.latest_trouble("me@box/2")["text"] == "2"
    now = records.of("me@box/2")[-1]["time"]
    monkeypatch.setattr("time.time", lambda: now + KEPT_S + 1)
    assert records.troubles("me@box/2") == []


def test_damaged_lines_are_ignored_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = HostRecords(tmp_path)
    records.add("alpha", "slow", text="old")
    with open(tmp_path / "alpha.jsonl", "ab") as file:
        file.write(b'\x00\xff\n[1]\n{"time": "torn')
    assert [one["text"] for one in records.of("alpha")] == ["old"]
    records.add("alpha", "slow", text="new")
    assert [one["text"] for one in records.of("alpha")] == ["old", "new"]


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    def write(name: str) -> None:
        for _ in range(8):
            HostRecords(tmp_path).add("alpha", "slow", text=name)

    threads = [threading.Thread(target=write, args=(f"writer{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(HostRecords(tmp_path).of("alpha")) == 32
