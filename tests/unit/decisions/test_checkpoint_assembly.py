"""Joining the checkpoints of N ranks: who copies what, when it is committed, and who is told what."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from distrain import wire
from distrain.api.config import CheckpointConfig
from distrain.decisions.checkpoints.actions import MakeDirectory, Settled
from distrain.decisions.checkpoints.assembly import (
    MOST_UNCOMMITTED,
    PATIENCE_S,
    CheckpointAssembly,
)
from distrain.decisions.checkpoints.site import Site
from distrain.decisions.events import SendMessage, ShowLine
from distrain.hosts.world import RankPlan, WorldPlan
from distrain.storage.commit import Commit, file_entry
from distrain.storage.retention import best_first, surplus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

MISSING_RANK_S = 60.0


@dataclass(frozen=True)
class Copy:
    """A rank is told to store these files."""

    rank: int
    ordinal: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class Refuse:
    """report() of a rank fails."""

    rank: int
    ordinal: int
    why: str


@dataclass(frozen=True)
class Drop:
    """These ranks are told that the checkpoint will never be committed."""

    ordinal: int
    ranks: frozenset[int]


class Attempt:
    """An attempt whose ranks store their files themselves. Each event returns what follows, as the ranks see it."""

    def __init__(self, world_size: int, config: CheckpointConfig, silent: Collection[int] = ()) -> None:
        ranks = (
            RankPlan(rank=rank, host="a", local_rank=0, local_world_size=1, node_rank=0) for rank in range(world_size)
        )
        plan = WorldPlan(ranks=tuple(ranks))
        site = Site(config, Path("/run"), is_remote=False, plan=plan)
        self.said: list[Any] = []
        self.assembly = CheckpointAssembly(site, self._add, lambda commit, _: self._add(commit))
        self.assembly.begin(0, world_size, silent=silent)
        self.attendance = self.assembly.attendance
        self.told_of_drop: set[int] = set()

    def _add(self, action: Any, *_: Any) -> None:
        match action:
            case MakeDirectory(_, _, then):
                then("/staging")
            case SendMessage(_, wire.CopyFiles(rank=rank, ordinal=ordinal, files=files)):
                self.said.append(Copy(rank, ordinal, tuple(files)))
            case SendMessage(_, wire.FilesStored(rank=rank, ordinal=ordinal, failed=why)):
                self.said.append(Refuse(rank, ordinal, why or ""))
            case SendMessage(_, wire.CommitDone(rank=rank, path="")):
                self.told_of_drop.add(rank)
            case Settled(ordinal, None):
                self.said.append(Drop(ordinal, frozenset(self.told_of_drop)))
                self.told_of_drop = set()
            case Commit() | ShowLine():
                self.said.append(action)

    def __getattr__(self, event: str) -> Callable[..., list[Any]]:
        def happen(*values: Any) -> list[Any]:
            getattr(self.assembly, event)(*values)
            said, self.said = self.said, []
            return said

        return happen

    def committed(self, ordinal: int, now: float) -> list[Any]:
        return self.__getattr__("committed")(ordinal, "/run/checkpoint", None, now)


def assembly_of(
    world_size: int,
    *,
    running_since: float = -MISSING_RANK_S,
    ranks: Sequence[int] | Literal["all"] | None = None,
    silent: Sequence[int] = (),
) -> Attempt:
    """All ranks are in train_func. ``ranks``: those that bring checkpoints, as the user says."""
    config = CheckpointConfig(missing_rank_s=MISSING_RANK_S, checkpoint_ranks=ranks)
    assembly = Attempt(world_size, config, silent=silent)
    for rank in range(world_size):
        assembly.running(rank, running_since)
    return assembly


def reported(
    assembly: Attempt,
    rank: int,
    index: int,
    metrics: dict[str, Any],
    files: Iterable[str] | None,
    now: float,
    in_place: str = "",
    **how: Any,
) -> list[Any]:
    has_checkpoint, how = files is not None, {"folder": in_place, "in_place": bool(in_place), **how}
    body, files = json.dumps(metrics).encode(), list(files or ())
    report = wire.Reported(
        attempt=0, rank=rank, index=index, has_checkpoint=has_checkpoint, body=body, files=files, **how
    )
    return assembly.reported(report, now)


def bring(assembly: Attempt, rank: int, ordinal: int, *files: str, now: float = 0.0, **metrics: Any) -> list[Any]:
    """report() with a checkpoint."""
    return reported(assembly, rank, ordinal, metrics, files, now)


def note(assembly: Attempt, rank: int, index: int, now: float = 0.0, **metrics: Any) -> list[Any]:
    """report() without a checkpoint."""
    return reported(assembly, rank, index, metrics, None, now)


def deliver(
    assembly: Attempt,
    rank: int,
    ordinal: int,
    *files: str,
    skipped: Iterable[str] = (),
    crc: int = 1,
    now: float = 0.0,
) -> list[Any]:
    contents = {"files": [(path, 10, crc) for path in files], "skipped": [(path, 10, crc) for path in skipped]}
    return assembly.stored(wire.FilesCopied(attempt=0, rank=rank, ordinal=ordinal, **contents), now)


def only(kind: type[Any], actions: list[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def the_commit(actions: list[Any]) -> Commit:
    [commit] = only(Commit, actions)
    assert isinstance(commit, Commit)
    return commit


def owners(commit: Commit) -> dict[str, int]:
    return {path: entry["rank"] for path, entry in commit.files.items()}


# -- one rank --------------------------------------------------------------------------------------------------------


def test_a_single_rank_is_granted_and_committed_at_once() -> None:
    assembly = assembly_of(1)
    assert bring(assembly, 0, 1, "b", "a", loss=0.5) == [Copy(0, 1, ("a", "b"))]
    files = {name: file_entry(10, 1, rank=0) for name in "ab"}
    assert deliver(assembly, 0, 1, "a", "b") == [Commit(1, files, (0,), {"loss": 0.5}, world_size=1)]


# -- files that are in place already ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("other", "named"), [("/run/b", "/run/b"), ("", "files to copy")])
def test_a_checkpoint_whose_ranks_name_different_directories_is_dropped(other: str, named: str) -> None:
    assembly = assembly_of(2)
    reported(assembly, 0, 1, {}, (), 0.0, in_place="/run/a")
    reported(assembly, 1, 1, {}, (), 0.0, in_place=other)
    actions = deliver(assembly, 0, 1, "a")
    if not other:
        assert actions == []
        actions = deliver(assembly, 1, 1)
    [said, dropped] = actions
    assert isinstance(said, ShowLine)
    assert said.text.endswith(f"must name the same directory, and not /run/a (rank 0), {named} (rank 1)")
    assert dropped == Drop(1, frozenset({0, 1}))


# -- rank 0 only -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent_before", [False, True])
def test_rank_0_only_commits_at_once_if_the_user_or_an_earlier_checkpoint_says_so(*, silent_before: bool) -> None:
    assembly = assembly_of(2, silent=[1]) if silent_before else assembly_of(2, ranks=[0])
    bring(assembly, 0, 1, "model")
    commit = the_commit(deliver(assembly, 0, 1, "model"))
    assert (commit.ranks, commit.silent) == ((0,), (1,) if silent_before else ())


@pytest.mark.parametrize(("ranks", "lack"), [([0, 1], "called report()"), ("all", "got the files of a checkpoint")])
def test_ranks_that_bring_checkpoints_as_the_user_says_are_waited_for(
    ranks: list[int] | Literal["all"], lack: str
) -> None:
    assembly = assembly_of(2, ranks=ranks)
    if ranks == "all":
        assembly.attendance.fetching(1)
    bring(assembly, 0, 1, "shard-0")
    deliver(assembly, 0, 1, "shard-0")
    [said] = assembly.tick(2 * MISSING_RANK_S)
    assert isinstance(said, ShowLine)
    assert f"the checkpoint of report 1 of rank 0 is not complete: rank 1 has not {lack} yet." in said.text
    bring(assembly, 1, 1, "shard-1")
    assert the_commit(deliver(assembly, 1, 1, "shard-1")).ranks == (0, 1)


def test_a_rank_that_brings_none_as_the_user_says_is_refused() -> None:
    [refusal] = bring(assembly_of(3, ranks=[0, 2]), 1, 1, "model")
    assert refusal == Refuse(
        1,
        1,
        "rank 1 reported a checkpoint, but CheckpointConfig.checkpoint_ranks names only ranks 0, 2; add this rank "
        "there, or report its metrics alone",
    )


# -- a rank that is far ahead ----------------------------------------------------------------------------------------


def run_ahead(assembly: Attempt, reports: int, now: float = 0.0, first: int = 1) -> list[int]:
    """Let rank 0 report checkpoints without waiting. Return the numbers of those that it may store."""
    stored = []
    for n in range(first, first + reports):
        for order in only(Copy, bring(assembly, 0, n, "model", now=now)):
            stored.append(order.ordinal)
            deliver(assembly, 0, order.ordinal, "model", now=now)
    return stored


def test_a_rank_that_is_far_ahead_stores_no_more_until_the_others_follow() -> None:
    assembly = assembly_of(2, running_since=0.0)
    assert run_ahead(assembly, 40) == list(range(1, MOST_UNCOMMITTED + 1))
    for n in range(1, 30):
        actions = [*note(assembly, 1, n, now=n), *assembly.committed(n, n)]
        assert the_commit(actions).ordinal == n
        assert [order.ordinal for order in only(Copy, actions)] == [MOST_UNCOMMITTED + n]
        deliver(assembly, 0, MOST_UNCOMMITTED + n, "model", now=n)


# -- the same file name ----------------------------------------------------------------------------------------------


def test_no_two_ranks_store_a_file_of_the_same_name_at_the_same_time() -> None:
    """Else the bytes of the higher rank could be the last ones, with the lower rank's crc32 in the manifest."""
    assembly = assembly_of(4)
    bring(assembly, 3, 1, "model", "shard-3")
    assert assembly.tick(PATIENCE_S) == [Copy(3, 1, ("model", "shard-3"))]
    bring(assembly, 2, 1, "model", now=2)
    assert bring(assembly, 1, 1, "model", "shard-1", now=2) == [Copy(2, 1, ())]
    deliver(assembly, 2, 1, now=2)
    assert assembly.tick(2 + PATIENCE_S) == []
    ordered = deliver(assembly, 3, 1, "model", "shard-3", now=4)
    assert ordered == [Copy(1, 1, ("model", "shard-1"))]
    assert bring(assembly, 0, 1, "model", now=5) == []
    assert deliver(assembly, 1, 1, "model", "shard-1", now=6) == [Copy(0, 1, ("model",))]
    assert owners(the_commit(deliver(assembly, 0, 1, "model", now=7))) == {"model": 0, "shard-1": 1, "shard-3": 3}


