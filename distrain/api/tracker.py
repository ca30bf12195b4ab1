"""The interface of a tracker, and what it is told. Runs in: tracker; the configuration anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from distrain.storage.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run that a tracker follows.

    id: identifies the run, also after restarts.
    name: the name of the run.
    directory: the local run directory; with remote storage the local copy of its small files. What a tracker writes
        there is mirrored with them.
    location: the run directory as users know it, a path or URL.
    config: train_loop_config, and the ScalingConfig as ``config["scaling"]``. Values that are no JSON are text.
    tags: facts such as the version of distrain.
    state: the tracker's own, a JSON object that :meth:`Tracker.start` and :meth:`Tracker.flush` may change. It is
        saved after each of them, and the next start of the run gets it back. ``state["url"]`` is shown to the user.

    ::

        class Service(Tracker):
            def start(self, run):
                self.run_id = run.state.setdefault("run_id", my_service.create(run.name))
    """

    id: str
    name: str
    directory: Path
    location: str
    config: Mapping[str, Any]
    tags: Mapping[str, str]
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report of a rank.

    step: from ``report(progress=(step, total))`` if that is a whole number and not below the last step; else the number
        of the report over the whole run. The steps of a rank never decrease.
    time: when it was reported, in seconds since 1970.
    attempt: counts the starts of the run from 0.
    metrics: the numbers of the report, nested ones as ``"eval/loss"``. They may be NaN or infinite. True is 1.0.

    ::

        def log(self, report):
            print(report.step, report.metrics["loss"])
    """

    rank: int
    step: int
    time: float
    attempt: int
    metrics: dict[str, float]


class Tracker:
    """A place for the metrics of a run, beside its directory. Derive from this class to write one.

    distrain pickles the object and calls its methods in a process of its own, which only reads the files of the run. An
    exception there does not reach the training. Attributes of the class, or of the object, are settings:

    name: names the tracker in messages, and its file in the run directory; by default the name of the class.
    ranks: 0 for the reports of rank 0, ``"all"`` for those of all ranks.
    checkpoints: True to be told of checkpoints.

    ::

        class Lines(Tracker):
            def start(self, run):
                self.file = open(run.directory / "lines.txt", "a")

            def log(self, report):
                self.file.write(f"{report.step} {report.metrics['loss']}\\n")

            def flush(self):
                self.file.flush()

        run_config = RunConfig(trackers=[Lines()])
    """

    name: str = ""
    ranks: Literal[0, "all"] = 0
    checkpoints: bool = False
    package: ClassVar[str | None] = None
    """Module that the tracker needs; its absence is an error before the run starts."""

    def start(self, run: TrackedRun) -> None:
        """Begin, or go on with the tracked run that ``run.state`` names."""

    def log(self, report: Report) -> None:
        """Log one report. A report that a restart repeats does not come again."""

    def checkpoint(self, checkpoint: Checkpoint, step: int) -> None:
        """Log a committed checkpoint.

        step: the reports of a rank over the whole run up to this checkpoint.
        """

    def flush(self) -> None:
        """Keep what was logged, for good: distrain notes then that it was logged. Called about once per second."""

    def finish(self, status: str) -> None:
        """End the tracked run.

        status: ``"finished"``, ``"failed"`` or ``"aborted"`` (stopped by the user).
        """


def name_of(tracker: Tracker) -> str:
    """Return the name of a tracker."""
    return tracker.name or type(tracker).__name__.lower()
