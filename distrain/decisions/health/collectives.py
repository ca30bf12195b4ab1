"""A comparison of the flight recorders of the ranks: who lacks which collective. Runs in: coordinator.

Pure: no I/O, no clock. The records are those of :func:`distrain.worker.flight_recorder.dump`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.system.text import name_ranks, rank_list, ranks_have

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

_DEFAULT_GROUP = "default_pg"
_MOST_SENTENCES = 4
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce")
_TYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32"}


@dataclass(frozen=True, slots=True)
class _Call:
    """One collective of one rank. ``number`` counts those of the group from 1."""

    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    is_over: bool

    @property
    def kind(self) -> tuple[object, ...]:
        """Return the parts that must be the same on all ranks. Some operations allow each rank another size."""
        return self.operation, self.types, self.sizes if self.operation in _SAME_SIZES else ()

    def __str__(self) -> str:
        inputs = [" × ".join(map(str, size)) or "scalar" for size in self.sizes]
        types = [_TYPES.get(one, one.lower()) for one in dict.fromkeys(self.types)]
        shown = f" ({', '.join([*inputs[:1], *types])})" if inputs else ""
        more = f" and {len(inputs) - 1} more tensors" if len(inputs) > 1 else ""
        return f"{self.operation} #{self.number}{shown}{more}"


@dataclass(frozen=True, slots=True)
class _Group:
    """A process group. calls: by member whose records are known, then by number."""

    name: str
    members: Sequence[int]
    calls: Mapping[int, Mapping[int, _Call]]

    def __str__(self) -> str:
        if self.name == _DEFAULT_GROUP:
            return "the default group"
        named = f" {self.name!r}" if self.name not in ("", "undefined") else ""
        return f"the group{named} of ranks {rank_list(self.members)}"

    def numbers(self) -> list[int]:
        """Return the numbers of the collectives that no rank has forgotten, the first ones first."""
        oldest = max((min(those) for those in self.calls.values() if those), default=0)
        return sorted({number for those in self.calls.values() for number in those if number >= oldest})

    def mismatch(self) -> list[str]:
        """Return a sentence about the first collective for which ranks have called different ones."""
        for number in self.numbers():
            kinds: dict[tuple[object, ...], list[int]] = {}
            for rank, those in self.calls.items():
                if number in those:
                    kinds.setdefault(those[number].kind, []).append(rank)
            if len(kinds) > 1:
                parts = [f"{name_ranks(ranks)} called {self.calls[ranks[0]][number]}" for ranks in kinds.values()]
                return [f"collectives of {self} do not match: {', '.join(parts)}"]
        return []

    def lacking(self, finished: Collection[int], *, have_failed: bool) -> Iterator[str]:
        """Yield sentences about the ranks that lack a collective in which others wait.

        have_failed: ranks have failed in it. Then only the last one matters, and who lacks it may have failed earlier.
        """
        for number in reversed(self.numbers()) if have_failed else self.numbers():
            waiting = [rank for rank, those in self.calls.items() if number in those and not those[number].is_over]
            if waiting:
                break
        else:
            return
        call = self.calls[waiting[0]][number]
        gone = [rank for rank in self.members if rank not in self.calls and rank in finished]
        lacking = [rank for rank, those in self.calls.items() if number not in those and not have_failed]
        if gone:
            yield f"{ranks_have(gone)} finished train_func without {call} of {self}"
        for rank in lacking:
            last = f"its last was #{max(self.calls[rank])}" if self.calls[rank] else "it has called none"
            yield f"rank {rank} never reached {call} of {self}; {last}"
        if not gone and not lacking and len(self.calls) < len(self.members):
            called = f"{name_ranks(waiting)} called {call} of {self}"
            yield f"{called}; the other ranks must call the same, usually with the same shape"


def compare(records: Mapping[int, Mapping[str, Any]], *, finished: Collection[int] = ()) -> list[str]:
    """Return sentences that name the collectives that ranks lack, or that do not match; none if all match.

    records: by rank. Ranks without records are left out, unless they have ``finished`` train_func.
    """
    calls = {rank: _calls(record) for rank, record in records.items()}
    have_failed = any(record["has_failed"] for record in records.values())
    members: dict[str, Sequence[int]] = {}
    names: dict[str, str] = {}
    for record in records.values():
        members |= record["groups"]
        names |= {entry["process_group"][0]: entry["process_group"][1] for entry in record["entries"]}
    sentences: list[str] = []
    for key, ranks in sorted(members.items()):
        group = _Group(names.get(key, ""), ranks, {rank: calls[rank].get(key, {}) for rank in ranks if rank in calls})
        sentences += group.mismatch() or group.lacking(finished, have_failed=have_failed)
    return sentences[:_MOST_SENTENCES]


def _calls(record: Mapping[str, Any]) -> dict[str, dict[int, _Call]]:
    """Return the collectives of a rank, by group and number. The one that failed counts as not over."""
    found: dict[str, dict[int, _Call]] = {}
    entries = [entry for entry in record["entries"] if not entry["is_p2p"]]
    for entry in entries:
        call = _Call(
            entry["collective_seq_id"],
            entry["profiling_name"].partition(":")[2],
            tuple(map(tuple, entry["input_sizes"])),
            tuple(entry["input_dtypes"]),
            is_over=entry["retired"] and not (record["has_failed"] and entry is entries[-1]),
        )
        found.setdefault(entry["process_group"][0], {})[call.number] = call
    return found
