"""What the flight recorders of the ranks say about a hang: who lacks which collective. Runs in: coordinator.

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

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> _Call:
        return cls(
            entry["collective_seq_id"],
            entry["profiling_name"].partition(":")[2],
            tuple(map(tuple, entry["input_sizes"])),
            tuple(entry["input_dtypes"]),
            bool(entry["retired"]),
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """What has to be the same on all ranks. Some operations allow each rank another size."""
        return self.operation, self.types, self.sizes if self.operation in _SAME_SIZES else ()

    def __str__(self) -> str:
        inputs = [" × ".join(map(str, size)) or "scalar" for size in self.sizes]
        types = [_TYPES.get(one, one.lower()) for one in dict.fromkeys(self.types)]
        shown = f" ({', '.join([*inputs[:1], *types])})" if inputs else ""
        more = f" and {len(inputs) - 1} more tensors" if len(inputs) > 1 else ""
        return f"{self.operation} #{self.number}{shown}{more}"


def compare(records: Mapping[int, Mapping[str, Any]], *, finished: Collection[int] = ()) -> list[str]:
    """Return sentences that name the collectives that ranks lack, or that do not match; none if all match.

    records: by rank. Ranks without records are left out, unless they have ``finished`` train_func.
    """
    calls = {rank: _calls(record) for rank, record in records.items()}
    members: dict[str, Sequence[int]] = {}
    names: dict[str, str] = {}
    for record in records.values():
        members |= record["groups"]
        names |= {entry["process_group"][0]: entry["process_group"][1] for entry in record["entries"]}
    sentences = [
        sentence
        for group, ranks in sorted(members.items())
        for sentence in _compare_group(group, names.get(group, ""), ranks, calls, finished)
    ]
    return sentences[:_MOST_SENTENCES]


def _calls(record: Mapping[str, Any]) -> dict[str, dict[int, _Call]]:
    """Return the collectives of a rank, by group and number."""
    found: dict[str, dict[int, _Call]] = {}
    for entry in record["entries"]:
        if not entry["is_p2p"]:
            found.setdefault(entry["process_group"][0], {})[entry["collective_seq_id"]] = _Call.of(entry)
    return found


def _compare_group(
    group: str,
    name: str,
    members: Sequence[int],
    calls: Mapping[int, Mapping[str, Mapping[int, _Call]]],
    finished: Collection[int],
) -> Iterator[str]:
    """Yield a sentence about the first collective that differs: there may be many after it."""
    known = {rank: calls[rank].get(group, {}) for rank in members if rank in calls}
    numbers = sorted({number for those in known.values() for number in those})
    where = _group_in_words(name, members)
    oldest = max((min(those) for those in known.values() if those), default=0)
    for number in (one for one in numbers if one >= oldest):
        kinds: dict[tuple[object, ...], list[int]] = {}
        for rank, those in known.items():
            if number in those:
                kinds.setdefault(those[number].kind, []).append(rank)
        if len(kinds) > 1:
            parts = [f"{name_ranks(ranks)} called {known[ranks[0]][number]}" for ranks in kinds.values()]
            yield f"collectives of {where} do not match: {', '.join(parts)}"
            return
        lacking = [rank for rank, those in known.items() if number not in those]
        pending = {
            rank: those[number] for rank, those in known.items() if number in those and not those[number].is_over
        }
        if not pending:
            continue
        call = next(iter(pending.values()))
        gone = [rank for rank in members if rank not in known and rank in finished]
        if gone:
            yield f"{ranks_have(gone)} finished train_func without {call} of {where}"
        for rank in lacking:
            yield f"rank {rank} never reached {call} of {where}; {_instead(known[rank], calls[rank], group)}"
        if not gone and not lacking and len(known) < len(members):
            yield f"{name_ranks(pending)} called {call} of {where}; the other ranks must call the same"
        return


def _instead(own: Mapping[int, _Call], calls: Mapping[str, Mapping[int, _Call]], group: str) -> str:
    """Return the last collective of a rank in a group, and the one of another group in which it waits."""
    last = f"its last was #{max(own)}" if own else "it has called none"
    other = [call for name, those in calls.items() if name != group for call in those.values() if not call.is_over]
    return f"{last}, and it waits in {other[-1]} of another group" if other else last


def _group_in_words(name: str, members: Sequence[int]) -> str:
    if name == _DEFAULT_GROUP:
        return "the default group"
    named = f" {name!r}" if name not in ("", "undefined") else ""
    return f"the group{named} of ranks {rank_list(members)}"
