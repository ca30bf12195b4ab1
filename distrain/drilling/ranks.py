"""The comparison of ranks that train one model, with each other and with one rank alone. Runs in: coordinator.

:mod:`distrain.torch.drill.rank_watch` says which ranks must have the same numbers, and which must read other rows.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain, combinations, product, starmap
from statistics import median
from typing import TYPE_CHECKING, Any

from distrain.drilling.causes import Cause
from distrain.drilling.compare import distance
from distrain.errors import JobError
from distrain.system.text import name_ranks, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distrain.drilling.journal import Attempt, Note

_EQUAL = 1e-5
"""The largest relative difference of numbers that must be equal: DDP's are so, bit by bit."""
_LIKE_ONE_RANK = 0.02
"""That of gradients, which one rank adds up in another order."""
_CHANCE = 0.05
"""The largest share of rows that two ranks have in common although the data are divided: equal rows in the data."""


class Ranks:
    """The ranks of an attempt. ``has_finished``: whether they have trained until the end."""

    def __init__(self, attempt: Attempt, *, has_finished: bool) -> None:
        self._notes = {rank: attempt.of("rows", rank) for rank in attempt.notes if attempt.of("rows", rank)}
        self._attempt, self._has_finished = attempt, has_finished
        shares: dict[str, list[int]] = {}
        for rank, notes in self._notes.items():
            shares.setdefault(notes[0]["share"], []).append(rank)
        self._shares = [ranks for ranks in shares.values() if len(ranks) > 1]
        """Ranks that must read different rows."""
        self.count = max(map(len, shares.values()), default=0)
        first = [[one for one in notes if one.get("pass") == notes[0].get("pass")] for notes in self._notes.values()]
        joined = [notes[-1]["step"] for notes in first if notes[-1]["joined"]]
        self._comparable = min(joined, default=math.inf)
        """The last step that all ranks take: with join(), some may have no more batches."""

    @property
    def rows_at_once(self) -> int:
        """The rows in the first batches of ranks that read different rows."""
        return sum(len(self._notes[rank][0]["rows"]) for rank in self._first_share)

    @property
    def _first_share(self) -> list[int]:
        return self._shares[0] if self._shares else [min(self._notes)]

    def faults(self) -> list[Cause]:
        """Return what is wrong, each cause once."""
        found = chain(*map(self._faults_of_data, self._shares), self._faults_of_replicas())
        return list({cause.name: cause for cause in found}.values())

    # -- data -----------------------------------------------------------------------------------------------------

    def _faults_of_data(self, ranks: Sequence[int]) -> Iterator[Cause]:
        identity = self._identity(ranks)
        overlap = self._overlap(ranks, identity)
        pairs = [overlap[:2]] if overlap else combinations(ranks, 2) if self._share_order(ranks, identity) else ()
        if difference := next(filter(None, starmap(self._sampler_difference, pairs)), ""):
            yield Cause("sampler-seed", difference + self._at(ranks[0]))
        elif overlap:
            one, other, text = overlap
            yield Cause("same-rows", f"ranks {one} and {other} {text}{self._at(one)}")
        sizes = {rank: self._batches(rank) for rank in ranks if not self._notes[rank][0]["joined"]}
        for one, other in combinations(sizes, 2):
            uneven = [pair for pair in zip(sizes[one], sizes[other], strict=False) if pair[0] != pair[1]]
            if uneven:
                counts = f"{uneven[0][0]} and {uneven[0][1]} batches in a pass over the data"
                yield Cause("uneven", f"ranks {one} and {other} train on {counts}{self._at(one)}")
                break

    def _batches(self, rank: int) -> list[int]:
        """Return the number of batches in each complete pass over the data."""
        counts = list(Counter(note.get("pass", 0) for note in self._notes[rank]).values())
        return counts if self._has_finished else counts[:-1]

    def _identity(self, ranks: Iterable[int]) -> str:
        """Return by what rows are known: their indices in equal datasets, or their contents if ranks read other data.

        A rank may also read the batch of all ranks, and train on a part of it.
        """
        notes = [note for rank in ranks for note in self._notes[rank]]
        is_known = all(len(note.get("index") or ()) == len(note["rows"]) for note in notes)
        datasets = {index.partition(":")[0] for note in notes for index in note.get("index") or ()}
        return "index" if is_known and len(datasets) == 1 else "rows"

    def _share_order(self, ranks: Sequence[int], identity: str) -> bool:
        """Return whether each rank gets every n-th row of an order that must be the same on all of them."""
        samplers = [note.get("sampler", {}) for rank in ranks for note in self._notes[rank]]
        return identity == "index" and all(one.get("shuffle") and one.get("num_replicas", 1) > 1 for one in samplers)

    def _sampler_difference(self, one: int, other: int) -> str:
        """Say what differs between the samplers of two ranks in the same pass over the data; ``""`` if nothing does."""
        for index, (mine, yours) in enumerate(zip(self._notes[one], self._notes[other], strict=False)):
            values, others = mine.get("sampler", {}), yours.get("sampler", {})
            name = next((name for name, value in values.items() if value != others.get(name)), "")
            if name and mine["pass"] == yours["pass"]:
                until = {rank: notes[: index + 1] for rank, notes in self._notes.items()}
                calls = [rank for rank, notes in until.items() if notes[-1].get("sampler") != notes[0].get("sampler")]
                if name == "epoch" and 0 < len(calls) < len(until):
                    return f"only {name_ranks(calls)} called set_epoch()"
                return f"the sampler's {name} is {values[name]} and {others.get(name)} on ranks {one} and {other}"
        return ""

    def _overlap(self, ranks: Sequence[int], identity: str) -> tuple[int, int, str] | None:
        """Return two ranks that both read rows in a pass over the data, and which; None if it may be chance.

        Equal rows in the data, and draws with replacement, make about as many equal pairs across ranks as within them.
        """
        if self._notes[ranks[0]][0].get("sampler", {}).get("num_repeats", 1) > 1:
            return None  # the sampler gives a row to several ranks, which augment it differently
        passes = [*self._passes(ranks, identity)]
        counts_of = [{rank: Counter(chain.from_iterable(one)) for rank, one in batches.items()} for batches in passes]
        every = [each for counts in counts_of for each in counts.values()]
        pairs = sum(math.comb(times, 2) for each in every for times in each.values())
        rate = pairs / max(sum(math.comb(each.total(), 2) for each in every), 1)
        for (batches_of, counts), (one, other) in product(zip(passes, counts_of, strict=True), combinations(ranks, 2)):
            batches = list(zip(batches_of[one], batches_of[other], strict=False))
            same = [mine for mine, yours in batches if sorted(mine) == sorted(yours)]
            told = [mine for mine in same if any(counts[one][row] == 1 for row in mine)]  # constant rows tell nothing
            if len(told) > 1 and 2 * len(told) > len(batches):
                return one, other, f"read the same rows, batch by batch ({len(told)} of {len(batches)})"
            sizes = [counts[rank].total() for rank in (one, other)]
            across = sum(times * counts[other][row] for row, times in counts[one].items())
            if across > 3 * rate * math.prod(sizes) + max(_CHANCE * min(sizes), 3):
                both = len(counts[one].keys() & counts[other].keys())
                return one, other, f"both read {both} of {len(counts[one])} rows in a pass over the data"
        return None

    def _passes(self, ranks: Sequence[int], identity: str) -> Iterator[dict[int, list[list[str]]]]:
        """Yield the batches of each pass, by rank. If no loader counts passes, there is only the first.

        The last batch of a pass, which a sampler may have filled up, is left out.
        """
        ends = self._end_of_pass(ranks, identity)
        for each in dict.fromkeys(note.get("pass") for rank in ranks for note in self._notes[rank]):
            found = {}
            for rank in ranks:
                batches = [note for note in self._notes[rank][:ends] if note.get("pass") == each]
                is_complete = self._has_finished or batches[-1:] != self._notes[rank][-1:]
                found[rank] = [note[identity] for note in batches[: len(batches) - is_complete]]
            yield found

    def _end_of_pass(self, ranks: Sequence[int], identity: str) -> int | None:
        """Return the number of batches in the first pass, if no loader counts passes: the next one has known rows."""
        seen: set[str] = set()
        for index, notes in enumerate(zip(*(self._notes[rank] for rank in ranks), strict=False)):
            rows = set(chain.from_iterable(note[identity] for note in notes))
            if "pass" not in notes[0] and rows <= seen:
                return index
            seen |= rows
        return None

    # -- replicas -------------------------------------------------------------------------------------------------

    def _faults_of_replicas(self) -> Iterator[Cause]:
        differences, gradients = self._differences("replicas"), self._differences("gradients")
        apart = {step for step, part, *_ in differences if part == "parameters"}
        steps = [{note["step"] for note in self._attempt.of("replicas", rank)} for rank in self._notes]
        if apart and not {step for step in set.intersection(*steps) if step > min(apart)} <= apart:
            return  # they become equal again, as with local SGD
        wrong = {step for step, *_ in gradients}
        for step, _, named, ranks in self._differences("clip"):
            if step not in wrong:
                site = next(note["site"] for note in self._attempt.of("clip") if note["step"] == step)
                yield Cause("clip-before", f"the gradients of {named} differ between ranks {ranks} ({site})")
                return
        if skipped := self._skipped():
            yield Cause("replicas", skipped + self._made())
            return
        if apart and gradients:
            first, _, named, ranks = gradients[0]
            notes = (note for note in self._attempt.of("gradients") if note["step"] == first and note["unsynced_at"])
            unsynced = next((note["unsynced_at"] for note in notes), "")
            place = f" ({unsynced})" if unsynced else self._made(named)
            text = f"the gradients of {named} differ between ranks {ranks} in step {first + 1}{place}"
            yield Cause("no-sync" if unsynced else "not-reduced", text)
        for step, part, named, ranks in differences[:1]:
            differs, made = f"{named} differs between ranks {ranks}", self._made(named)
            if step == 0 and part == "parameters":
                yield Cause("replica-start", f"{differs} before the first step{made}")
            elif not (apart and gradients):
                yield Cause("replicas", f"{part}: {differs} from step {step + 1} on{made}")

    def _at(self, rank: int) -> str:
        """Return the line that made the loader, or else the model, in parentheses."""
        site = self._notes[rank][0].get("site", "")
        return f" ({site})" if site else self._made()

    def _made(self, named: str = "") -> str:
        """Return the line that made the model of a parameter, in parentheses."""
        made = self._first("replicas")[0]["made"]
        site = made.get(named.strip("`")) or next(iter(made.values()), "")
        return f" ({site})" if site else ""

    def _skipped(self) -> str:
        """Say which rank has left out a step that others have taken, and is behind from then on."""
        for ranks in self._shares:
            batches_of = (self._notes[rank] for rank in ranks if self._comparable == math.inf)
            for batches, notes in enumerate(zip(*batches_of, strict=False)):
                taken = {rank: note["step"] for rank, note in zip(ranks, notes, strict=True)}
                if len({*taken.values()}) > 1:
                    named = " and ".join(f"{step} on rank {rank}" for rank, step in taken.items())
                    return f"the optimizer has taken {named} steps in {batches} batches"
        return ""

    def _differences(self, what: str) -> list[tuple[int, str, str, str]]:
        """Return step, part, name and ranks of what differs between ranks, the earliest and most telling first."""
        found = []
        seen: dict[tuple[int, str, str], tuple[int, Any]] = {}
        for rank in sorted(self._notes):
            for note in self._attempt.of(what, rank):
                if note["step"] > self._comparable:
                    break
                parts = note["values"] if what == "replicas" else {what: note["values"]}
                for order, (part, values) in enumerate(parts.items()):
                    for name, value in values.items():
                        first, expected = seen.setdefault((note["step"], part, name), (rank, value))
                        if distance(value, expected) > _EQUAL:
                            shown = f"`{name.partition('|')[0]}`"
                            found.append((note["step"], order, part, shown, f"{first} and {rank}"))
        return [(step, *more) for step, _, *more in sorted(found)]

    # -- one rank -------------------------------------------------------------------------------------------------

    def remarks(self) -> list[str]:
        """Return what is worth a look, but on purpose in many scripts."""
        notes = [note for each in self._notes.values() for note in each if note.get("sampler", {}).get("shuffle")]
        epochs = {note["sampler"].get("epoch") for note in notes}
        if len({note["pass"] for note in notes}) > 1 and len(epochs) == 1 and None not in epochs:
            at = self._at(min(self._notes))
            return [f"every pass over the data has the same order, as set_epoch() is never called{at}"]
        return []

    def rates_against(self, single: Ranks) -> list[str]:
        """Return the remark that the first learning rate depends on the number of ranks, if it does."""
        ours, alone = ([note["rates"][0] for note in each._first("gradients")] for each in (self, single))
        if not ours or not alone or not alone[0] or abs(ours[0] / alone[0] - 1) < _LIKE_ONE_RANK:
            return []
        return [f"the learning rate of {self.count} ranks is {number(ours[0] / alone[0])} times that of one"]

    def against(self, single: Ranks) -> tuple[list[Cause], list[str]]:
        """Compare the first gradients with those of one rank on the same rows. Return faults and remarks.

        Raises JobError if they cannot be compared.
        """
        ours, alone = self._first("gradients"), single._first("gradients")
        if not ours or not alone:
            raise JobError("no step of an optimizer was seen")
        if self._differences("gradients"):
            raise JobError("each rank takes steps of its own")
        if self._step_rows(0) != single._step_rows(0):
            raise JobError("it reads other rows")
        starts = [_whole([note["values"]["parameters"] for note in each._first("replicas")]) for each in (self, single)]
        if any(distance(value, starts[1].get(name)) > _EQUAL for name, value in starts[0].items()):
            raise JobError("it begins with other parameters")
        remarks = []
        norms = [_whole([note["whole"] for note in each]) for each in (ours, alone)]
        largest = max((value[1] for value in norms[1].values()), default=0.0)
        ratios = [
            norms[0][name][1] / norm
            for name, (_, norm) in norms[1].items()
            if name in norms[0] and norm > 1e-4 * largest
        ]
        usual = median(ratios) if ratios else 1.0
        where = f" ({ours[0]['reduced_at']})" if ours[0]["reduced_at"] else self._made()
        text = f"the gradients of {self.count} ranks are {number(usual)} times those of one rank on the same rows"
        if any(abs(ratio / usual - 1) > _LIKE_ONE_RANK for ratio in ratios):
            why = (
                f"BatchNorm (`{ours[0]['norms'][0]}`) is not synchronized"
                if ours[0]["norms"]
                else "such as a mean over unequal numbers of tokens"
            )
            remarks.append(f"the gradients depend on how the rows are divided among ranks: {why}")
        elif abs(usual / self.count - 1) < _LIKE_ONE_RANK:
            return [Cause("summed", text + where)], remarks
        elif abs(usual - 1) > _LIKE_ONE_RANK:
            remarks.append(f"{text}, as if the loss were summed up")
        return [], remarks

    def _first(self, what: str) -> list[Note]:
        """Return the first note of a kind of each rank."""
        return [notes[0] for rank in self._notes if (notes := self._attempt.of(what, rank))]

    def _step_rows(self, step: int) -> list[str]:
        """Return the rows of a step on all ranks that read different rows, sorted."""
        notes = [note for rank in self._first_share for note in self._notes[rank] if note["step"] == step]
        return sorted(chain.from_iterable(note["rows"] for note in notes))


def _whole(parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return sum and norm of each tensor, of which ranks in different places have different parts."""
    places = {name: value for part in parts for name, value in part.items()}
    found: dict[str, list[float]] = {}
    for key, (added, norm, *_) in places.items():
        name = key.partition("|")[0]
        total, whole = found.get(name, (0.0, 0.0))
        found[name] = [total + added, math.hypot(whole, norm)]
    return found
