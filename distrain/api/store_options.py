"""How report() stores a checkpoint. Runs in: worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.api.config import CheckpointUploadMode, ValidationTaskConfig
from distrain.storage.paths import RunPaths
from distrain.system.arguments import check_type

if TYPE_CHECKING:
    from distrain.storage.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """The arguments of ``report()`` that tell how to store a checkpoint. Raises TypeError, ValueError for bad ones.

    delete: None for the default of the mode. function: the ``checkpoint_upload_fn``.
    """

    name: str | None = None
    mode: CheckpointUploadMode = CheckpointUploadMode.SYNC
    delete: bool | None = None
    function: Callable[[Checkpoint, str], Checkpoint] | None = None
    validation: ValidationTaskConfig | None = None

    def __post_init__(self) -> None:
        check_type("report(): checkpoint_upload_mode", self.mode, CheckpointUploadMode, "a CheckpointUploadMode")
        check_type("report(): delete_local_checkpoint_after_upload", self.delete, bool, optional=True)
        check_type("report(): checkpoint_upload_fn", self.function, Callable, optional=True)
        allowed = "a bool or a ValidationTaskConfig"
        check_type("report(): validation", self.validation, ValidationTaskConfig, allowed, optional=True)
        check_type("report(): checkpoint_dir_name", self.name, str, optional=True)
        if self.mode is CheckpointUploadMode.MEMORY and self.function is not None:
            raise ValueError(
                "report(): checkpoint_upload_fn stores the checkpoint itself; leave out CheckpointUploadMode.MEMORY"
            )
        if self.name is not None and (why_not := RunPaths(Path()).name_problem(self.name)) is not None:
            raise ValueError(f"report(): checkpoint_dir_name {why_not}")

    @property
    def deletes(self) -> bool:
        """True if the local files are deleted once the checkpoint is committed."""
        return self.mode is CheckpointUploadMode.ASYNC if self.delete is None else self.delete
