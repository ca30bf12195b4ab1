"""Copies of checkpoints for hosts that do not see the storage, for hosts that are only names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest

from distrain.coordinator.checkpoint_copies import CheckpointCopies

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distrain import wire

HOSTS = [f"host{number}" for number in range(8)]


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


class Copies:
    """The part that is tested, and what it has answered."""

    def __init__(self) -> None:
        self.hosts = Hosts()
        self.answers: list[tuple[str, str, str | None]] = []
        """The host, the folder there, and why it failed."""
        self.copies = CheckpointCopies(self.hosts)  # type: ignore[arg-type]

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
    return Copies()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoint_000001"


# -- one host --------------------------------------------------------------------------------------------------------


def test_a_host_gets_a_checkpoint_from_this_machine_and_is_told_where_it_is(copies: Copies, checkpoint: Path) -> None:
    copies.fetch(checkpoint, HOSTS[0])
    (delivery,) = copies.hosts.deliveries
    assert delivery.host == HOSTS[0]
    assert delivery.order.folder.startswith(f"/cache/{HOSTS[0]}/checkpoint_000001-")
    assert delivery.order.root == str(checkpoint)
    assert delivery.order.files is None, "all that are there"
    assert not copies.answers
    copies.hosts.finish()
    assert copies.answers == [(HOSTS[0], delivery.order.folder, None)]


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


def test_a_delivery_that_fails_is_answered_and_the_next_who_asks_causes_another(
    copies: Copies, checkpoint: Path
) -> None:
    copies.fetch(checkpoint, HOSTS[0], HOSTS[0])
    copies.hosts.finish(failed="Permission denied")
    assert copies.failed == ["Permission denied"] * 2
    assert not copies.copies.is_busy
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
        copies.bring(tmp_path / run / "checkpoint_000001", HOSTS[0])
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
    copies.bring(checkpoint, HOSTS[0])
    assert copies.failed == [None]


# -- copies that are not needed any more -----------------------------------------------------------------------------


def test_a_host_keeps_the_first_and_the_latest_copy(copies: Copies, tmp_path: Path) -> None:
    checkpoints = [tmp_path / f"checkpoint_{number}" for number in range(4)]
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
    checkpoints = [tmp_path / f"checkpoint_{number}" for number in range(3)]
    copies.bring(checkpoints[0], HOSTS[0])
    copies.bring(checkpoints[1], HOSTS[0])
    copies.fetch(checkpoints[2], HOSTS[0])
    assert not copies.hosts.dropped
    copies.hosts.finish(failed="Permission denied")
    assert not copies.hosts.dropped
    copies.bring(checkpoints[2], HOSTS[0])
    assert len(copies.hosts.dropped) == 1


def test_a_copy_that_is_still_to_come_is_not_dropped(copies: Copies, tmp_path: Path) -> None:
    checkpoints = [tmp_path / f"checkpoint_{number}" for number in range(3)]
    copies.bring(checkpoints[0], HOSTS[0])
    copies.fetch(checkpoints[1], HOSTS[0])
    copies.fetch(checkpoints[2], HOSTS[0])
    copies.hosts.finish_last()
    assert not copies.hosts.dropped
    copies.hosts.finish()
    assert copies.answered == [HOSTS[0]] * 3
    assert len(copies.hosts.dropped) == 1  # the third one is older now
