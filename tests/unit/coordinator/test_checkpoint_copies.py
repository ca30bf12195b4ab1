"""Copies of checkpoints for hosts that do not see the storage, with hosts that are only names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.coordinator.checkpoint_copies import CheckpointCopies
from distrain.decisions.checkpoints.actions import BringTo
from distrain.decisions.events import HostLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain import wire

CHECKPOINT = Path("/run/checkpoint_000001")


class Lab:
    """The part that is tested; and the movers of all hosts, which answer when a test says so."""

    def __init__(self) -> None:
        this: Any = self
        self.copies = CheckpointCopies(this)
        self.deliveries: list[tuple[str, wire.Deliver, Callable[[str | None], None]]] = []
        self.dropped: list[tuple[str, str]] = []
        self.answers: list[tuple[str, str, str | None]] = []
        """The host, the folder there, and why it failed."""

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

    def bring(self, failed: str | None = None) -> None:
        """Let all that is on its way arrive, or fail."""
        while self.deliveries:
            self.deliveries.pop(0)[2](failed)
        assert not self.copies.is_busy


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_a_host_gets_all_files_once_for_all_its_ranks(lab: Lab) -> None:
    lab.fetch(CHECKPOINT, "a", "a")
    [(host, order, _)] = lab.deliveries
    assert (host, order.root, order.is_checkpoint) == ("a", str(CHECKPOINT), True)
    assert order.folder.startswith("/cache/a/checkpoint_000001-")
    assert not lab.answers
    lab.bring()
    lab.fetch(CHECKPOINT, "a")
    assert lab.answers == [("a", order.folder, None)] * 3


def test_a_delivery_that_fails_is_answered_and_the_next_who_asks_causes_another(lab: Lab) -> None:
    for failed in ("Permission denied", None):
        lab.fetch(CHECKPOINT, "a")
        lab.bring(failed)
        assert lab.answers[-1][2] == failed


def test_a_mover_that_cannot_be_started_is_answered(lab: Lab) -> None:
    lab.deliver = lambda host, order, then: then("the mover cannot be started")  # type: ignore[method-assign]
    lab.fetch(CHECKPOINT, "a", "a")
    assert [why for _, _, why in lab.answers] == ["the mover cannot be started"] * 2


def test_a_host_that_was_lost_gets_a_checkpoint_again(lab: Lab) -> None:
    lab.fetch(CHECKPOINT, "a")
    lab.copies.lost(HostLost("a", "it is gone"))
    lab.deliveries.clear()  # as its mover is closed
    lab.fetch(CHECKPOINT, "a")
    lab.bring()
    assert [why for _, _, why in lab.answers] == [None]


def test_a_host_keeps_the_first_and_the_latest_copy(lab: Lab) -> None:
    for number in range(4):
        lab.fetch(CHECKPOINT.with_name(f"checkpoint_{number}"), "a")
        lab.bring()
    assert lab.dropped == [("a", folder) for _, folder, _ in lab.answers[1:3]]
    for number, is_kept in enumerate((True, False, False, True)):
        lab.fetch(CHECKPOINT.with_name(f"checkpoint_{number}"), "a")
        assert bool(lab.deliveries) != is_kept
        lab.deliveries.clear()
