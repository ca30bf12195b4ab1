"""The shortest scenario that still breaks the same promise, its story, and a test of it."""

from __future__ import annotations

import time
import traceback
from dataclasses import fields, replace
from types import NoneType
from typing import TYPE_CHECKING

from distrain.errors import DistrainError
from tests.simulation.play import played
from tests.simulation.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.play import Play

_MOST_TRIES = 150
_MOST_S = 60.0
_SIZES = ("seed", "ranks", "hosts", "steps", "faults", "step_s", "mode")
"""Fields that are made smaller, and not set to their default."""


def shrunk(scenario: Scenario, violation: str) -> Scenario:
    """Return a simpler scenario that breaks the same promise."""
    promise = violation.partition(":")[0]
    tries, until = 0, time.perf_counter() + _MOST_S
    while tries < _MOST_TRIES:
        for simpler in _simpler(scenario):
            tries += 1
            if any(text.startswith(promise) for text in played(simpler).violations):
                scenario = simpler
                break
            if tries >= _MOST_TRIES or time.perf_counter() > until:
                return scenario
        else:
            break
    return scenario


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios with one thing less."""
    faults = scenario.faults
    for number in range(len(faults)):
        yield replace(scenario, faults=faults[:number] + faults[number + 1 :])
    for field in fields(Scenario):
        if field.name not in _SIZES and getattr(scenario, field.name) != field.default:
            yield replace(scenario, **{field.name: field.default})
    if scenario.steps > 1:
        yield replace(scenario, steps=scenario.steps - 1)
    if scenario.hosts > 1:
        yield replace(scenario, hosts=scenario.hosts - 1, ranks=scenario.ranks // scenario.hosts * (scenario.hosts - 1))
    if scenario.ranks > scenario.hosts:
        yield replace(scenario, ranks=scenario.ranks - scenario.hosts)
    if len(set(scenario.step_s)) > 1:
        yield replace(scenario, step_s=(0.2,))


def story(play: Play) -> str:
    """Return what was promised and not kept, and what has happened, as lines."""
    lines = [f"seed {play.scenario.seed}: {text.splitlines()[0][:300]}" for text in play.violations or ["all is well"]]
    lines += [f"{at:9.3f}  {line}" for at, text in play.world.story for line in text.splitlines()]
    for life in play.lives:
        end = repr(life.process.error)[:200] if life.process.error else "killed" if life.was_killed else "finished"
        lines.append(f"           start {life.number}: {end}")
        if not isinstance(life.process.error, (DistrainError, KeyboardInterrupt, NoneType)):
            lines += traceback.format_exception(life.process.error)
    return "\n".join(lines)


def as_test(scenario: Scenario) -> str:
    """Return a line for KEPT in test_simulation.py."""
    given = [f"{field.name}={getattr(scenario, field.name)!r}" for field in fields(scenario)]
    defaults = {f"{field.name}={field.default!r}" for field in fields(scenario)}
    return f"    Scenario({', '.join(one for one in given if one not in defaults)}),"