# -- ranks that are just slow ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["failure", "stop"])
@pytest.mark.parametrize("fetching", [False, True])
def test_checkpoints_that_may_lack_ranks_are_dropped_at_the_end_of_an_attempt(end: str, *, fetching: bool) -> None:
    assembly = assembly_of(3, running_since=0.0)
    if fetching:
        assembly.attendance.fetching(2)
    for ordinal in (1, 2):
        for rank in (0, 1):
            bring(assembly, rank, ordinal, f"shard-{rank}", now=0.1)
            deliver(assembly, rank, ordinal, f"shard-{rank}", now=0.1)
    if end == "failure":
        assembly.attendance.ended(2)
        assert assembly.tick(2 * MISSING_RANK_S) == []
    assert assembly.close(2 * MISSING_RANK_S if end == "failure" else MISSING_RANK_S) == [
        ShowLine(
            "the checkpoints of reports 1 to 2 are dropped: the attempt ended before rank 2 made that report, so "
            "files may be missing. If only some ranks save checkpoints, name them: "
            "CheckpointConfig(checkpoint_ranks=[0])"
        )
    ]


# -- calls of report() that fail ---------------------------------------------------------------------------------------


def test_a_checkpoint_whose_report_has_failed_on_a_rank_is_dropped_and_the_next_one_is_whole() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "shard-0")
    deliver(assembly, 0, 1, "shard-0")
    said, dropped = reported(assembly, 1, 1, {}, (), 0.0, failed="TypeError: a metric")
    assert said == ShowLine(
        "the checkpoint of report 1 is dropped, as report() has failed on rank 1: TypeError: a metric"
    )
    assert dropped == Drop(1, frozenset({0}))
    for rank in (0, 1):
        bring(assembly, rank, 2, f"shard-{rank}")
        actions = deliver(assembly, rank, 2, f"shard-{rank}")
    assert the_commit(actions).ranks == (0, 1)


