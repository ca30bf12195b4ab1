"""What a worker is told of the checkpoints of its run. Runs in: anywhere."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distrain.checkpoint import Checkpoint

__all__ = ["CheckpointConsistencyMode", "ReportedCheckpoint", "ReportedCheckpointStatus"]


class CheckpointConsistencyMode(enum.Enum):
    """What ``get_all_reported_checkpoints()`` waits for.

    COMMITTED: the checkpoints of all reports that this rank has made are committed, also those that other ranks brought
    in the same of their reports. VALIDATED: and no checkpoint waits for its validation.
    """

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


class ReportedCheckpointStatus(enum.Enum):
    """How far a checkpoint is. COMMITTED: and nobody asked for a validation."""

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_FAILED = "VALIDATION_FAILED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"


@dataclass(frozen=True, slots=True)
class ReportedCheckpoint:
    """A committed checkpoint, the metrics it was reported with and those of its validation."""

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus
