"""The comparison of a disturbed run with undisturbed ones. Runs in: coordinator."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distrain.drilling.causes import PARTS, Cause, Differences
from distrain.drilling.order import REPORTS, STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distrain.drilling.causes import Step
    from distrain.drilling.journal import Attempt

_NOISE_FACTOR = 4.0
"""Two undisturbed runs show only a part of the noise."""
_ROUNDING = 1e-5
"""The largest relative difference that the order of additions explains, if everything was equal at the start."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The first difference. ``at``: the number of the report or step. ``what``: such as ``loss 0.4 instead of 0.3``."""

    at: int
    what: str
    size: float = math.inf


@dataclass(frozen=True, slots=True)
class Straight:
    """An undisturbed attempt, and what a second one has shown.

    noise: by part of the state or name of a metric, the largest relative difference. Metrics that differ although the
    state does not are in ``measured``: times, rates and the like.
    """

    attempt: Attempt
    unit: str
    until: int
    noise: Mapping[str, float] = field(default_factory=dict)
    measured: frozenset[str] = frozenset()

    @property
    def is_deterministic(self) -> bool:
        return "model" not in self.noise if self.attempt.of("step") else not self.noise

    def steps_before(self, count: int) -> int:
        """Return the steps before so many reports."""
        steps = reports = 0
        for note in self.attempt.notes.get(self.attempt.rank, []):
            if reports == count:
                break
            reports += note["what"] == "report"
            steps += note["what"] == "step"
        return steps


@dataclass(frozen=True, slots=True)
class Comparison:
    """kind: ``exact``, ``noise`` or ``drift``. aside: metrics that differ without having an effect."""

    kind: str
    drift: Drift | None = None
    causes: Sequence[Cause] = ()
    start: int = 0
    aside: Sequence[str] = ()


def straight_of(first: Attempt, second: Attempt, unit: str, until: int) -> Straight:
    """Compare two undisturbed attempts, of equal seeds."""
    noise: dict[str, float] = {}
    for rank in first.notes:
        for one, other in zip(first.steps(rank), second.steps(rank), strict=False):
            for part in PARTS:
                size = max((size for _, size in _different(one.get(part, {}), other.get(part, {}))), default=0.0)
                if size:
                    noise[part] = max(noise.get(part, 0.0), size)
    has_state = bool(first.of("step"))
    measured = set()
    for name, size in _metric_differences(first, second, until):
        if has_state and "model" not in noise:
            measured.add(name)
        else:
            noise[name] = max(noise.get(name, 0.0), size)
    return Straight(first, unit, until, noise, frozenset(measured))


def compare(straight: Straight, attempt: Attempt, start: int) -> Comparison:
    """Compare a resumed attempt. ``start``: the steps of the undisturbed run before its first one."""
    drift, aside = _first_drift(straight, attempt)
    found = first_differences(straight, attempt, start)
    state_drift = _state_drift(straight, attempt, start)
    is_equal_at_start = not any(step == 0 for step, _ in found)
    for one in filter(None, (drift, state_drift)):
        if one.size > (_ROUNDING if is_equal_at_start else 0.0):
            causes = _causes(found)
            return Comparison("drift", drift or state_drift, causes, start, aside)
    is_exact = drift is None and state_drift is None and straight.is_deterministic
    return Comparison("exact" if is_exact else "noise", start=start, aside=aside)


def why_noisy(straight: Straight, second: Attempt) -> str:
    """Say where two undisturbed attempts begin to differ, and which switch makes them equal."""
    found = first_differences(replace(straight, noise={}), second, 0)
    if not found:
        name, size = max(straight.noise.items(), key=lambda item: item[1])
        return f"`{name}` differs by {size:.1g}; seed what it depends on"
    index, differences = min(found, key=lambda item: item[0])
    if {"random", "data"} & differences.keys.keys():
        what = "random numbers" if "random" in differences.keys else "the order of the data"
        cure = "give each generator and sampler a seed"
    else:
        what, cure = "results of operations", "call distrain.torch.enable_reproducibility()"
    return f"{what} differ from step {index + 1} on; {cure}"


def compare_start(straight: Straight, attempt: Attempt, start: int) -> list[Cause]:
    """Compare the state with which another number of workers begins. Their data must differ."""
    ours, theirs = ([each.steps(rank) for rank in sorted(each.notes)] for each in (attempt, straight.attempt))
    if not all(ours) or len(theirs[0]) <= start:
        return []
    step, expected = _whole([steps[0] for steps in ours]), _whole([steps[start] for steps in theirs])
    rounding = {part: _ROUNDING for part in PARTS} if expected["sharded"] else {}
    parts = ("model", "optimizer", "scheduler", "scaler", "buffers", "averages")
    keys = {part: names for part in parts if (names := _keys(part, step, expected, {**rounding, **straight.noise}))}
    if not keys:
        return []
    return Differences(0, keys, step, expected, theirs[0], expected, attempt.of("misfit", 0)).causes()


def _whole(steps: Sequence[Step]) -> Step:
    """Return the state of rank 0, in which tensors that are divided among the ranks are summed up."""
    if not steps[0].get("sharded"):
        return steps[0]
    return {
        **steps[0],
        **{
            part: {
                name: [sum(step[part][name][0] for step in steps), math.hypot(*(step[part][name][1] for step in steps))]
                for name in steps[0][part]
            }
            for part in ("model", "optimizer")
        },
    }