def test_a_part_that_an_exception_kept_from_being_sent_is_missing() -> None:
    assembly = assembly_of(2)
    for ordinal in (1, 2):
        bring(assembly, 0, ordinal, "shard-0")
        deliver(assembly, 0, ordinal, "shard-0")
    assert Drop(1, frozenset({0})) in bring(assembly, 1, 2, "shard-1")
    assert the_commit(deliver(assembly, 1, 2, "shard-1")).ordinal == 2


def test_ranks_that_name_a_checkpoint_differently_are_told_so() -> None:
    assembly = assembly_of(3)
    reported(assembly, 0, 1, {}, ["a"], 0.0, name="step-1")
    reported(assembly, 1, 1, {}, ["b"], 0.0)
    [refusal] = only(Refuse, reported(assembly, 2, 1, {}, ["c"], 0.0, name="step-2"))
    assert refusal.why == (
        "the checkpoint of report 1: checkpoint_dir_name is 'step-1' on rank 0 and 'step-2' on rank 2; the ranks are "
        "not at the same step, or must give one name"
    )
    deliver(assembly, 0, 1, "a")
    assert Drop(1, frozenset({0, 1})) in deliver(assembly, 1, 1, "b")


# -- ranks that show no sign -----------------------------------------------------------------------------------------


