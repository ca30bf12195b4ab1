"""A checkpoint in the memory of the hosts. Runs in: coordinator, agent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The files of one rank. folder: their directory on ``host``. copy: the host that has, or gets, a copy, or ""."""

    host: str
    folder: str
    copy: str = ""


@dataclass(frozen=True, slots=True)
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

    def files_of(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return size and crc32 of each file of a part."""
        files = self.manifest["files"].items()
        return {name: (fact["size"], int(fact["crc32"], 16)) for name, fact in files if fact["rank"] == rank}

    def encoded(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return asdict(self)

    @classmethod
    def decoded(cls, fields: dict[str, Any]) -> MemoryRound:
        """Return the round that :meth:`encoded` was called for."""
        parts = {int(rank): MemoryPart(**part) for rank, part in fields["parts"].items()}
        return cls(**{**fields, "parts": parts})
