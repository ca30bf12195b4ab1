"""Scenarios: the run, its training script, and the faults that disturb it, drawn from a seed, as plain data."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distrain import CheckpointConfig, FailureConfig

if TYPE_CHECKING:
    from collections.abc import Sequence


_MIXED = ("SYNC", "ASYNC", "ASYNC", "MEMORY", "MEMORY")


@dataclass(frozen=True)
class Fault:
    """A disturbance. at: seconds after the start. target: a rank, a host or nothing."""

    at: float
    kind: str
    target: int = 0
    lasts: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """One run.

    saving: which ranks save: all, first (rank 0), some (a rank and step decide).
    step_s: mean seconds of a step, by rank.
    """

    seed: int
    ranks: int = 2
    hosts: int = 1
    spares: int = 0
    steps: int = 4
    step_s: tuple[float, ...] = (0.2,)
    mode: str = "SYNC"
    memory_every: int | None = None
    storage_every_s: float = 600.0
    saving: str = "all"
    quiet: frozenset[int] = frozenset()
    """Ranks that never call report()."""
    early: tuple[int, int] | None = None
    """A rank that has fewer batches than the others, and how many."""
    save_every: int = 1
    own_names: bool = True
    collectives: bool = True
    asks_to_stop: bool = False
    lingers: bool = False
    """After should_stop() has said True, a rank trains on for minutes."""
    looks: bool = False
    builds: bool = False
    """Ranks build their models, some for seconds, before they read the checkpoint of the start."""
    num_to_keep: int | None = None
    score: str = ""
    missing_rank_s: float = 60.0
    max_failures: int = 3
    raises: frozenset[tuple[int, int, int]] = frozenset()
    rolls_back: frozenset[tuple[int, int]] = frozenset()
    """Rank and step at which it asks to roll back, once."""
    sticks: tuple[int, int, int] | None = None
    """Rank, step and attempt in which it stands still for a minute."""
    reads: bool = False
    """Each step takes a batch of a dataset; rollbacks leave its rows out."""
    validates: bool = False
    catches: bool = False
    """The script goes on after an error of report()."""
    deletes: bool = False
    lists: bool = False
    meets: bool = False
    least: int | None = None
    """The fewest ranks that the run trains with; None for all."""
    grow: bool = False
    """With fewer ranks than it may have, the run takes hosts that are back at its next checkpoint."""
    shares_files: bool = True
    """False if all hosts but the first one lack the storage."""
    bucket: bool = False
    """True if the storage is a bucket."""
    faults: tuple[Fault, ...] = field(default=())

    def mode_at(self, step: int) -> str:
        """Return how the checkpoint of a step is stored: MIXED is another mode at each step."""
        return random.Random(f"{self.seed} {step}").choice(_MIXED) if self.mode == "MIXED" else self.mode

    def saves(self, rank: int, step: int, size: int) -> bool:
        """Return whether a rank saves a checkpoint at a step."""
        if (step + 1) % self.save_every:
            return False
        if self.saving == "first":
            return rank == 0
        return self.saving == "all" or random.Random(f"{self.seed}-{rank}-{step}").random() < 0.6

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        score = {"checkpoint_score_attribute": "loss", "checkpoint_score_order": self.score} if self.score else {}
        return CheckpointConfig(
            num_to_keep=self.num_to_keep,
            missing_rank_s=self.missing_rank_s,
            memory_every=self.memory_every,
            storage_every_s=self.storage_every_s,
            **score,
        )

    @property
    def failure_config(self) -> FailureConfig:
        return FailureConfig(max_failures=self.max_failures)


FAULTS = (
    "kill rank", "kill rank", "kill host", "kill coordinator", "signal", "stop rank", "slow link", "stop coordinator",
    "kill agent", "full disk", "broken disk", "flip memory", "flip disk", "full memory", "slow disk", "slow disk",
    "kill forkserver", "kill child", "stop agent", "cut link", "read only disk", "lose power", "signal twice",
    "request", "debug", "second start", "clock jump",
)  # fmt: skip


THEMES = {
    "memory": lambda one: one.mode in ("MEMORY", "MIXED") or one.memory_every is not None,
    "hangs": lambda one: one.sticks is not None or any(fault.kind == "stop rank" for fault in one.faults),
    "starts": lambda one: any(fault.kind in ("kill coordinator", "lose power") for fault in one.faults),
    "disks": lambda one: any("disk" in fault.kind for fault in one.faults),
    "data": lambda one: one.reads,
    "rollbacks": lambda one: bool(one.rolls_back),
    "apart": lambda one: not one.shares_files,
    "buckets": lambda one: one.bucket,
    "takeovers": lambda one: any(fault.kind == "take over" for fault in one.faults),
    "quiet": lambda one: bool(one.quiet),
    "looks": lambda one: one.looks,
    "hasty": lambda one: one.missing_rank_s < 60,
    "lost": lambda one: one.hosts > 1 and any(fault.kind == "kill host" for fault in one.faults),
    "names": lambda one: one.ranks > 1 and not (one.own_names or one.collectives),
    "growth": lambda one: one.grow,
    "debugging": lambda one: any(fault.kind == "debug" for fault in one.faults),
}
"""What --only of scripts/fuzz selects."""


def drawn(seed: int, themes: Sequence[str] = ()) -> Scenario:
    """Return the scenario of a seed; with themes, one that has them all."""
    for number in itertools.count():
        scenario = _with_places(_drawn(seed, number), random.Random(f"places {seed} {number}"))
        scenario = _with_peers(scenario, random.Random(f"peers {seed} {number}"))
        scenario = _with_growth(scenario, random.Random(f"growth {seed} {number}"))
        if all(THEMES[theme](scenario) for theme in themes):
            return scenario
    raise AssertionError("never reached")


def _drawn(seed: int, number: int) -> Scenario:
    draw = random.Random(f"{seed} {number}" if number else seed)
    hosts = draw.choice([1, 1, 2, 3])
    ranks = hosts * draw.choice([1, 2]) if hosts > 1 else draw.choice([1, 2, 3, 4])
    mode = draw.choice(["SYNC", "SYNC", "ASYNC", "MEMORY", "MEMORY", "MIXED", "MIXED", "NO_UPLOAD"])
    steps = draw.randint(2, 7)
    memory_every = draw.choice([1, 2, 3]) if mode == "SYNC" and draw.random() < 0.3 else None
    count = draw.choice([0, 1, 1, 1, 2, 2, 3])
    length = steps * 0.4 + 3
    faults = tuple(
        sorted(
            (
                Fault(draw.random() * length, draw.choice(FAULTS), draw.randrange(16), draw.choice([0.5, 3, 20]))
                for _ in range(count)
            ),
            key=lambda fault: fault.at,
        )
    )
    raises = frozenset({(draw.randrange(ranks), draw.randrange(steps), 0)} if draw.random() < 0.15 else ())
    early = (draw.randrange(ranks), draw.randrange(steps)) if ranks > 1 and draw.random() < 0.1 else None
    return Scenario(
        seed=seed,
        ranks=ranks,
        hosts=hosts,
        spares=draw.choice([0, 1]),
        steps=steps,
        step_s=tuple(draw.choice([0.05, 0.2, 0.2, 1.5]) for _ in range(ranks)),
        mode=mode,
        memory_every=memory_every,
        storage_every_s=draw.choice([0.5, 2, 600]),
        saving=draw.choice(["all", "all", "first", "some"]),
        save_every=draw.choice([1, 1, 2]),
        own_names=draw.random() < 0.5,
        collectives=draw.random() < 0.6,
        asks_to_stop=draw.random() < 0.5,
        looks=draw.random() < 0.3,
        builds=draw.random() < 0.3,
        num_to_keep=draw.choice([None, 1, 1, 2]),
        score=draw.choice(["", "", "min", "max"]),
        missing_rank_s=draw.choice([60, 60, 60, 60, 4]),
        max_failures=draw.choice([0, 1, 3, -1]),
        raises=raises,
        rolls_back=frozenset({(draw.randrange(ranks), draw.randrange(steps))} if draw.random() < 0.15 else ()),
        sticks=(draw.randrange(ranks), draw.randrange(steps), 0) if draw.random() < 0.1 else None,
        deletes=draw.random() < 0.2,
        lists=draw.random() < 0.2,
        meets=draw.random() < 0.2,
        least=draw.choice([None, None, 1]),
        reads=draw.random() < 0.3,
        validates=draw.random() < 0.15,
        catches=draw.random() < 0.2,
        lingers=draw.random() < 0.1,
        quiet=frozenset(draw.sample(range(ranks), draw.randrange(ranks)) if draw.random() < 0.1 else ()),
        early=early,
        faults=faults,
    )


BUCKET_FAULTS = ("broken bucket", "slow bucket", "flip bucket", "kill child", "take over")
APART_FAULTS = ("kill child", "no streams", "full cache")


def _with_places(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let some runs use a bucket, and some hosts that lack the storage."""
    kind, count = draw.random(), draw.choice([0, 1, 2])
    length = scenario.steps * 0.4 + 3
    if kind < 0.2:
        kinds, scenario = BUCKET_FAULTS, replace(scenario, bucket=True)
    elif kind < 0.45 and scenario.hosts + scenario.spares > 1:
        mode = "SYNC" if scenario.mode == "NO_UPLOAD" else scenario.mode
        kinds, scenario = APART_FAULTS, replace(scenario, shares_files=False, mode=mode)
    else:
        return scenario
    more = [
        Fault(draw.random() * length, draw.choice(kinds), draw.randrange(16), draw.choice([2, 20, 400]))
        for _ in range(count)
    ]
    return replace(scenario, faults=tuple(sorted([*scenario.faults, *more], key=lambda fault: fault.at)))