def test_a_silent_rank_is_written_off_in_time_with_one_notice_and_refused_later() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model", now=5)
    assert assembly.tick(MISSING_RANK_S * 0.99) == []
    said, committed = assembly.tick(MISSING_RANK_S)
    assert isinstance(said, ShowLine)
    assert "rank 1" in said.text
    assert "missing_rank_s" in said.text
    assert isinstance(committed, Commit)
    [refusal] = bring(assembly, 1, 1, "model", now=MISSING_RANK_S + 1)
    assert isinstance(refusal, Refuse)
    assert (refusal.rank, refusal.ordinal) == (1, 1)
    assert "without rank 1" in refusal.why
    assert "missing_rank_s" in refusal.why


# -- metrics and contents --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "notices"), [("dict_checkpoint.pkl", 0), ("best/model.keras", 0), ("keras", 1)])
def test_files_that_always_differ_are_not_compared(path: str, notices: int) -> None:
    assembly = Attempt(2, CheckpointConfig())
    for rank in (0, 1):
        bring(assembly, rank, 1, path)
    deliver(assembly, 0, 1, path, crc=1)
    assert len(only(ShowLine, deliver(assembly, 1, 1, skipped=[path], crc=2))) == notices


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ("model/a/b", "model", "'model' is a directory on rank 0 and a file on rank 2"),
        ("model", "model/a/b", "'model' is a file on rank 0 and a directory on rank 2"),
    ],
)
def test_a_name_that_is_a_file_and_a_directory_is_refused_and_the_checkpoint_dropped(
    first: str, second: str, why: str
) -> None:
    assembly = assembly_of(3)
    bring(assembly, 0, 1, first)
    bring(assembly, 1, 1, first, "model-1")
    [refusal] = only(Refuse, bring(assembly, 2, 1, second))
    assert (refusal.rank, refusal.why.startswith(f"the checkpoint of report 1: {why}; give them different names")) == (
        2,
        True,
    )
    deliver(assembly, 0, 1, first)
    said, dropped = deliver(assembly, 1, 1, "model-1", skipped=[first])
    assert why in said.text  # type: ignore[union-attr]
    assert dropped == Drop(1, frozenset({0, 1}))
    for rank in range(3):
        assert only(Refuse, bring(assembly, rank, 2, "model")) == []


# -- many ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_file", [False, True])
def test_the_time_for_a_checkpoint_is_proportional_to_the_number_of_ranks(*, same_file: bool) -> None:
    """If each event looked at all ranks, this would take minutes."""
    world_size = 10_000
    assembly = assembly_of(world_size)
    ranks = random.Random(1).sample(range(world_size), world_size)
    began = time.process_time()
    for ordinal in (1, 2):
        ordered: list[Copy] = []
        for rank in ranks:
            ordered += only(Copy, bring(assembly, rank, ordinal, "model" if same_file else f"shard-{rank}"))
            assembly.assembly.deadline()
        ordered += only(Copy, assembly.tick(PATIENCE_S * ordinal))
        assert len(ordered) == world_size
        done = [deliver(assembly, order.rank, ordinal, *order.files) for order in ordered]
        assert len(the_commit(done[-1]).files) == (1 if same_file else world_size)
    assert time.process_time() - began < 10


