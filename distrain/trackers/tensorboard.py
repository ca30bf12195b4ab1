"""TensorBoard: event files in the run directory. Runs in: coordinator."""

from __future__ import annotations

import io
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from distrain.api.tracker import Tracker
from distrain.storage.retention import flatten
from distrain.system.imports import require

if TYPE_CHECKING:
    from distrain.api.tracker import Report, TrackedRun


@dataclass(kw_only=True)
class TensorBoard(Tracker):
    """Write event files for TensorBoard.

    directory: where they are written; by default ``tensorboard`` in the run directory.
    ranks: 0, or ``"all"``: then each rank is a run of its own in TensorBoard, in a directory ``rank_3``.

    >>> TensorBoard(ranks="all").ranks
    'all'
    """

    directory: str | os.PathLike[str] | None = None
    ranks: Literal[0, "all"] = 0

    package: ClassVar[str | None] = "tensorboard"

    def start(self, run: TrackedRun) -> None:
        self._run = run
        self._files: dict[str, _EventFile] = {}
        self._folder = run.directory / "tensorboard" if self.directory is None else Path(self.directory).expanduser()
        self._protos = require("tensorboard.compat.proto.event_pb2")
        self._sizes: dict[str, list[Any]] = run.state.setdefault("files", {})
        self._file("" if self.ranks == 0 else "rank_0")

    def log(self, report: Report) -> None:
        event = self._protos.Event(wall_time=report.time, step=report.step)
        for name, value in report.metrics.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._file("" if self.ranks == 0 else f"rank_{report.rank}").add(event)

    def flush(self) -> None:
        for name, file in self._files.items():
            self._sizes[name] = [file.path.name, file.write()]

    def finish(self, status: str) -> None:
        self._files.clear()

    def _file(self, name: str) -> _EventFile:
        """Return the event file in a directory, which goes on after the last event that is known to be logged."""
        if name not in self._files:
            known, size = self._sizes.get(name, ["", 0])
            path = self._folder / name / known
            if known and path.is_file() and path.stat().st_size >= size:
                os.truncate(path, size)
                self._files[name] = _EventFile(path)
            else:
                (self._folder / name).mkdir(parents=True, exist_ok=True)
                path = self._folder / name / f"events.out.tfevents.{time.time_ns() // 1000}.distrain"
                self._files[name] = _EventFile(path)
                self._files[name].add(self._protos.Event(wall_time=time.time(), file_version="brain.Event:2"))
                self._files[name].add(self._hyperparameters())
        return self._files[name]

    def _hyperparameters(self) -> Any:
        plain = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in flatten(self._run.config).items()
        }
        hparams_pb = require("tensorboard.plugins.hparams.summary_v2").hparams_pb
        return self._protos.Event(wall_time=time.time(), summary=hparams_pb(plain, trial_id=self._run.name))


class _EventFile:
    """A file of events. Those that were added are in memory until :meth:`write`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = io.BytesIO()
        self._writer = require("tensorboard.summary.writer.record_writer").RecordWriter(self._buffer)

    def add(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def write(self) -> int:
        """Write the events that were added. Return the size of the file in bytes."""
        with self.path.open("ab") as file:
            file.write(self._buffer.getvalue())
            size = file.tell()
        self._buffer.seek(0)
        self._buffer.truncate()
        return size
