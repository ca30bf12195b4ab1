"""The files and metrics that a checkpoint is committed with. Runs in: anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CommittedFile:
    """One file of a checkpoint: the rank that brought it, its size in bytes and its crc32."""

    path: str
    rank: int
    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The order to commit a checkpoint, as all its files are stored."""

    ordinal: int
    files: tuple[CommittedFile, ...]
    ranks: tuple[int, ...]
    metrics: dict[str, Any]
