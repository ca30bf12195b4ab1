"""The lock of a remote run: of two processes only one has it, whatever the clocks and the storage do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from distrain.coordinator.store.remote_store import RemoteStore
from distrain.errors import StorageError
from distrain.storage import run_lock
from distrain.storage.run_lock import RemoteLock
from distrain.system.remote_path import RemotePath

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> RemotePath:
    return RemotePath(f"local://{tmp_path}/run")


def is_from_another_machine(lock: RemoteLock) -> None:
    """Rewrite the lock as that of a process that this machine cannot see."""
    fields = json.loads(lock.path.read_bytes())
    lock.path.write_bytes(json.dumps({**fields, "machine": "far", "beat": 1.0}).encode())


def test_an_owner_that_has_ended_is_known_to_be_dead(run: RemotePath) -> None:
    source = f"from distrain.storage.run_lock import *; RemoteLock.take(RemotePath({run.url!r}))"
    subprocess.run([sys.executable, "-c", source], check=True)
    assert RemoteLock.take(run).path.name == "000002"


def test_a_machine_that_stood_still_gives_the_owner_time_for_a_heartbeat(
    run: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes wake up at the same time, and the owner may be the second one to run."""
    owner = RemoteLock.take(run)
    is_from_another_machine(owner)
    now, looks = [0.0], [0]

    def sleep(seconds: float) -> None:
        looks[0] += 1
        now[0] += 3600.0 if looks[0] == 1 else seconds
        if looks[0] == 3:
            owner.path.write_bytes(owner._text(2.0))

    monkeypatch.setattr(run_lock.time, "sleep", sleep)
    monkeypatch.setattr(run_lock.time, "monotonic", lambda: now[0])
    with pytest.raises(StorageError, match="is in use by process"):
        RemoteLock.take(run)
    assert looks[0] == 3


def test_of_two_that_wait_for_the_same_owner_only_one_gets_the_run(
    run: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the other one has released it, and a third has taken it, before this one goes on."""
    RemoteLock.take(run).release()
    wait, others = run_lock._wait_until_free, []

    def others_take_it(run: RemotePath, lock: RemotePath) -> None:
        wait(run, lock)
        if not others:
            others.append(None)
            RemoteLock.take(run).release()
            RemoteLock.take(run)

    monkeypatch.setattr(run_lock, "_wait_until_free", others_take_it)
    with pytest.raises(StorageError, match="in use by another process, which has just begun"):
        RemoteLock.take(run)


def test_a_lock_that_is_replaced_while_it_is_read_is_taken_for_an_owner(
    run: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    RemoteLock.take(run)
    monkeypatch.setattr(run_lock, "_objects", lambda run: [run / ".lock" / "000007"])
    with pytest.raises(StorageError, match="in use by another process, which has just begun"):
        RemoteLock.take(run)


def test_a_lock_whose_creation_was_answered_too_late_is_not_anothers(
    run: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(self: RemotePath, data: bytes) -> None:
        self.write_bytes(data)
        raise FileExistsError  # of the second try

    monkeypatch.setattr(RemotePath, "create", create)
    assert RemoteLock.take(run).path.name == "000001"


def test_the_owner_sends_heartbeats_while_it_opens_a_run_for_long(
    run: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one with a thousand checkpoints, before there is an uploader."""
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    beats = threading.Semaphore(0)
    beat = RemoteLock.beat
    monkeypatch.setattr(RemoteLock, "beat", lambda lock: (beat(lock), beats.release()))

    def find_intact(store: RemoteStore) -> list[object]:
        for _ in range(3):
            assert beats.acquire(timeout=60)
        return []

    monkeypatch.setattr(RemoteStore, "_find_intact", find_intact)
    store = RemoteStore(run)
    store.close()
    assert json.loads((run / ".lock" / "000001").read_bytes())["released"]
    assert not [thread for thread in threading.enumerate() if thread.name == "distrain-heartbeats"]
