"""How report() stores a checkpoint. Runs in: worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.api.config import CheckpointUploadMode, ValidationTaskConfig
from distrain.storage.paths import RunPaths

if TYPE_CHECKING:
    from collections.abc import Callable

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
        if not isinstance(self.mode, CheckpointUploadMode):
            raise TypeError(f"report(): checkpoint_upload_mode must be a CheckpointUploadMode, got {self.mode!r}")
        if self.delete is not None and not isinstance(self.delete, bool):
            raise TypeError(
                f"report(): delete_local_checkpoint_after_upload must be True, False or None, got {self.delete!r}"
            )
        if self.function is not None and not callable(self.function):
            raise TypeError(f"report(): checkpoint_upload_fn must be a function, got {self.function!r}")
        if self.validation is not None and not isinstance(self.validation, ValidationTaskConfig):
            raise TypeError(f"report(): validation must be a bool or a ValidationTaskConfig, got {self.validation!r}")
        if self.mode is CheckpointUploadMode.MEMORY and self.function is not None:
            raise ValueError(
                "report(): checkpoint_upload_fn stores the checkpoint itself; leave out CheckpointUploadMode.MEMORY"
            )
        if self.name is None:
            return
        if not isinstance(self.name, str):
            raise TypeError(f"report(): checkpoint_dir_name must be a str, got {self.name!r}")
        if (why_not := RunPaths(Path()).name_problem(self.name)) is not None:
            raise ValueError(f"report(): checkpoint_dir_name {why_not}")

    @property
    def deletes(self) -> bool:
        """True if the local files are deleted once the checkpoint is committed."""
        return self.mode is CheckpointUploadMode.ASYNC if self.delete is None else self.delete
