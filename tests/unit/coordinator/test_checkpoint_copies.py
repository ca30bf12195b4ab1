"""Copies of checkpoints for hosts that do not see the storage, with real files, and hosts that are only names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distrain.coordinator.checkpoint_copies import CheckpointCopies
from distrain.decisions.checkpoints.actions import BringTo
from distrain.decisions.events import HostLost
from distrain.storage.checkpoint import locked_for_deletion

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distrain import wire

FILES = {"model/weights": b"weights" * 100, "step": b"7", "empty": b""}


class Lab:
    """The part that is tested; and its thread and the movers of all hosts, which answer when a test says so."""

    def __init__(self) -> None:
        this: Any = self
        self.copies = CheckpointCopies(this, this)
        self.look_ups: list[Callable[[], None]] = []
        self.deliveries: list[tuple[str, wire.Deliver, Callable[[str | None], None]]] = []
        self.dropped: list[tuple[str, str]] = []
        self.answers: list[tuple[str, str, str | None]] = []
        """The host, the folder there, and why it failed."""

    def do(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.look_ups.append(lambda: then(work()))

    def checkpoints_on(self, host: str) -> str:
        return f"/cache/{host}"

    def deliver(self, host: str, order: wire.Deliver, then: Callable[[str | None], None]) -> None:
        self.deliveries.append((host, order, then))

    def drop_checkpoint(self, host: str, folder: str) -> None:
        self.dropped.append((host, folder))

    # -- what tests do

    def fetch(self, checkpoint: Path, *hosts: str) -> None:
        for host in hosts:
            then: Any = lambda *answer, host=host: self.answers.append((host, *answer))  # noqa: E731
            self.copies.fetch(BringTo(host, str(checkpoint), then))

    def look_up(self) -> None:
        while self.look_ups:
            self.look_ups.pop(0)()

    def bring(self, failed: str | None = None) -> None:
        """Let all that is on its way arrive, or fail."""
        self.look_up()
        while self.deliveries:
            self.deliveries.pop(0)[2](failed)
        assert not self.copies.is_busy


@pytest.fixture
def lab() -> Lab:
    return Lab()


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


def test_a_host_gets_all_files_once_for_all_its_ranks(lab: Lab, checkpoint: Path) -> None:
    lab.fetch(checkpoint, "a", "a")
    lab.look_up()
    [(host, order, _)] = lab.deliveries
    assert (host, order.root) == ("a", str(checkpoint))
    assert order.folder.startswith("/cache/a/checkpoint_000001-")
    sizes = [(path, size) for path, size, *_ in order.files]
    assert sizes == [(str(checkpoint / name), len(data)) for name, data in sorted(FILES.items())]
    assert not lab.answers
    lab.bring()
    lab.fetch(checkpoint, "a")
    assert lab.answers == [("a", order.folder, None)] * 3


def test_a_delivery_that_fails_is_answered_and_the_next_who_asks_causes_another(lab: Lab, checkpoint: Path) -> None:
    for failed in ("Permission denied", None):
        lab.fetch(checkpoint, "a")
        lab.bring(failed)
        assert lab.answers[-1][2] == failed
        assert not is_locked(checkpoint)


def test_the_checkpoint_cannot_be_deleted_until_all_hosts_have_it(lab: Lab, checkpoint: Path) -> None:
    lab.fetch(checkpoint, *"abcd")
    lab.look_up()
    while lab.deliveries:
        assert is_locked(checkpoint)
        lab.deliveries.pop()[2](None)
    assert not is_locked(checkpoint)
    lab.fetch(checkpoint, "e")
    lab.look_up()
    assert is_locked(checkpoint)
    lab.copies.close()
    assert not is_locked(checkpoint)


def test_a_checkpoint_that_has_vanished_is_answered_to_all_that_wait(lab: Lab, checkpoint: Path) -> None:
    lab.fetch(checkpoint, "a", "a", "b")
    checkpoint.rename(checkpoint.with_name("moved"))
    lab.bring()
    assert [host for host, *_ in lab.answers] == ["a", "a", "b"]
    for _, _, why in lab.answers:
        assert str(why).startswith(f"the checkpoint {checkpoint} cannot be read: ")
        assert "was deleted by num_to_keep" in str(why)


def test_a_host_that_is_lost_while_the_files_are_looked_up_gets_nothing(lab: Lab, checkpoint: Path) -> None:
    lab.fetch(checkpoint, "a")
    lab.copies.lost(HostLost("a", "it is gone"))
    lab.look_up()
    assert not lab.deliveries
    assert not is_locked(checkpoint)
    lab.fetch(checkpoint, "a")
    lab.bring()
    assert [why for _, _, why in lab.answers] == [None]


def test_a_host_keeps_the_first_and_the_latest_copy(lab: Lab, tmp_path: Path) -> None:
    for number in range(4):
        lab.fetch(make_checkpoint(tmp_path / f"checkpoint_{number}"), "a")
        lab.bring()
    assert lab.dropped == [("a", folder) for _, folder, _ in lab.answers[1:3]]
    for number, is_kept in enumerate((True, False, False, True)):
        lab.fetch(tmp_path / f"checkpoint_{number}", "a")
        assert bool(lab.look_ups) != is_kept
        lab.look_ups.clear()
