"""The other end of an uploader, with the real process."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING
from unittest import mock

from distrain import wire
from distrain.transfer import order_link
from distrain.transfer.order_link import OrderLink

if TYPE_CHECKING:
    from pathlib import Path


def test_checkpoints_that_a_killed_uploader_was_to_delete_are_deleted_by_the_next(tmp_path: Path) -> None:
    def delete(number: int) -> wire.DeleteCheckpoints:
        (tmp_path / f"of_{number}").mkdir()
        (tmp_path / f"of_{number}" / "file").write_text("x")
        return wire.DeleteCheckpoints(directories=[f"of_{number}"])

    opened: list[wire.Message] = []
    answers: list[wire.Message] = []
    link = OrderLink(None, lambda message: None, "uploader", flags=())
    try:
        link.order(wire.OpenStorage(url=f"file://{tmp_path}", filesystem=""), opened.append)
        link.order(delete(1), answers.append)
        link.settle(lambda: None)
        first = link.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        link.order(delete(2), answers.append)
        os.kill(first, signal.SIGKILL)
        link.settle(lambda: None)
        assert link.pid != first
    finally:
        link.close()
    assert (opened, answers) == ([wire.OrderDone()] * 2, [wire.OrderDone()] * 2)
    assert not list(tmp_path.glob("of_*"))


def test_a_link_that_was_closed_hears_no_more_answers() -> None:
    """Those that have arrived together with the one by which it was closed."""
    answers: list[wire.Message] = []
    with mock.patch.object(order_link, "ChildLink") as child:
        link = OrderLink(mock.Mock(), answers.append, "mover", flags=())
        link.order(wire.MirrorRecords(), lambda done: link.close())
        link.order(wire.MirrorRecords(), answers.append)
        [(_, on_frames), _] = child.return_value.channel.attach.call_args
    on_frames(wire.Decoder().feed(2 * wire.encode(wire.OrderDone())))
    assert not answers