# -- any order of starts, reports and deaths -------------------------------------------------------------------------


@dataclass
class Life:
    """A rank as the world sees it. brings: how often its reports have checkpoints."""

    brings: float
    entered_at: float = math.inf
    reports: int = 0
    brought: set[int] = field(default_factory=set)
    ordered: set[int] = field(default_factory=set)
    finished: bool = False
    died: bool = False

    @property
    def trains(self) -> bool:
        return self.entered_at < math.inf and not (self.finished or self.died)


class World:
    """Ranks start, report, store, finish and die in any order, with any time in between.

    A checkpoint may lack only the files of ranks that have made that report without one, that have finished, or that
    were written off: they had not reported for ``missing_rank_s``, or were so in an attempt before.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.settled = 0
        self.first_part_at = math.inf
        self.lacking: set[tuple[int, int]] = set()
        """Ranks, and reports whose checkpoints were committed without them."""
        world_size = chance.randint(2, 4)
        self.ranks = [Life(chance.choice((0, 0.3, 1, 1))) for _ in range(world_size)]
        idle = {rank for rank, life in enumerate(self.ranks) if not life.brings}
        self.declares = chance.random() < 0.2 and len(idle) < world_size
        bringing = sorted(set(range(world_size)) - idle) if self.declares else None
        self.written_off = {rank for rank in range(world_size) if chance.random() < 0.1 and not self.declares}
        self.unwanted = idle if self.declares else set()
        config = CheckpointConfig(missing_rank_s=MISSING_RANK_S, checkpoint_ranks=bringing)
        self.assembly = Attempt(world_size, config, silent=self.written_off)
        for rank in range(world_size):
            if chance.random() < 0.7:
                self.enter(rank)

    def live(self) -> None:
        """Do something at random, again and again, and end the attempt."""
        for _ in range(self.chance.randint(5, 60)):
            do = self.chance.choice(
                [self.enter, self.report, self.report, self.report, self.store, self.wait, self.end]
            )
            do(self.chance.randrange(len(self.ranks)))
        for life in self.ranks:
            life.died = life.died or not life.finished
        self._obey(self.assembly.close(self.now))

    def living(self, rank: int) -> Life | None:
        return self.ranks[rank] if self.ranks[rank].trains else None

    def _obey(self, actions: list[Any]) -> None:
        for rank, life in enumerate(self.ranks):
            if self.assembly.attendance[rank].is_silent and rank not in self.written_off:
                assert life.trains
                assert not life.brought
                assert self.now >= max(life.entered_at, self.first_part_at) + MISSING_RANK_S
                self.written_off.add(rank)
        for action in actions:
            match action:
                case Copy(rank, ordinal, _):
                    self.ranks[rank].ordered.add(ordinal)
                case Refuse(rank, ordinal, why):
                    assert rank in self.unwanted or any((rank, n) in self.lacking for n in range(ordinal, 99)), why
                    self.ranks[rank].brought.discard(ordinal)
                case Commit():
                    self._check(action)

    def _check(self, commit: Commit) -> None:
        n = commit.ordinal
        assert n > self.settled
        self.settled = n
        for rank, life in enumerate(self.ranks):
            assert (rank in commit.ranks) == (n in life.brought), "neither missing files nor others"
            assert n not in life.ordered, "stored"
            if rank in commit.ranks or life.finished or rank in self.unwanted or life.reports >= n:
                continue
            assert rank in self.written_off
            assert rank in commit.silent
            self.lacking.add((rank, n))
        self._obey(self.assembly.committed(n, self.now))

    def enter(self, rank: int) -> None:
        if self.ranks[rank].entered_at == math.inf:
            self.ranks[rank].entered_at = self.now
            self._obey(self.assembly.running(rank, self.now))

    def report(self, rank: int) -> None:
        if (life := self.living(rank)) is None:
            return
        life.reports += 1
        files = None
        if self.chance.random() < life.brings:
            files = [f"shard-{rank}"]
            if life.reports > self.settled:
                life.brought.add(life.reports)
                self.first_part_at = min(self.now, self.first_part_at)
        if files or life.reports > self.settled:
            self.written_off.discard(rank)
        self._obey(reported(self.assembly, rank, life.reports, {}, files, self.now))
        if self.chance.random() < 0.7:
            self.store(rank)

    def store(self, rank: int) -> None:
        if (life := self.living(rank)) is None or not life.ordered:
            return
        ordinal = min(life.ordered)
        life.ordered.discard(ordinal)
        self._obey(deliver(self.assembly, rank, ordinal, f"shard-{rank}", now=self.now))

    def end(self, rank: int) -> None:
        if (life := self.living(rank)) is None or self.chance.random() < 0.5:
            return
        if self.chance.random() < 0.5:
            life.died = True
            self.assembly.attendance.ended(rank)
        elif not life.ordered:
            life.finished = True
            self._obey(self.assembly.finished(rank, self.now))

    def wait(self, _: int) -> None:
        self.now += self.chance.choice((0.1, PATIENCE_S, MISSING_RANK_S))
        self._obey(self.assembly.tick(self.now))


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32))
def test_a_checkpoint_lacks_only_ranks_that_bring_nothing_or_had_their_time(seed: int) -> None:
    World(random.Random(seed)).live()


# -- which to keep ---------------------------------------------------------------------------------------------------


def keeping(number: int | None, attribute: str | None = "loss", order: str = "min") -> CheckpointConfig:
    return CheckpointConfig(
        num_to_keep=number,
        checkpoint_score_attribute=attribute,
        checkpoint_score_order=order,  # type: ignore[arg-type]
    )


def losses(*values: object) -> list[dict[str, object]]:
    return [{"loss": value} for value in values]


@pytest.mark.parametrize(
    ("metrics", "config", "best"),
    [
        (losses(3, 1, 2), keeping(None), [1, 2, 0]),
        (losses(3, 1, 2), keeping(None, order="max"), [0, 2, 1]),
        (losses(1, 2, 3), keeping(None, None), [2, 1, 0]),
        (losses(1, 1, 1), keeping(None), [2, 1, 0]),
        (losses(10**400, 1), keeping(None), [1, 0]),
        ([{"eval": {"loss": 2}}, {"eval": {"loss": 1}}, {"eval": 0}], keeping(None, "eval/loss"), [1, 0, 2]),
        ([{"eval/loss": 1}, {"eval/loss": 2}], keeping(None, "eval/loss"), [0, 1]),
    ],
    ids=["least", "most", "newest", "the newer of equals", "beyond floats", "nested", "a slash in the name"],
)
def test_best_first(metrics: list[Any], config: CheckpointConfig, best: list[int]) -> None:
    assert best_first(metrics, config) == best


@pytest.mark.parametrize("order", ["min", "max"])
@pytest.mark.parametrize("bad", [{}, *losses(math.nan, None, "text", True, {"nested": 1})])
def test_a_score_that_is_no_number_is_worst_in_either_order(bad: dict[str, object], order: str) -> None:
    assert best_first([{"loss": 1}, bad, {"loss": 2}], keeping(None, order=order))[-1] == 1


@pytest.mark.parametrize(
    ("metrics", "config", "doubtful", "deleted"),
    [
        (losses(1, 2, 3), keeping(None), (), []),
        (losses(1), keeping(3), (), []),
        (losses(3, 1, 2, 0), keeping(2), (), [0, 2]),
        (losses(1, 2, 3), keeping(1), (), [1]),
        (losses(1, 2, 3), keeping(2, None), (), [0]),
        (losses(1, 2, 3, 4), keeping(1, None), {2, 3}, [0, 2]),
        (losses(1, 2, 3, 4), keeping(1, None), {0, 1, 2}, [0, 1, 2]),
    ],
    ids=["no number", "few", "the best", "the latest too", "newest", "may lack ranks", "only the latest is complete"],
)
def test_surplus(metrics: list[Any], config: CheckpointConfig, doubtful: Any, deleted: list[int]) -> None:
    assert surplus(metrics, config, doubtful) == deleted
