"""A session over real pipes, for the tests that play the coordinator."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.api import current
from distrain.api.context import TrainContext
from distrain.wire.channel import Channel
from distrain.worker.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Worker:
    """A session and the other end of its channel."""

    def __init__(self, root: Path) -> None:
        (read_down, write_down), (read_up, write_up) = os.pipe(), os.pipe()
        context = TrainContext(
            world_rank=1, world_size=4, local_rank=1, local_world_size=2, node_rank=0, run_name="run",
            storage_path=str(root / "runs"), attempt=2, devices=(),
        )  # fmt: skip
        self.channel = Channel(read_down, write_up)
        self.coordinator = Channel(read_up, write_down)
        self.session = Session(self.channel, context, None)

    def orders_copy(self, ordinal: int, directory: Path, *files: str) -> None:
        self.coordinator.send(
            wire.CopyFiles(attempt=2, rank=1, ordinal=ordinal, directory=str(directory), files=list(files))
        )

    def commits(self, ordinal: int, path: Path, *, has_files: bool = True) -> None:
        self.coordinator.send(wire.CommitDone(attempt=2, rank=1, ordinal=ordinal, path=str(path), has_files=has_files))

    def lists_checkpoints(self) -> None:
        """Answer further questions for the checkpoints, which are known by then."""
        send = self.session.send

        def asked(kind: Any, **fields: Any) -> None:
            send(kind, **fields)
            if kind is wire.AskCheckpointList:
                self.coordinator.send(wire.Answer(attempt=2, rank=1, question=fields["question"], body=b"[]"))

        self.session.send = asked  # type: ignore[method-assign]

    def said(self) -> list[Any]:
        return [frame.message() for frame in self.coordinator.receive()]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    made = Worker(tmp_path)
    monkeypatch.setattr(current, "session", made.session)
    yield made
    made.channel.close()
    made.coordinator.close()