def _with_peers(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let some hosts not reach each other, so that they cannot copy checkpoints in memory."""
    if scenario.hosts < 2 or not THEMES["memory"](scenario) or draw.random() < 0.7:
        return scenario
    fault = Fault(draw.random() * (scenario.steps * 0.4 + 3), "no peers", draw.randrange(16), draw.choice([2, 20, 400]))
    return replace(scenario, faults=tuple(sorted([*scenario.faults, fault], key=lambda fault: fault.at)))


GROWTH_FAULTS = ("late host", "late host", "kill host", "kill host", "kill host", "sick host", "flaky host")


def _with_growth(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let some runs train for minutes, lose hosts, and take them again when they are back."""
    if draw.random() < 0.85:
        return scenario
    hosts, steps, step_s = draw.choice([2, 2, 3]), draw.randint(40, 160), draw.choice([0.5, 1.0])
    length = steps * step_s
    faults = [
        Fault(0.6 * length * draw.random(), draw.choice(GROWTH_FAULTS), draw.randrange(16), draw.choice([3, 20, 60]))
        for _ in range(draw.choice([1, 1, 2, 3]))
    ]
    return replace(
        scenario,
        grow=True,
        least=1,
        hosts=hosts,
        ranks=hosts * draw.choice([1, 2]),
        steps=steps,
        step_s=(step_s,),
        save_every=draw.choice([1, 5, 10]),
        quiet=frozenset(),
        early=None,
        sticks=None,
        faults=tuple(sorted([*(scenario.faults if draw.random() < 0.3 else ()), *faults], key=lambda one: one.at)),
    )
