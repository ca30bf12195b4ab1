"""The other end of an uploader, with the real process."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from distrain import wire
from distrain.transfer.order_link import OrderLink

if TYPE_CHECKING:
    from pathlib import Path


def test_checkpoints_that_a_killed_uploader_was_to_delete_are_deleted_by_the_next(tmp_path: Path) -> None:
    def delete(number: int) -> wire.DeleteCheckpoints:
        (tmp_path / f"of_{number}").mkdir()
        (tmp_path / f"of_{number}" / "file").write_text("x")
        return wire.DeleteCheckpoints(directories=[f"of_{number}"])

    answers: list[wire.Message] = []
    link = OrderLink(None, answers.append, "uploader", flags=())
    try:
        link.order(wire.OpenStorage(url=f"file://{tmp_path}", filesystem=""))
        link.order(delete(1))
        link.settle(lambda: None)
        first = link.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        link.order(delete(2))
        os.kill(first, signal.SIGKILL)
        link.settle(lambda: None)
        assert link.pid != first
    finally:
        link.close()
    assert [answer for answer in answers if isinstance(answer, wire.OrderDone)] == [
        wire.OrderDone(),
        wire.OrderDone(),
    ]
    assert not list(tmp_path.glob("of_*"))
