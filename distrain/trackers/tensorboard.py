"""TensorBoard: event files in the run directory. Runs in: coordinator."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distrain.api.tracker import Report, TrackedRun, Tracker
from distrain.storage import names
from distrain.storage.retention import flatten
from distrain.system.imports import require

if TYPE_CHECKING:
    import os


@dataclass(kw_only=True)
class TensorBoard(Tracker):
    """Write event files for TensorBoard, one for each fit().

    directory: where they are written; by default ``tensorboard`` in the run directory.

    >>> TensorBoard(directory="events").directory
    'events'
    """

    directory: str | os.PathLike[str] | None = None

    package: ClassVar[str | None] = "tensorboard"

    def start(self, run: TrackedRun) -> None:
        folder = run.directory / names.TENSORBOARD if self.directory is None else Path(self.directory).expanduser()
        self._protos = require("tensorboard.compat.proto.event_pb2")
        hparams = require("tensorboard.plugins.hparams.summary_v2")
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"events.out.tfevents.{time.time_ns() // 1000}.distrain").open("ab")
        self._writer = require("tensorboard.summary.writer.record_writer").RecordWriter(self._file)
        config = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in flatten(run.config).items()
        }
        self._write(time.time(), file_version="brain.Event:2")
        self._write(time.time(), summary=hparams.hparams_pb(config, trial_id=run.name))

    def log(self, report: Report) -> None:
        event = self._protos.Event(wall_time=report.time, step=report.step)
        for name, value in report.metrics.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        self._file.flush()

    def finish(self, status: str) -> None:
        self._file.close()

    def _write(self, moment: float, **fields: Any) -> None:
        self._writer.write(self._protos.Event(wall_time=moment, **fields).SerializeToString())
