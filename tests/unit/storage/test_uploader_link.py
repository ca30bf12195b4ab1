"""The other end of an uploader, with the real process."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from distrain import wire
from distrain.storage.uploader_link import UploaderLink

if TYPE_CHECKING:
    from pathlib import Path


def test_local_files_that_a_killed_uploader_was_to_delete_are_deleted_by_the_next(tmp_path: Path) -> None:
    def clear(ordinal: int) -> wire.Clear:
        folder = tmp_path / f"of_{ordinal}"
        folder.mkdir()
        return wire.Clear(attempt=0, rank=0, ordinal=ordinal, source=str(folder), directory="", files=[])

    answers: list[wire.Message] = []
    link = UploaderLink(None, answers.append, flags=())
    try:
        link.order(clear(1))
        link.settle(lambda: None)
        first = link.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        link.order(clear(2))
        os.kill(first, signal.SIGKILL)
        link.settle(lambda: None)
        assert link.pid != first
    finally:
        link.close()
    assert answers == [wire.Discarded(attempt=0, rank=0, ordinal=ordinal) for ordinal in (1, 2)]
    assert not list(tmp_path.iterdir())
