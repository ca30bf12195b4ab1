"""The files, metrics and positions that a checkpoint is committed with, in memory or on storage. Runs in: anywhere."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class CommittedFile:
    """One file of a checkpoint: the rank that reported it, its size in bytes and its crc32."""

    path: str
    rank: int
    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The order to commit a checkpoint, because all its files are stored.

    silent: the ranks of which nobody knows that they report nothing: they had just not reported in time.
    """

    ordinal: int
    files: tuple[CommittedFile, ...]
    ranks: tuple[int, ...]
    metrics: dict[str, Any]
    world_size: int = 0
    silent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The files of one rank. folder: their directory on ``host``. copy: the host that has, or gets, a copy, or ""."""

    host: str
    folder: str
    copy: str = ""


@dataclass(frozen=True)
class MemoryRound:
    """A checkpoint that is committed, in memory.

    manifest: as on storage; a file belongs to the part of its ``rank``. metadata: the run's, which is added to the
    checkpoint's own. positions: those in the data.
    """

    name: str
    manifest: dict[str, Any]
    metadata: dict[str, Any]
    positions: dict[str, Any]
    parts: dict[int, MemoryPart]

    @property
    def index(self) -> int:
        """The number of the checkpoint, counted over the whole run."""
        return int(self.manifest["index"])

    @cached_property
    def files(self) -> dict[int, dict[str, tuple[int, int]]]:
        """By rank and name: size and crc32 of each file."""
        files: dict[int, dict[str, tuple[int, int]]] = {rank: {} for rank in self.parts}
        for name, fact in self.manifest["files"].items():
            files[fact["rank"]][name] = fact["size"], int(fact["crc32"], 16)
        return files

    def encoded(self) -> bytes:
        """Return a text for :meth:`decoded`."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, text: bytes) -> MemoryRound:
        """Return the round from its text."""
        fields = json.loads(text)
        parts = {int(rank): MemoryPart(**part) for rank, part in fields["parts"].items()}
        return cls(**{**fields, "parts": parts})


def merged_positions(by_rank: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the ranks' positions in the data, by the name of a loader and by rank.

    A rank whose position equals that of the next lower rank has no entry. The ranks are text, as keys are in JSON.
    """
    merged: dict[str, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    for rank in sorted(by_rank):
        for name, position in by_rank[rank].items():
            if name not in last or position != last[name]:
                merged.setdefault(name, {})[str(rank)] = last[name] = position
    return merged


def other_data(by_rank: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return a warning if ranks that share a dataset do not read the same data."""
    seen: dict[str, tuple[int, Any]] = {}
    for rank, positions in by_rank.items():
        for name, position in positions.items():
            if "data" not in position:  # the rank has not begun, or it is a loader
                continue
            data = {**position["data"], **position.get("first rows", {})}
            first, expected = seen.setdefault(name, (rank, data))
            if data != expected and position["ranks"] > 1:
                return (
                    f"dataset {name!r} is not the same on all ranks: rank {first} reads {expected}, and rank {rank} "
                    f"reads {data}; some rows come twice, or never. Have all ranks read the same, or each its own rows "
                    "with DataConfig(datasets_to_split=[...])"
                )
    return None
