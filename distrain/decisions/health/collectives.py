"""A comparison of the flight recorders of the ranks: who lacks which collective. Runs in: coordinator.

Pure: no I/O, no clock. The records are those of :func:`distrain.worker.flight_recorder.dump`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.decisions.blame import BATCHES
from distrain.system.text import name_ranks, rank_list, ranks_have

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

_DEFAULT_GROUP = "default_pg"
_MOST_SENTENCES = 4
_SYMMETRIC = ("all", "_all", "barrier", "reduce_scatter", "_reduce_scatter")
"""Beginnings of operations in which all ranks play the same part. In others, one rank is special, such as the root."""
_ANY = "all ranks must call the same collectives: look for one under `if rank == 0`, or loops of different lengths"
_SOME = "every rank must take part in every collective: look for one that only some call, such as under `if rank == 0`"
_SHAPES = "all ranks must pass the same shape and type: look at where the tensors come from, such as a short last batch"
_NETWORK = (
    "all ranks have made the same call, so look at the network between them: a firewall, the MTU, a cable; "
    "`distrain check` tries the connections"
)
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

    def cure(self, gone: Mapping[int, _Call]) -> str:
        """Return what to look for if a rank that made the calls ``gone`` has finished without this one."""
        if all(self.kind != one.kind for one in gone.values()):
            return _SOME
        return _ANY if self.operation == "barrier" else BATCHES

    def __str__(self) -> str:
        inputs = [" × ".join(map(str, size)) or "scalar" for size in self.sizes]
        types = [_TYPES.get(one, one.lower()) for one in dict.fromkeys(self.types)]
        shown = f" ({', '.join([*inputs[:1], *types])})" if inputs else ""
        more = f" and {len(inputs) - 1} more tensors" if len(inputs) > 1 else ""
        return f"{self.operation} #{self.number}{shown}{more}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of the flight recorders of the ranks.

    sentences: name the collectives that ranks lack, or that do not match. culprits: the ranks that differ from most.
    cure: what to look for. stranded: by rank, group and number, the last calls that wait for a rank that has finished.
    """

    sentences: Sequence[str] = ()
    culprits: Sequence[int] = ()
    cure: str = _ANY
    stranded: frozenset[tuple[int, str, int]] = frozenset()


UNKNOWN = Comparison()


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

    def mismatch(self) -> Comparison | None:
        """Return what is known about the first collective for which ranks have called different ones."""
        for number in self.numbers():
            kinds: dict[tuple[object, ...], list[int]] = {}
            for rank, those in self.calls.items():
                if number in those:
                    kinds.setdefault(those[number].kind, []).append(rank)
            if len(kinds) > 1:
                parts = [f"{name_ranks(ranks)} called {self.calls[ranks[0]][number]}" for ranks in kinds.values()]
                most = max(map(len, kinds.values()))
                apart = [rank for ranks in kinds.values() if len(ranks) < most for rank in ranks]
                operations = {self.calls[ranks[0]][number].operation for ranks in kinds.values()}
                sentence = f"collectives of {self} do not match: {', '.join(parts)}"
                return Comparison([sentence], apart, _SHAPES if len(operations) == 1 else _ANY)
        return None

    def lacking(self, finished: Collection[int], *, have_failed: bool) -> Comparison | None:
        """Return what is known about the ranks that lack a collective in which others wait.

        have_failed: ranks have failed in it. Then only the last one matters: a rank without it may have failed earlier.
        """
        for number in reversed(self.numbers()) if have_failed else self.numbers():
            living = [rank for rank, those in self.calls.items() if number in those and rank not in finished]
            if waiting := [rank for rank in living if not self.calls[rank][number].is_over]:
                break
        else:
            return None
        call = self.calls[waiting[0]][number]
        without = [rank for rank in self.members if number not in self.calls.get(rank, {})]
        gone = [rank for rank in without if rank in finished]
        lacking = [rank for rank in without if rank in self.calls and rank not in finished and not have_failed]
        sentences = [f"{ranks_have(gone)} finished train_func without {call} of {self}"] if gone else []
        for rank in lacking:
            last = f"its last was #{max(self.calls[rank])}" if self.calls[rank] else "it has called none"
            sentences.append(f"rank {rank} never reached {call} of {self}; {last}")
        if sentences:
            known = gone and gone[0] in self.calls
            return Comparison(sentences, gone or lacking, call.cure(self.calls[gone[0]]) if known else _ANY)
        if len(self.calls) < len(self.members):
            called = f"{name_ranks(waiting)} called {call} of {self}"
            return Comparison([f"{called}; the other ranks must call the same, usually with the same shape"])
        return Comparison(cure=_NETWORK) if call.operation.startswith(_SYMMETRIC) and not have_failed else None


def compare(records: Mapping[int, Mapping[str, Any]], *, finished: Collection[int] = ()) -> Comparison:
    """Compare the collectives of the ranks.

    records: by rank. Ranks without records are left out, unless they have ``finished`` train_func.
    """
    calls = {rank: _calls(record) for rank, record in records.items()}
    have_failed = any(record["has_failed"] for record in records.values())
    members: dict[str, Sequence[int]] = {}
    names: dict[str, str] = {}
    for record in records.values():
        members |= record["groups"]
        names |= {entry["process_group"][0]: entry["process_group"][1] for entry in record["entries"]}
    found: list[Comparison] = []
    for key, ranks in sorted(members.items()):
        group = _Group(names.get(key, ""), ranks, {rank: calls[rank].get(key, {}) for rank in ranks if rank in calls})
        if one := group.mismatch() or group.lacking(finished, have_failed=have_failed):
            found.append(one)
    found.sort(key=lambda one: not one.sentences)
    sentences = [sentence for one in found for sentence in one.sentences]
    first = found[0] if found else UNKNOWN
    stranded = frozenset(_stranded(records, calls, members, finished))
    return Comparison(sentences[:_MOST_SENTENCES], first.culprits, first.cure, stranded)


def _stranded(
    records: Mapping[int, Mapping[str, Any]],
    calls: Mapping[int, Mapping[str, Mapping[int, _Call]]],
    members: Mapping[str, Sequence[int]],
    finished: Collection[int],
) -> Iterator[tuple[int, str, int]]:
    """Yield the last calls that wait for a rank which has finished, and has not made the same call.

    A finished rank tells its latest calls: one that is older than these was made.
    """
    for rank in records.keys() - finished:
        in_order = sorted(records[rank]["entries"], key=lambda entry: entry.get("time_created_ns", 0))
        for last in in_order[-1:]:
            key, number = last["process_group"][0], last["collective_seq_id"]
            if last["is_p2p"] or last["retired"] or records[rank]["has_failed"]:
                continue
            own = calls[rank][key][number]
            for theirs in (calls.get(one, {}).get(key, {}) for one in members.get(key, ()) if one in finished):
                if number > max(theirs, default=0) or theirs.get(number, own).kind != own.kind:
                    yield rank, key, number


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
