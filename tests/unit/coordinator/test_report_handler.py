"""What the ranks report, with a real run directory and no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distrain import wire
from distrain.config import CheckpointConfig
from distrain.coordinator.report_handler import ReportHandler
from distrain.storage.local_store import LocalStore


class NoValidations:
    """A run without a validation function."""

    changed: Any = None

    def awaits(self, saved: object) -> bool:
        return False


def test_reports_that_all_bring_checkpoints_are_acknowledged(tmp_path: Path) -> None:
    store, sent = LocalStore(tmp_path / "run"), []
    handler = ReportHandler(
        store,
        CheckpointConfig(num_to_keep=1),
        send=sent.append,
        upload=lambda order: None,
        on_commit=lambda path: None,
        validations=NoValidations(),  # type: ignore[arg-type]
    )
    handler.begin(0, 1)
    handler.handle(wire.Running(attempt=0, rank=0))
    for number in range(1, wire.MOST_UNACKNOWLEDGED // 2):
        handler.handle(
            wire.Reported(
                attempt=0,
                rank=0,
                index=number,
                time=0.0,
                ordinal=number,
                files=[("file", 1)],
                body=b"{}",
                folder="/source",
            )
        )
        handler.flush()
        directory = next(message.directory for message in reversed(sent) if isinstance(message, wire.CopyFiles))
        Path(directory, "file").write_bytes(b"x")
        files = [("file", 1, 0)]
        handler.handle(wire.FilesCopied(attempt=0, rank=0, ordinal=number, files=files, skipped=[]))
        handler.flush()
    store.close()
    assert [message for message in sent if isinstance(message, wire.Acknowledged)]
