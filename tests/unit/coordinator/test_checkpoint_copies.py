"""Copies of checkpoints for hosts that do not see the storage, with real files, and hosts that are only names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from distrain.coordinator.checkpoint_copies import CheckpointCopies
from distrain.storage.checkpoint import locked_for_deletion
from distrain.system.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distrain import wire

HOSTS = [f"host{number}" for number in range(8)]
FILES = {"model/weights": b"weights" * 100, "step": b"7", "empty": b""}


@dataclass
class Delivery:
    """Files that are on their way to a host."""

    host: str
    order: wire.Deliver
    then: Callable[[str | None], None]


class Hosts:
    """The movers of all hosts. They answer when the test says so; those of a lost host never do."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.history: list[Delivery] = []
        self.dropped: list[tuple[str, str]] = []

    def checkpoints_on(self, host: str) -> str:
        return f"/cache/{host}"

    def deliver(self, host: str, order: wire.Deliver, then: Callable[[str | None], None]) -> None:
        delivery = Delivery(host, order, then)
        self.deliveries.append(delivery)
        self.history.append(delivery)

    def drop_checkpoint(self, host: str, folder: str) -> None:
        self.dropped.append((host, folder))

    def lost(self, host: str) -> None:
        self.deliveries = [delivery for delivery in self.deliveries if delivery.host != host]

    # -- what tests do

    def finish(self, *hosts: str, failed: str | None = None) -> None:
        """End what is on its way to these hosts, or to all that anything is on its way to."""
        ending = [one for one in self.deliveries if one.host in (hosts or {one.host for one in self.deliveries})]
        assert ending
        for delivery in ending:
            self.deliveries.remove(delivery)
            delivery.then(failed)

    def finish_last(self) -> None:
        self.deliveries.pop().then(None)

    @property
    def under_way(self) -> list[str]:
        return [delivery.host for delivery in self.deliveries]


