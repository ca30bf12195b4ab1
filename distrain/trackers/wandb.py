"""Weights & Biases. Runs in: coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from distrain.api.tracker import Report, TrackedRun, Tracker
from distrain.storage import names
from distrain.system.imports import require

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from distrain.storage.checkpoint import Checkpoint


@dataclass(kw_only=True)
class Wandb(Tracker):
    """Log to Weights & Biases. The API key comes from ``wandb login`` or the environment.

    project, entity, group, mode, tags: as for ``wandb.init()``.
    directory: for its files; by default ``trackers`` in the run directory.
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
    checkpoints: bool = False

    package: ClassVar[str | None] = "wandb"

    def start(self, run: TrackedRun) -> None:
        self._wandb = require("wandb")
        self._id = run.id
        folder = run.directory / names.TRACKERS if self.directory is None else Path(self.directory).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            id=run.id,
            resume="allow",
            name=run.name,
            **{name: getattr(self, name) for name in ("project", "entity", "group", "mode")},
            tags=list(self.tags),
            dir=str(folder),
            config={**run.config, **{f"run/{name}": value for name, value in run.tags.items()}},
            allow_val_change=True,
            reinit="create_new",  # the user's process may have a run of its own
            settings=self._wandb.Settings(console="off"),
        )
        if not self._run.offline:
            run.state["url"] = self._run.url

    def log(self, report: Report) -> None:
        self._run.log({**report.metrics, "_timestamp": report.time}, step=report.step)

    def checkpoint(self, checkpoint: Checkpoint, step: int) -> None:
        artifact = self._wandb.Artifact(f"checkpoint-{self._id}", type="model", metadata={"step": step})
        with checkpoint.as_directory() as folder:
            artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=[Path(str(checkpoint.path)).name])

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
