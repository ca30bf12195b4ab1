"""The comparison of a resumed attempt with undisturbed ones. Runs in: coordinator."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from distrain.drilling.causes import PARTS, SAVED, Cause, Differences
from distrain.system.text import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distrain.drilling.causes import Step
    from distrain.drilling.journal import Attempt
    from distrain.drilling.order import Unit

_NOISE_FACTOR = 4.0
"""Two undisturbed runs show only a part of the noise."""
_ROUNDING = 1e-5
"""The largest relative difference that the order of additions explains, if everything was equal at the start."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The first difference. at: the number of the unit. what: such as ``loss 0.4 instead of 0.3``."""

    at: int
    what: str
    size: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a comparison, also in words. aside: metrics that differ without having an effect."""

    outcome: Literal["exact", "noise", "drift"]
    text: str
    causes: Sequence[Cause] = ()
    aside: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Straight:
    """An undisturbed attempt, of so many units, and what a second one has shown.

    noise: the largest relative difference of each part of the state, and of each metric. Metrics that differ although
    the models do not are in ``measured`` instead: times, rates and the like.
    """

    attempt: Attempt
    unit: Unit
    until: int
    noise: Mapping[str, float] = field(default_factory=dict)
    measured: frozenset[str] = frozenset()

    def with_second(self, other: Attempt) -> Straight:
        """Return this with what another undisturbed attempt shows."""
        noise: dict[str, float] = {}
        for rank in other.notes:
            for part in PARTS:
                for step, expected in self._pairs(other, rank):
                    for _, size in _different(step.get(part, {}), expected.get(part, {})):
                        noise[part] = max(noise.get(part, 0.0), size)
        measured = set()
        for _, name, _, _, size in self._metric_differences(other):
            if other.of("step") and "model" not in noise:
                measured.add(name)
            else:
                noise[name] = max(noise.get(name, 0.0), size)
        return replace(self, noise=noise, measured=frozenset(measured))

    @property
    def is_deterministic(self) -> bool:
        """True if the models, or all metrics, of undisturbed attempts are the same, bit by bit."""
        return "model" not in self.noise if self.attempt.of("step") else not self.noise

    def why_noisy(self, second: Attempt) -> str:
        """Say where two undisturbed attempts begin to differ, and which switch makes them equal."""
        found = replace(self, noise={}).first_differences(second, 0)
        if not found:
            return f"`{next(iter(self.noise))}` differs; give the random numbers that it depends on a seed"
        differences = min(found, key=lambda one: one.index)
        part = next((part for part in ("random", "data") if part in differences.keys), "")
        named = {"random": "random numbers", "data": "the data"}.get(part, "the results of operations")
        cure = "seed each generator, sampler and worker" if part else "call distrain.torch.enable_reproducibility()"
        return f"not deterministic: {named} differ from step {differences.index + 1} on; {cure}"

    def start_of(self, attempt: Attempt, killed_at: int) -> int:
        """Return the steps before the one with which a resumed attempt should begin.

        It follows from the report of the checkpoint, unless all that is trained is that of another step: a checkpoint
        may be reported later than it is taken. A script that does not report shows it by its parameters, or else by
        what it has saved.
        """
        steps, ours = self.attempt.of("step", attempt.rank), attempt.of("step", attempt.rank)
        if self.unit == "step":
            steps = steps[: killed_at + 1]
            same = [index for index, step in enumerate(steps) if ours and step.get("model") == ours[0].get("model")]
            saves = [save for save in self.attempt.saves("step") if save <= killed_at]
            return max(same, default=0) or max(saves, default=0)
        start = attempt.offset
        if ours and len(steps) > start > 0:
            same = [index for index in range(1, start + 1) if not {*SAVED} & self._keys(ours[0], steps[index]).keys()]
            start = max(same, default=start)
        return start

    def compare(self, attempt: Attempt, start: int) -> Comparison:
        """Compare a resumed attempt, which should begin after ``start`` steps."""
        attempt = replace(attempt, offset=start)
        found = self.first_differences(attempt, start)
        metrics, aside = self._drift_of_metrics(attempt)
        rounding = 0.0 if any(one.index == 0 and one.keys.keys() - {"random"} for one in found) else _ROUNDING
        drifts = [one for one in (metrics, self._drift_of_model(attempt, start)) if one is not None]
        if real := [one for one in drifts if one.size > rounding]:
            text = f"drifts from {self.unit} {real[0].at}: {real[0].what}"
            return Comparison("drift", text, self.causes(attempt, start), aside)
        if drifts or not self.is_deterministic:
            return Comparison("noise", "equal within noise", aside=aside)
        return Comparison("exact", "exact", aside=aside)

    def compare_start(self, attempt: Attempt, start: int) -> list[Cause]:
        """Return why another number of workers does not begin with the same state. Their data must differ."""
        ours, theirs = ([each.of("step", rank) for rank in sorted(each.notes)] for each in (attempt, self.attempt))
        if not all(ours) or any(len(steps) <= start for steps in theirs):
            return []
        step, expected = _whole([steps[0] for steps in ours]), _whole([steps[start] for steps in theirs])
        keys = self._keys(step, expected, rounding=_ROUNDING)
        keys = {part: names for part, names in keys.items() if part not in ("random", "data", "lr")}
        return Differences(0, 0, keys, step, expected, attempt, self.attempt, start).causes() if keys else []

    def causes(self, attempt: Attempt, start: int) -> list[Cause]:
        """Return the likely causes of a drift, each once: of the earliest differences, or of counters that differ."""
        found = self.first_differences(attempt, start)
        first = min((one.index for one in found), default=0)
        named = [cause for one in found if one.index == first for cause in one.causes()]
        if (other := self._first_other_data(attempt, start)) and other.index > first:
            named = [*other.causes(), *named]
        if not named:
            rank = attempt.rank
            pairs = islice(self._pairs(attempt, rank, start), 1)
            beginnings = [Differences(rank, 0, {}, step, expected, attempt, self.attempt) for step, expected in pairs]
            named = [Cause("step", again) for one in beginnings if (again := one.counter(""))] or [Cause("unknown", "")]
        return list({cause.name: cause for cause in reversed(named)}.values())[::-1]

    def first_differences(self, attempt: Attempt, start: int) -> list[Differences]:
        """Return, for each rank, the first of its steps with another state, and what differs."""
        found = []
        for rank in sorted(attempt.notes):
            for index, (step, expected) in enumerate(self._pairs(attempt, rank, start)):
                keys = self._keys(step, expected)
                if keys:
                    at = start + index
                    found.append(Differences(rank, index, keys, step, expected, attempt, self.attempt, at))
                    break
        return found

    def _first_other_data(self, attempt: Attempt, start: int) -> Differences | None:
        """Return the first step of the lowest rank that reads other data although all before it was equal."""
        rank = attempt.rank
        for index, (step, expected) in enumerate(self._pairs(attempt, rank, start)):
            keys = self._keys(step, expected)
            if "model" in keys:
                break
            if "data" in keys:
                only = {"data": keys["data"]}
                return Differences(rank, index, only, step, expected, attempt, self.attempt, start + index)
        return None

    def _pairs(self, attempt: Attempt, rank: int, start: int = 0) -> Iterator[tuple[Step, Step]]:
        """Return the steps of a rank, each with that of this attempt, whose first ``start`` are left out."""
        return zip(attempt.of("step", rank), self.attempt.of("step", rank)[start:], strict=False)

    def _keys(self, step: Step, expected: Step, rounding: float = 0.0) -> dict[str, list[str]]:
        """Return the names of what differs in each part by more than noise."""
        keys: dict[str, list[str]] = {}
        if "blind" in step or "blind" in expected:
            return keys
        for part in PARTS:
            allowed = self.noise.get(part, 0.0) * _NOISE_FACTOR + rounding
            ours, theirs = step.get(part, {}), expected.get(part, {})
            if part == "averages":  # a variable may still hold what was loaded
                ours = {name: value for name, value in ours.items() if name in theirs}
            sizes = _different(ours, theirs)
            if names := sorted(name for name, size in sizes if size > allowed):
                keys[part] = names
        return keys

    def _drift_of_model(self, attempt: Attempt, start: int) -> Drift | None:
        for index, (step, expected) in enumerate(self._pairs(attempt, attempt.rank, start)):
            size = max((size for _, size in _different(step.get("model", {}), expected.get("model", {}))), default=0.0)
            if size > self.noise.get("model", 0.0) * _NOISE_FACTOR:
                ends = [note["steps"] > start + index for note in self.attempt.of("report", self.attempt.rank)]
                at = start + index if self.unit == "step" else (ends.index(True) if True in ends else len(ends) - 1)
                return Drift(at + 1, "the parameters differ", size)
        return None

    def _drift_of_metrics(self, attempt: Attempt) -> tuple[Drift | None, list[str]]:
        """Return the first metric that differs by more than noise, and those that only tell where an attempt began."""
        drift, aside = None, {}
        for at, name, mine, yours, size in self._metric_differences(attempt):
            if name in self.measured or size <= self.noise.get(name, 0.0) * _NOISE_FACTOR:
                continue
            values = [metrics.get(name) for metrics in attempt.metrics.values()]
            if len(values) > 1 and not isinstance(mine, float) and all(value == mine for value in values):
                aside[name] = f"`{name}` is {mine} instead of {yours}, without an effect"
            elif drift is None:
                drift = Drift(at, f"{name} {number(mine)} instead of {number(yours)}", size)
        return drift, list(aside.values())

    def _metric_differences(self, attempt: Attempt) -> Iterator[tuple[int, str, Any, Any, float]]:
        """Yield number, name, both values and relative difference of each metric that differs, the earliest first."""
        straight = {key: row for key, row in self.attempt.rows().items() if row[0] <= self.until}
        rows = sorted(attempt.rows().items(), key=lambda item: item[1][0])
        for key, (at, ours) in rows:
            if key in straight:
                theirs = straight[key][1]
                for name, size in _different(ours, theirs):
                    yield at, name, ours.get(name), theirs.get(name), size


def _whole(steps: Sequence[Step]) -> Step:
    """Return the state of rank 0, in which tensors that are divided among the ranks are summed up."""

    def summed(part: str, name: str, value: Any) -> Any:
        if not isinstance(value, list) or len(value) < 3:
            return value
        sums, norms, _ = zip(*(step[part][name] for step in steps), strict=True)
        return [sum(sums), math.hypot(*norms), 0.0]

    return {
        part: {name: summed(part, name, value) for name, value in values.items()} if part in PARTS else values
        for part, values in steps[0].items()
    }


def _different(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names of what differs, in their order, with the relative difference."""
    for name in dict.fromkeys((*ours, *theirs)):
        if size := distance(ours.get(name), theirs.get(name)):
            yield name, size


def distance(one: Any, other: Any) -> float:
    """Return the relative difference of two numbers, or of lists of numbers by their largest; else infinity."""
    if one == other or (one != one and other != other):  # NaN
        return 0.0
    ours, theirs = (value if isinstance(value, list) else [value] for value in (one, other))
    numbers = [*ours, *theirs]
    if len(ours) != len(theirs) or not all(type(value) in (int, float) and math.isfinite(value) for value in numbers):
        return math.inf
    apart = max(abs(mine - yours) for mine, yours in zip(ours, theirs, strict=True))
    return float(apart / max(map(abs, numbers)))