def start_of(straight: Straight, attempt: Attempt, killed_at: int) -> int:
    """Return with which step of the undisturbed run an attempt should begin, as the number of steps before it.

    A script that does not report has its own idea of it, which its parameters show.
    """
    if straight.unit == REPORTS:
        return straight.steps_before(attempt.first)
    rank = attempt.rank
    steps, ours = straight.attempt.steps(rank), attempt.steps(rank)
    if ours:
        same = [index for index, one in enumerate(steps[: killed_at + 1]) if one.get("model") == ours[0].get("model")]
        if any(same):
            return same[-1]
    return max((save for save in straight.attempt.saves(STEPS) if save <= killed_at), default=0)


def first_differences(straight: Straight, attempt: Attempt, start: int) -> list[tuple[int, Differences]]:
    """Return, for each rank, the first of its steps at which the state differs, and what differs."""
    found = []
    for rank in sorted(attempt.notes):
        ours, theirs = attempt.steps(rank), straight.attempt.steps(rank)
        of_rank_0 = straight.attempt.steps(0)
        for index, (step, expected) in enumerate(zip(ours, theirs[start:], strict=False)):
            keys = {part: names for part in PARTS if (names := _keys(part, step, expected, straight.noise))}
            if index == 0 and step.get("counters") != expected.get("counters"):
                keys.setdefault("counters", [])
            if keys and "blind" not in step:
                at_0 = of_rank_0[start + index] if start + index < len(of_rank_0) else {}
                misfits = attempt.of("misfit", rank)
                found.append((index, Differences(rank, keys, step, expected, theirs, at_0, misfits)))
                break
    return found


def _causes(found: Sequence[tuple[int, Differences]]) -> list[Cause]:
    """Return the causes of the earliest differences, each once. What rank 0 forgets, the others forget, too."""
    if not found:
        return [Cause("unknown", "")]
    first = min(index for index, _ in found)
    by_name: dict[str, Cause] = {}
    for index, differences in found:
        if index == first:
            for cause in differences.causes():
                by_name.setdefault(cause.name, cause)
    if len(by_name) > 1:
        by_name.pop("unknown", None)
    return list(by_name.values())


def _state_drift(straight: Straight, attempt: Attempt, start: int) -> Drift | None:
    """Return where the parameters of the models begin to differ."""
    rank, allowed = attempt.rank, straight.noise.get("model", 0.0) * _NOISE_FACTOR
    theirs = straight.attempt.steps(rank)[start:]
    for index, (step, expected) in enumerate(zip(attempt.steps(rank), theirs, strict=False)):
        size = max((size for _, size in _different(step.get("model", {}), expected.get("model", {}))), default=0.0)
        if size > allowed:
            return Drift(start + index + 1, "the parameters differ", size)
    return None


def _first_drift(straight: Straight, attempt: Attempt) -> tuple[Drift | None, list[str]]:
    """Return the first metric that differs by more than noise, and those that only tell where an attempt began."""
    found: list[Drift] = []
    aside: dict[str, None] = {}
    for (rank, number), ours in sorted(attempt.metrics.items(), key=lambda item: item[0][::-1]):
        theirs = straight.attempt.metrics.get((rank, number))
        if theirs is None or number > straight.until:
            continue
        for name, (mine, yours), size in _unequal(ours, theirs):
            if name in straight.measured or size <= straight.noise.get(name, 0.0) * _NOISE_FACTOR:
                continue
            if _is_constant(name, attempt, mine):
                aside.setdefault(f"`{name}` is {_number(mine)} instead of {_number(yours)}")
            else:
                found.append(Drift(number, f"{name} {_number(mine)} instead of {_number(yours)}", size))
    return (found[0] if found else None), list(aside)


def _is_constant(name: str, attempt: Attempt, value: Any) -> bool:
    """Return whether a metric only says where, or how, the attempt began: it is no fraction, and never changes."""
    values = [dict(_flat(metrics)).get(name) for metrics in attempt.metrics.values()]
    return not isinstance(value, float) and len(values) > 1 and all(one == value for one in values)


def _metric_differences(first: Attempt, second: Attempt, until: int) -> Iterator[tuple[str, float]]:
    for key in first.metrics.keys() & second.metrics.keys():
        if key[1] <= until:
            yield from ((name, size) for name, _, size in _unequal(first.metrics[key], second.metrics[key]))


def _unequal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any], float]]:
    """Yield the metrics that differ, with both values and the relative difference."""
    mine, yours = dict(_flat(ours)), dict(_flat(theirs))
    for name in mine.keys() | yours.keys():
        size = _distance(mine.get(name), yours.get(name))
        if size:
            yield name, (mine.get(name), yours.get(name)), size


def _flat(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _keys(part: str, step: Step, expected: Step, noise: Mapping[str, float]) -> list[str]:
    """Return the names in a part that differ by more than noise."""
    allowed = noise.get(part, 0.0) * _NOISE_FACTOR
    return sorted(name for name, size in _different(step.get(part, {}), expected.get(part, {})) if size > allowed)


def _different(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names of what differs, with the relative difference."""
    for name in ours.keys() | theirs.keys():
        if size := _distance(ours.get(name), theirs.get(name)):
            yield name, size


def _distance(one: Any, other: Any) -> float:
    """Return the relative difference of two numbers, or of two lists of numbers; infinity for anything else."""
    if one == other or (one != one and other != other):  # NaN
        return 0.0
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max(map(_distance, one, other))
    if isinstance(one, (float, int)) and isinstance(other, float) or isinstance(one, float) and isinstance(other, int):
        largest = max(abs(one), abs(other))
        return abs(one - other) / largest if math.isfinite(largest) else math.inf
    return math.inf


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