class Later:
    """A background thread that has not begun yet."""

    def __init__(self) -> None:
        self.work: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def do(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.work.append((work, then))

    def go_on(self) -> None:
        work, self.work = self.work, []
        for task, then in work:
            then(task())


class Copies:
    """The part that is tested, and what it has answered."""

    def __init__(self, thread: Background | Later) -> None:
        self.hosts = Hosts()
        self.answers: list[tuple[str, str, str | None]] = []
        """The host, the folder there, and why it failed."""
        self.copies = CheckpointCopies(
            self.hosts,  # type: ignore[arg-type]
            thread,  # type: ignore[arg-type]
        )

    def fetch(self, checkpoint: Path, *hosts: str) -> None:
        for host in hosts:
            self.copies.fetch(host, str(checkpoint), partial(self._note, host))

    def _note(self, host: str, folder: str, failed: str | None) -> None:
        self.answers.append((host, folder, failed))

    def bring(self, checkpoint: Path, *hosts: str) -> None:
        """Fetch, and finish it."""
        self.fetch(checkpoint, *hosts)
        while self.hosts.deliveries:
            self.hosts.finish()
        assert not self.copies.is_busy

    def lose(self, host: str) -> None:
        """A host is lost, as the coordinator does it."""
        self.hosts.lost(host)
        self.copies.lost(host)

    @property
    def answered(self) -> list[str]:
        return [host for host, _, _ in self.answers]

    @property
    def failed(self) -> list[str | None]:
        return [failed for _, _, failed in self.answers]


@pytest.fixture
def copies() -> Copies:
    return Copies(Background(None, "verification"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "run" / "checkpoint_000001")


def make_checkpoint(folder: Path) -> Path:
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def is_locked(folder: Path) -> bool:
    with locked_for_deletion(folder) as is_unread:
        return not is_unread


# -- one host --------------------------------------------------------------------------------------------------------


def test_a_host_gets_all_files_from_this_machine_and_is_told_where_they_are(copies: Copies, checkpoint: Path) -> None:
    copies.fetch(checkpoint, HOSTS[0])
    (delivery,) = copies.hosts.deliveries
    assert delivery.host == HOSTS[0]
    assert delivery.order.folder.startswith(f"/cache/{HOSTS[0]}/checkpoint_000001-")
    assert delivery.order.root == str(checkpoint)
    sizes = [(path, size) for path, size, *_ in delivery.order.files]
    assert sizes == [(str(checkpoint / name), len(data)) for name, data in sorted(FILES.items())]
    assert not copies.answers
    copies.hosts.finish()
    assert copies.answers == [(HOSTS[0], delivery.order.folder, None)]


def test_directories_without_files_come_along(copies: Copies, checkpoint: Path) -> None:
    (checkpoint / "model" / "empty").mkdir()
    (checkpoint / "link").symlink_to("model")
    copies.fetch(checkpoint, HOSTS[0])
    (delivery,) = copies.hosts.deliveries
    assert sorted(delivery.order.folders) == ["link", "link/empty", "model", "model/empty"]
    names = {os.path.relpath(path, checkpoint) for path, *_ in delivery.order.files}
    assert names == {*FILES, "link/weights"}


def test_many_ranks_of_a_host_cause_one_delivery(copies: Copies, checkpoint: Path) -> None:
    copies.fetch(checkpoint, *HOSTS[:1] * 5)
    copies.hosts.finish()
    assert copies.answered == HOSTS[:1] * 5
    assert copies.failed == [None] * 5
    assert len(copies.hosts.history) == 1


def test_a_rank_that_asks_again_is_answered_at_once(copies: Copies, checkpoint: Path) -> None:
    copies.bring(checkpoint, HOSTS[0])
    copies.fetch(checkpoint, HOSTS[0])
    assert copies.answered == [HOSTS[0], HOSTS[0]]
    assert copies.answers[0] == copies.answers[1]
    assert len(copies.hosts.history) == 1
    assert not is_locked(checkpoint)


def test_a_delivery_that_fails_is_answered_and_the_next_who_asks_causes_another(
    copies: Copies, checkpoint: Path
) -> None:
    copies.fetch(checkpoint, HOSTS[0], HOSTS[0])
    copies.hosts.finish(failed="Permission denied")
    assert copies.failed == ["Permission denied"] * 2
    assert not copies.copies.is_busy
    assert not is_locked(checkpoint)
    copies.bring(checkpoint, HOSTS[0])
    assert copies.failed[2:] == [None]
    assert len(copies.hosts.history) == 2


def test_a_delivery_that_fails_does_not_keep_the_other_hosts_waiting(copies: Copies, checkpoint: Path) -> None:
    copies.fetch(checkpoint, *HOSTS[:2])
    copies.hosts.finish(HOSTS[0], failed="Permission denied")
    assert copies.hosts.under_way == [HOSTS[1]]
    copies.hosts.finish()
    assert copies.failed == ["Permission denied", None]


def test_two_checkpoints_of_the_same_name_go_to_different_directories(copies: Copies, tmp_path: Path) -> None:
    for run in ("first", "second"):
        copies.bring(make_checkpoint(tmp_path / run / "checkpoint_000001"), HOSTS[0])
    first, second = copies.answers
    assert first[1] != second[1]


# -- many hosts ------------------------------------------------------------------------------------------------------


def test_all_hosts_get_a_checkpoint_at_the_same_time(copies: Copies, checkpoint: Path) -> None:
    copies.fetch(checkpoint, *HOSTS)
    assert copies.hosts.under_way == HOSTS
    copies.hosts.finish(HOSTS[3])
    assert copies.answered == [HOSTS[3]]
    assert copies.copies.is_busy
    copies.hosts.finish()
    assert not copies.copies.is_busy


def test_a_host_that_was_lost_gets_the_checkpoint_when_it_is_back(copies: Copies, checkpoint: Path) -> None:
    copies.fetch(checkpoint, HOSTS[0])
    copies.lose(HOSTS[0])
    assert not copies.copies.is_busy
    assert not is_locked(checkpoint)
    copies.bring(checkpoint, HOSTS[0])
    assert copies.failed == [None]


# -- the lock --------------------------------------------------------------------------------------------------------


def test_the_checkpoint_cannot_be_deleted_until_all_hosts_have_it(copies: Copies, checkpoint: Path) -> None:
    copies.fetch(checkpoint, *HOSTS[:4])
    while copies.hosts.deliveries:
        assert copies.copies.is_busy
        assert is_locked(checkpoint)
        copies.hosts.finish(copies.hosts.deliveries[0].host)
    assert not copies.copies.is_busy
    assert not is_locked(checkpoint)
    copies.fetch(checkpoint, HOSTS[4])
    assert is_locked(checkpoint)
    copies.copies.close()
    assert not is_locked(checkpoint)


def test_a_checkpoint_that_has_vanished_is_answered_to_all_that_wait(checkpoint: Path) -> None:
    thread = Later()
    copies = Copies(thread)
    copies.fetch(checkpoint, HOSTS[0], HOSTS[0], HOSTS[1])
    checkpoint.rename(checkpoint.with_name("moved"))
    thread.go_on()
    assert copies.answered == [HOSTS[0], HOSTS[0], HOSTS[1]]
    for why in map(str, copies.failed):
        assert why.startswith(f"the checkpoint {checkpoint} cannot be read: ")
        assert "was deleted by num_to_keep" in why
    assert not copies.hosts.deliveries
    assert not copies.copies.is_busy
    checkpoint.with_name("moved").rename(checkpoint)
    copies.fetch(checkpoint, HOSTS[0])
    thread.go_on()
    copies.hosts.finish()
    assert copies.failed[3:] == [None]


def test_a_host_that_has_its_copy_keeps_it_when_the_checkpoint_vanishes(checkpoint: Path) -> None:
    thread = Later()
    copies = Copies(thread)
    copies.fetch(checkpoint, HOSTS[0])
    thread.go_on()
    copies.hosts.finish()
    checkpoint.rename(checkpoint.with_name("moved"))
    copies.fetch(checkpoint, HOSTS[1])
    thread.go_on()
    copies.fetch(checkpoint, HOSTS[0])
    assert copies.answered == [HOSTS[0], HOSTS[1], HOSTS[0]]
    assert [why is None for why in copies.failed] == [True, False, True]


def test_a_host_that_is_lost_while_the_files_are_looked_up_gets_nothing(checkpoint: Path) -> None:
    thread = Later()
    copies = Copies(thread)
    copies.fetch(checkpoint, HOSTS[0])
    copies.lose(HOSTS[0])
    thread.go_on()
    assert not copies.hosts.deliveries
    assert not is_locked(checkpoint)
    copies.fetch(checkpoint, HOSTS[0])
    thread.go_on()
    copies.hosts.finish()
    assert copies.failed == [None]


# -- copies that are not needed any more -----------------------------------------------------------------------------


def test_a_host_keeps_the_first_and_the_latest_copy(copies: Copies, tmp_path: Path) -> None:
    checkpoints = [make_checkpoint(tmp_path / f"checkpoint_{number}") for number in range(4)]
    dropped = []
    for number, checkpoint in enumerate(checkpoints):
        copies.bring(checkpoint, HOSTS[0])
        if number == 1:
            copies.bring(checkpoint, HOSTS[1])  # another host has its own
        dropped.append(copies.hosts.dropped)
        copies.hosts.dropped = []
    folders = [folder for host, folder, _ in copies.answers if host == HOSTS[0]]
    assert dropped == [[], [], [(HOSTS[0], folders[1])], [(HOSTS[0], folders[2])]]
    count = len(copies.hosts.history)
    for number in (0, 3):
        copies.fetch(checkpoints[number], HOSTS[0])
    assert len(copies.hosts.history) == count
    copies.fetch(checkpoints[1], HOSTS[0])  # it was dropped
    assert copies.hosts.under_way == [HOSTS[0]]


def test_a_copy_stays_until_its_host_has_the_next_one(copies: Copies, tmp_path: Path) -> None:
    checkpoints = [make_checkpoint(tmp_path / f"checkpoint_{number}") for number in range(3)]
    copies.bring(checkpoints[0], HOSTS[0])
    copies.bring(checkpoints[1], HOSTS[0])
    copies.fetch(checkpoints[2], HOSTS[0])
    assert not copies.hosts.dropped
    copies.hosts.finish(failed="Permission denied")
    assert not copies.hosts.dropped
    copies.bring(checkpoints[2], HOSTS[0])
    assert len(copies.hosts.dropped) == 1


def test_a_copy_that_is_still_to_come_is_not_dropped(copies: Copies, tmp_path: Path) -> None:
    checkpoints = [make_checkpoint(tmp_path / f"checkpoint_{number}") for number in range(3)]
    copies.bring(checkpoints[0], HOSTS[0])
    copies.fetch(checkpoints[1], HOSTS[0])
    copies.fetch(checkpoints[2], HOSTS[0])
    copies.hosts.finish_last()
    assert not copies.hosts.dropped
    copies.hosts.finish()
    assert copies.answered == [HOSTS[0]] * 3
    assert len(copies.hosts.dropped) == 1  # the third one is older now
