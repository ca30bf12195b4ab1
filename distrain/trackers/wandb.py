"""Weights & Biases. Runs in: coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from distrain.api.tracker import Tracker
from distrain.system.imports import require

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from distrain.api.tracker import Report, TrackedRun
    from distrain.storage.checkpoint import Checkpoint


@dataclass(kw_only=True)
class Wandb(Tracker):
    """Log to Weights & Biases. The API key comes from ``wandb login`` or the environment.

    project, entity, group, mode, tags: as for ``wandb.init()``.
    directory: for its files; by default ``trackers`` in the run directory.
    ranks: 0, or ``"all"``: then metrics are called ``rank_3/loss``, and their x-axis is ``rank_3/step``.
    checkpoints: log each checkpoint as an artifact of type ``model``.

    >>> Wandb(project="mnist", mode="offline").project
    'mnist'
    """

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    mode: str | None = None
    tags: Sequence[str] = ()
    directory: str | os.PathLike[str] | None = None
    ranks: Literal[0, "all"] = 0
    checkpoints: bool = False

    package: ClassVar[str | None] = "wandb"

    def start(self, run: TrackedRun) -> None:
        self._wandb = require("wandb")
        self._id = run.id
        self._run = self._wandb.init(
            id=run.id,
            resume="allow",
            name=run.name,
            project=self.project,
            entity=self.entity,
            group=self.group,
            mode=self.mode,
            tags=list(self.tags),
            dir=str(run.directory / "trackers" if self.directory is None else Path(self.directory).expanduser()),
            config={**run.config, **{f"run/{name}": value for name, value in run.tags.items()}},
            allow_val_change=True,
            reinit="create_new",  # the user's process may have a run of its own
            settings=self._wandb.Settings(console="off"),
        )
        if getattr(self._run, "url", None):
            run.state["url"] = self._run.url
        self._ranks_seen: set[int] = set()

    def log(self, report: Report) -> None:
        values: dict[str, Any] = {"_timestamp": report.time}
        if self.ranks == 0:
            self._run.log({**report.metrics, **values}, step=report.step)
            return
        prefix = f"rank_{report.rank}/"
        if report.rank not in self._ranks_seen:
            self._ranks_seen.add(report.rank)
            self._run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")
        values |= {f"{prefix}{name}": value for name, value in report.metrics.items()}
        self._run.log({**values, f"{prefix}step": report.step})  # W&B has one step for all, which must not decrease

    def checkpoint(self, checkpoint: Checkpoint, step: int) -> None:
        artifact = self._wandb.Artifact(f"checkpoint-{self._id}", type="model", metadata={"step": step})
        with checkpoint.as_directory() as folder:
            artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=[Path(str(checkpoint.path)).name])

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
