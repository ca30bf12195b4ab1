"""Who a worker is, and where its run keeps things. Runs in: worker."""

from __future__ import annotations

import enum
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.checkpoint import Checkpoint
from distrain.system.ray_names import explaining
from distrain.system.remote_path import RemotePath, decode_filesystem, locate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fsspec import AbstractFileSystem

__all__ = [
    "CheckpointConsistencyMode",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "StorageContext",
    "TrainContext",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageContext:
    """Where a run keeps things: paths within ``storage_filesystem``, or URLs."""

    storage_fs_path: str
    experiment_dir_name: str
    filesystem: str = ""

    @property
    def storage_filesystem(self) -> AbstractFileSystem:
        return Checkpoint(self.storage_fs_path, decode_filesystem(self.filesystem)).filesystem

    @property
    def run(self) -> Path | RemotePath:
        """The run directory. Raises OSError if its filesystem is not to be had here."""
        return locate(self.experiment_fs_path, decode_filesystem(self.filesystem))

    def checkpoint(self, path: str) -> Checkpoint:
        """The checkpoint there."""
        return Checkpoint(path, decode_filesystem(self.filesystem))

    @property
    def experiment_fs_path(self) -> str:
        """The run directory."""
        return f"{self.storage_fs_path}/{self.experiment_dir_name}"

    @property
    def local_working_directory(self) -> str:
        """Where train_func runs: the directory of the user's process."""
        return os.getcwd()

    def build_checkpoint_path_from_name(self, checkpoint_dir_name: str) -> str:
        return f"{self.experiment_fs_path}/{checkpoint_dir_name}"

    def make_default_checkpoint_dir_name(self) -> str:
        """A name that no checkpoint of the run has; distrain itself numbers them (``checkpoint_000000``)."""
        return time.strftime(f"checkpoint_%Y-%m-%d_%H-%M-%S.{time.time_ns() // 1000 % 1_000_000:06d}")


@explaining("TrainContext")
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainContext:
    """Who this worker is. Ranks count from 0; ``devices`` index the GPUs that this process can see; ``shares_gpu``:
    some ranks of the run share a GPU; ``validates``: the trainer has a validation function.

    ::

        context = distrain.get_context()
        print(f"rank {context.get_world_rank()} of {context.get_world_size()}")
    """

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    run_name: str
    storage_path: str
    attempt: int
    devices: tuple[int, ...]
    shares_gpu: bool = False
    run_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    filesystem: str = ""
    validates: bool = False

    def get_world_rank(self) -> int:
        return self.world_rank

    def get_world_size(self) -> int:
        return self.world_size

    def get_local_rank(self) -> int:
        return self.local_rank

    def get_local_world_size(self) -> int:
        return self.local_world_size

    def get_node_rank(self) -> int:
        """Index of this worker's host."""
        return self.node_rank

    def get_experiment_name(self) -> str:
        """Name of the run."""
        return self.run_name

    def get_storage(self) -> StorageContext:
        return StorageContext(
            storage_fs_path=self.storage_path, experiment_dir_name=self.run_name, filesystem=self.filesystem
        )

    def get_metadata(self) -> dict[str, Any]:
        """What the trainer was given as ``metadata=``."""
        return dict(self.metadata)

    # A trial of Ray Tune is a run here.

    def get_trial_name(self) -> str:
        """Name of the run."""
        return self.run_name

    def get_trial_id(self) -> str:
        """Id of the run; a run that was continued later has a new one."""
        return self.run_id

    def get_trial_dir(self) -> str:
        """The run directory."""
        return self.get_storage().experiment_fs_path

    def get_trial_resources(self) -> dict[str, float]:
        """What each worker has: ``{"CPU": 1}`` or ``{"GPU": 1}`` unless ``resources_per_worker`` says otherwise."""
        return dict(self.resources)


class CheckpointConsistencyMode(enum.Enum):
    """What ``get_all_reported_checkpoints()`` waits for.

    COMMITTED: the checkpoints of all reports that this rank has made are committed, also those that other ranks brought
    in the same of their reports. VALIDATED: and no checkpoint waits for its validation.

    ::

        kept = distrain.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
    """

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


class ReportedCheckpointStatus(enum.Enum):
    """How far a checkpoint is. COMMITTED: and nobody asked for a validation.

    ::

        for reported in distrain.get_all_reported_checkpoints():
            is_validated = reported.status is ReportedCheckpointStatus.VALIDATED
    """

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_FAILED = "VALIDATION_FAILED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"


@dataclass(frozen=True, slots=True)
class ReportedCheckpoint:
    """A committed checkpoint, the metrics it was reported with and those of its validation.

    ::

        for reported in distrain.get_all_reported_checkpoints():
            print(reported.checkpoint, reported.metrics)
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus
