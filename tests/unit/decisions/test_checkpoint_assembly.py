"""Joining the checkpoints of N ranks: who copies what, when it is committed, and who is told what."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from distrain import wire
from distrain.api.config import CheckpointConfig
from distrain.decisions.checkpoint_assembly import (
    HEAD_START_S,
    MOST_UNCOMMITTED,
    PATIENCE_S,
    Action,
    CheckpointAssembly,
    Drop,
    Proceed,
    Refuse,
    RequestFiles,
)
from distrain.decisions.events import ShowLine
from distrain.storage.commit import Commit, CommittedFile
from distrain.storage.retention import best_first, surplus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MISSING_RANK_S = 60.0


def assembly_of(
    world_size: int,
    *,
    running_since: float = -MISSING_RANK_S,
    ranks: Sequence[int] | Literal["all"] | None = None,
    silent: Sequence[int] = (),
) -> CheckpointAssembly:
    """All ranks are in train_func. ``ranks``: those that bring checkpoints, as the user says."""
    config = CheckpointConfig(missing_rank_s=MISSING_RANK_S, checkpoint_ranks=ranks)
    assembly = CheckpointAssembly(world_size, config, silent=silent)
    for rank in range(world_size):
        assembly.running(rank, running_since)
    return assembly


def reported(
    assembly: CheckpointAssembly,
    rank: int,
    index: int,
    metrics: dict[str, Any],
    files: Iterable[str] | None,
    now: float,
    in_place: str = "",
    **how: Any,
) -> list[Action]:
    ordinal, how = None if files is None else index, {"folder": in_place, "in_place": bool(in_place), **how}
    report = wire.Reported(attempt=0, rank=rank, index=index, ordinal=ordinal, files=list(files or ()), **how)
    return assembly.reported(report, metrics, now)


def stored(
    assembly: CheckpointAssembly,
    rank: int,
    ordinal: int,
    files: Any,
    skipped: Any,
    now: float,
    failed: str | None = None,
) -> list[Action]:
    answer = wire.FilesCopied(attempt=0, rank=rank, ordinal=ordinal, files=files, skipped=skipped, failed=failed)
    return assembly.stored(answer, now)


def bring(
    assembly: CheckpointAssembly,
    rank: int,
    ordinal: int,
    *files: str,
    now: float = 0.0,
    **metrics: Any,
) -> list[Action]:
    """report() with a checkpoint."""
    return reported(assembly, rank, ordinal, metrics, files, now)


def note(assembly: CheckpointAssembly, rank: int, index: int, now: float = 0.0, **metrics: Any) -> list[Action]:
    """report() without a checkpoint."""
    return reported(assembly, rank, index, metrics, None, now)


def deliver(
    assembly: CheckpointAssembly,
    rank: int,
    ordinal: int,
    *files: str,
    skipped: Iterable[str] = (),
    crc: int = 1,
    now: float = 0.0,
) -> list[Action]:
    contents = [(path, 10, crc) for path in files], [(path, 10, crc) for path in skipped]
    return stored(assembly, rank, ordinal, *contents, now)


def only(kind: type[Any], actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def the_commit(actions: list[Action]) -> Commit:
    [commit] = only(Commit, actions)
    assert isinstance(commit, Commit)
    return commit


def owners(commit: Commit) -> dict[str, int]:
    return {file.path: file.rank for file in commit.files}


# -- one rank --------------------------------------------------------------------------------------------------------


def test_a_single_rank_is_granted_and_committed_at_once() -> None:
    assembly = assembly_of(1)
    assert bring(assembly, 0, 1, "b", "a", loss=0.5) == [RequestFiles(0, 1, ("a", "b"))]
    files = (CommittedFile("a", 0, 10, 1), CommittedFile("b", 0, 10, 1))
    assert deliver(assembly, 0, 1, "a", "b") == [Commit(1, files, (0,), {"loss": 0.5}, world_size=1)]


# -- files that are in place already ---------------------------------------------------------------------------------


def test_files_in_place_are_listed_when_all_ranks_have_reported() -> None:
    """By the host of the lowest rank, for all."""
    assembly = assembly_of(3)
    assert reported(assembly, 0, 1, {}, (), 0.0, in_place="/run/a") == []
    assert reported(assembly, 2, 1, {}, (), 0.0, in_place="/run/a") == []
    assert note(assembly, 1, 1) == [RequestFiles(0, 1, ())]
    assert owners(the_commit(deliver(assembly, 0, 1, "a", "b"))) == {"a": 0, "b": 0}


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
    assert dropped == Drop(1)


def test_what_a_lost_host_owes() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "a")
    assert assembly.awaits([0])
    assert not assembly.awaits([1])
    deliver(assembly, 0, 1, "a")
    assert not assembly.awaits([0])


# -- rank 0 only -----------------------------------------------------------------------------------------------------


def test_rank_0_only_commits_when_the_others_have_been_silent_for_long_enough() -> None:
    assembly = assembly_of(2, running_since=0.0)
    bring(assembly, 0, 1, "model", now=1)
    assert deliver(assembly, 0, 1, "model", now=1) == []
    assert not only(Commit, bring(assembly, 0, 2, "model", now=20))
    assert assembly.deadline() == 1 + MISSING_RANK_S
    assert assembly.tick(MISSING_RANK_S) == []
    commit = the_commit(assembly.tick(1 + MISSING_RANK_S))
    assert (commit.ordinal, commit.ranks, commit.silent) == (1, (0,), (1,))


def test_rank_0_only_loses_no_checkpoint() -> None:
    assembly, committed = assembly_of(3), []
    for ordinal in (1, 2, 3):
        committed += only(Commit, bring(assembly, 0, ordinal, "model", now=ordinal))
        committed += only(Commit, deliver(assembly, 0, ordinal, "model", now=ordinal))
    for rank in range(3):
        committed += only(Commit, assembly.finished(rank, 4.0))
    assert [commit.ordinal for commit in committed] == [1, 2, 3]


def test_after_the_first_one_rank_0_only_commits_at_once() -> None:
    assembly = assembly_of(2)
    for ordinal in (1, 2):
        bring(assembly, 0, ordinal, "model")
        deliver(assembly, 0, ordinal, "model")
    assert [commit.ordinal for commit in only(Commit, assembly.tick(MISSING_RANK_S))] == [1, 2]
    bring(assembly, 0, 3, "model", now=MISSING_RANK_S)
    assert the_commit(deliver(assembly, 0, 3, "model", now=MISSING_RANK_S)).silent == (1,)


@pytest.mark.parametrize("silent_before", [False, True])
def test_rank_0_only_commits_at_once_if_the_user_or_an_earlier_checkpoint_says_so(*, silent_before: bool) -> None:
    assembly = assembly_of(2, silent=[1]) if silent_before else assembly_of(2, ranks=[0])
    bring(assembly, 0, 1, "model")
    commit = the_commit(deliver(assembly, 0, 1, "model"))
    assert (commit.ranks, commit.silent) == ((0,), (1,) if silent_before else ())


def test_a_rank_that_was_silent_is_waited_for_again_once_it_has_caught_up() -> None:
    assembly = assembly_of(2, silent=[1])
    bring(assembly, 0, 1, "model")
    assert the_commit(deliver(assembly, 0, 1, "model")).silent == (1,)
    note(assembly, 1, 1)
    bring(assembly, 0, 2, "model")
    assert the_commit(deliver(assembly, 0, 2, "model")).silent == (1,), "it is still behind"
    note(assembly, 1, 2)
    note(assembly, 1, 3)
    bring(assembly, 0, 3, "model")
    assert the_commit(deliver(assembly, 0, 3, "model")).silent == ()
    bring(assembly, 0, 4, "model")
    assert not only(Commit, deliver(assembly, 0, 4, "model"))


@pytest.mark.parametrize("ranks", [[0, 1], "all"])
def test_ranks_that_bring_checkpoints_as_the_user_says_are_waited_for(ranks: list[int] | Literal["all"]) -> None:
    assembly = assembly_of(2, ranks=ranks)
    bring(assembly, 0, 1, "shard-0")
    deliver(assembly, 0, 1, "shard-0")
    [said] = assembly.tick(2 * MISSING_RANK_S)
    assert isinstance(said, ShowLine)
    assert "the checkpoint of report 1 of rank 0 is not complete: rank 1 has not called report() yet." in said.text
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


def test_rank_0_only_commits_when_the_others_have_finished() -> None:
    assembly = assembly_of(2)
    assert assembly.finished(1, 0.0) == []
    bring(assembly, 0, 1, "model")
    assert the_commit(deliver(assembly, 0, 1, "model")).ranks == (0,)


def test_a_rank_that_waits_for_the_files_of_a_checkpoint_is_not_written_off() -> None:
    assembly = assembly_of(2)
    assembly.fetching(1)
    bring(assembly, 0, 1, "a")
    actions = [*deliver(assembly, 0, 1, "a"), *note(assembly, 0, 2, now=100.0), *assembly.tick(1000.0)]
    assert "not complete: rank 1 has not got the files of a checkpoint yet. It" in only(ShowLine, actions)[0].text
    actions += [*assembly.running(1, 1000.0), *assembly.tick(999.0 + MISSING_RANK_S)]
    assert not only(Commit, actions)
    bring(assembly, 1, 1, "b", now=1059.0)
    assert the_commit(deliver(assembly, 1, 1, "b", now=1060.0)).ranks == (0, 1)


def test_a_rank_that_waits_for_files_is_not_written_off_for_get_checkpoint() -> None:
    assembly = assembly_of(3)
    assembly.fetching(1)
    bring(assembly, 0, 1, "a")
    deliver(assembly, 0, 1, "a")
    [said] = assembly.write_off_laggards(1)
    assert "without rank 2:" in said.text  # type: ignore[union-attr]
    assert only(Commit, assembly.tick(MISSING_RANK_S)) == []


# -- some ranks ------------------------------------------------------------------------------------------------------


def test_ranks_1_and_3_only() -> None:
    assembly = assembly_of(4)
    bring(assembly, 1, 1, "shard-1")
    bring(assembly, 3, 1, "shard-3")
    assert only(RequestFiles, assembly.tick(PATIENCE_S)) == [
        RequestFiles(1, 1, ("shard-1",)),
        RequestFiles(3, 1, ("shard-3",)),
    ]
    deliver(assembly, 1, 1, "shard-1", now=2)
    assert deliver(assembly, 3, 1, "shard-3", now=2) == []
    commit = the_commit(assembly.tick(MISSING_RANK_S))
    assert owners(commit) == {"shard-1": 1, "shard-3": 3}
    assert (commit.ranks, commit.silent) == ((1, 3), (0, 2))


def test_ranks_that_report_in_step_without_a_checkpoint_are_not_waited_for() -> None:
    assembly = assembly_of(2)
    note(assembly, 1, 1)
    bring(assembly, 0, 1, "model")
    assert the_commit(deliver(assembly, 0, 1, "model")).ranks == (0,)


def test_a_rank_that_makes_that_report_later_completes_the_checkpoint() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    assert deliver(assembly, 0, 1, "model") == []
    assert the_commit(note(assembly, 1, 1, now=2)).ranks == (0,)


def test_a_rank_may_run_ahead_while_the_others_copy() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    for index in (1, 2, 3):
        note(assembly, 1, index, now=index)
    assert the_commit(deliver(assembly, 0, 1, "model", now=4)).ranks == (0,)


def test_files_of_different_reports_are_never_joined() -> None:
    """Rank 1 has a checkpoint only with its fourth report."""
    assembly, committed = assembly_of(2), []
    for n in (1, 2, 3, 4):
        bring(assembly, 0, n, f"r0-{n}", loss=n)
        committed += only(Commit, deliver(assembly, 0, n, f"r0-{n}"))
    assert committed == []
    for n in (1, 2, 3):
        committed += only(Commit, note(assembly, 1, n, now=1000.0))
    bring(assembly, 1, 4, "r1-4", now=5000.0)
    committed += only(Commit, deliver(assembly, 1, 4, "r1-4", now=5000.0))
    assert [owners(commit) for commit in committed] == [{"r0-1": 0}, {"r0-2": 0}, {"r0-3": 0}, {"r0-4": 0, "r1-4": 1}]
    assert [commit.metrics["loss"] for commit in committed] == [1, 2, 3, 4]


def test_a_rank_that_has_reported_is_waited_for_although_the_others_go_on() -> None:
    """Only ranks that have never reported are written off then; this one is one step behind."""
    assembly = assembly_of(2)
    for rank in (0, 1):
        note(assembly, rank, 1)
    bring(assembly, 0, 2, "shard-0")
    deliver(assembly, 0, 2, "shard-0")
    note(assembly, 0, 3, now=1)
    assert only(Commit, assembly.tick(10 * MISSING_RANK_S)) == []
    assert only(Refuse, bring(assembly, 1, 2, "shard-1", now=1001)) == []
    assert the_commit(deliver(assembly, 1, 2, "shard-1", now=1002)).ranks == (0, 1)


# -- a rank that is far ahead ----------------------------------------------------------------------------------------


def run_ahead(assembly: CheckpointAssembly, reports: int, now: float = 0.0, first: int = 1) -> list[int]:
    """Let rank 0 report checkpoints without waiting. Return the numbers of those that it may store."""
    stored = []
    for n in range(first, first + reports):
        for order in only(RequestFiles, bring(assembly, 0, n, "model", now=now)):
            stored.append(order.ordinal)
            deliver(assembly, 0, order.ordinal, "model", now=now)
    return stored


def test_a_rank_that_is_far_ahead_stores_no_more_until_the_others_follow() -> None:
    assembly = assembly_of(2, running_since=0.0)
    assert run_ahead(assembly, 40) == list(range(1, MOST_UNCOMMITTED + 1))
    for n in range(1, 30):
        actions = [*note(assembly, 1, n, now=n), *assembly.committed(n, n)]
        assert the_commit(actions).ordinal == n
        assert [order.ordinal for order in only(RequestFiles, actions)] == [MOST_UNCOMMITTED + n]
        deliver(assembly, 0, MOST_UNCOMMITTED + n, "model", now=n)


def test_a_rank_stores_no_more_while_the_disk_is_behind() -> None:
    assembly, stored = assembly_of(1), []
    for n in range(1, 20):
        for order in only(RequestFiles, bring(assembly, 0, n, "model")):
            stored.append(order.ordinal)
            deliver(assembly, 0, n, "model")
    assert stored == list(range(1, MOST_UNCOMMITTED + 2))
    assert assembly.tick(1000.0) == []
    assert only(RequestFiles, assembly.committed(1, 1001.0)) != []


def test_a_rank_does_not_wait_long_for_ranks_that_may_never_report() -> None:
    """Ranks other than rank 0 may wait for it in a collective."""
    assembly = assembly_of(2, running_since=0.0)
    run_ahead(assembly, MOST_UNCOMMITTED + 1)
    assert assembly.deadline() == HEAD_START_S
    assert [order.ordinal for order in only(RequestFiles, assembly.tick(HEAD_START_S))] == [MOST_UNCOMMITTED + 1]
    first = MOST_UNCOMMITTED + 2
    assert run_ahead(assembly, 5, HEAD_START_S, first) == list(range(first, first + 5))


@pytest.mark.parametrize("brings", [False, True])
def test_a_rank_waits_for_one_that_has_reported_but_not_for_ever(*, brings: bool) -> None:
    """It may be rank 0 for which that one waits. Without any checkpoint so far, the one behind is written off."""
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    if brings:
        bring(assembly, 1, 1, "shard")
        deliver(assembly, 1, 1, "shard")
    else:
        note(assembly, 1, 1)
    assembly.committed(1, 0.0)
    n = MOST_UNCOMMITTED + 2
    run_ahead(assembly, MOST_UNCOMMITTED + 1, first=2)
    assert only(RequestFiles, assembly.tick(MISSING_RANK_S * 0.99)) == []
    actions = assembly.tick(MISSING_RANK_S)
    assert [order.ordinal for order in only(RequestFiles, actions)] == [n]
    assert [commit.ordinal for commit in only(Commit, actions)] == ([] if brings else list(range(2, n)))


def test_memory_does_not_wait_long_for_ranks_that_may_never_report() -> None:
    assembly = assembly_of(2, running_since=0.0)
    reported(assembly, 0, 1, {}, ["a"], 0.0, in_memory=True)
    assert only(Proceed, deliver(assembly, 0, 1, "a")) == []
    assert only(Proceed, assembly.tick(HEAD_START_S)) == [Proceed(0, 1)]
    assert only(Drop, reported(assembly, 0, 2, {}, ["a"], 3.0, in_memory=True)) == [Drop(1)]
    assert only(Proceed, deliver(assembly, 0, 2, "a", now=3.0)) == [Proceed(0, 2)], "at once, from now on"
    assert reported(assembly, 1, 1, {}, ["b"], 4.0, in_memory=True) == [Drop(1)]
    reported(assembly, 1, 2, {}, ["b"], 5.0, in_memory=True)
    assert the_commit(deliver(assembly, 1, 2, "b", now=5.0)).ordinal == 2


def test_memory_commits_the_newest_one_when_the_time_of_silent_ranks_is_over() -> None:
    assembly, committed = assembly_of(2, running_since=0.0), []
    for n in range(1, 100):
        committed += only(Commit, reported(assembly, 0, n, {}, ["a"], float(n), in_memory=True))
        committed += only(Commit, deliver(assembly, 0, n, "a", now=float(n)))
    assert [commit.ordinal for commit in committed] == list(range(61, 100))


def test_memory_waits_for_a_rank_that_has_reported() -> None:
    assembly = assembly_of(2, running_since=0.0)
    for rank in (0, 1):
        note(assembly, rank, 1)
    reported(assembly, 0, 2, {}, ["a"], 0.0, in_memory=True)
    assert only(Proceed, deliver(assembly, 0, 2, "a")) == []
    assert assembly.tick(10 * HEAD_START_S) == []


def write_to_memory(assembly: CheckpointAssembly, rank: int, n: int, now: float) -> list[Action]:
    """Report a checkpoint in memory. It is hashed at once."""
    actions = reported(assembly, rank, n, {}, [f"shard-{rank}"], now, in_memory=True)
    return [*actions, *deliver(assembly, rank, n, f"shard-{rank}", now=now)]


def test_in_memory_a_checkpoint_that_all_have_reported_is_not_superseded() -> None:
    """The next one could be superseded in turn while the slowest rank is still being hashed, and so on."""
    assembly = assembly_of(2)
    for rank in (0, 1):
        reported(assembly, rank, 1, {}, [f"shard-{rank}"], 0.0, in_memory=True)
    assert only(Proceed, deliver(assembly, 0, 1, "shard-0")) == []
    assert only(Proceed, assembly.tick(2 * MISSING_RANK_S)) == []
    assert the_commit(deliver(assembly, 1, 1, "shard-1")).ordinal == 1


@pytest.mark.parametrize("brings", [False, True])
def test_memory_does_not_wait_for_ever_for_a_rank_that_has_reported(*, brings: bool) -> None:
    """That one may wait for it in a collective. It is written off only if it is not just slow."""
    assembly = assembly_of(2)
    for rank in (0, 1):
        reported(assembly, rank, 1, {}, ["a"] if brings else None, 0.0)
        if brings:
            deliver(assembly, rank, 1, "a")
    done = write_to_memory(assembly, 0, 2, 0.0)
    for n in (2, 3):
        moment = 0.0
        while not only(Proceed, done) and not only(Commit, done):
            deadline = assembly.deadline()
            assert deadline is not None
            moment = deadline
            done += assembly.tick(moment)
        assert moment == (n - 1) * MISSING_RANK_S
        assert only(Commit, done) == [] if n == 2 or brings else the_commit(done).silent == (1,)
        done = write_to_memory(assembly, 0, n + 1, moment)


def test_memory_supersedes_nothing_that_was_not_written_to_memory() -> None:
    """ASYNC still uploads it, or a rank that is behind has not made that report."""
    assembly = assembly_of(2)
    for rank in (0, 1):
        bring(assembly, rank, 1, f"shard-{rank}")
    for rank in (0, 1):
        assert only(Drop, write_to_memory(assembly, rank, 2, 1.0)) == []
    deliver(assembly, 0, 1, "shard-0", now=2.0)
    actions = deliver(assembly, 1, 1, "shard-1", now=2.0)
    assert [commit.ordinal for commit in only(Commit, actions)] == [1, 2]


def test_a_rank_supersedes_only_its_own_checkpoints() -> None:
    assembly = assembly_of(3)
    note(assembly, 0, 1)
    write_to_memory(assembly, 1, 1, 0.0)
    for n in (2, 3):
        note(assembly, 1, n)
        write_to_memory(assembly, 0, n, float(n))
    actions = write_to_memory(assembly, 2, 1, 4.0)
    assert only(Drop, actions) == []
    assert the_commit(actions).ordinal == 1
    assert Drop(2) in write_to_memory(assembly, 2, 2, 4.0)
    assert the_commit(note(assembly, 2, 3, now=4.0)).ordinal == 3


# -- time does not matter --------------------------------------------------------------------------------------------


def test_a_rank_that_brought_one_is_waited_for_however_long_it_takes() -> None:
    assembly = assembly_of(2)
    for rank in (0, 1):
        bring(assembly, rank, 1, f"shard-{rank}", now=10)
        deliver(assembly, rank, 1, f"shard-{rank}", now=10)
    bring(assembly, 0, 2, "shard-0", now=20)
    deliver(assembly, 0, 2, "shard-0", now=20)
    assert only(Commit, bring(assembly, 0, 3, "shard-0", now=30)) == []
    assert only(Commit, assembly.tick(30 + 10 * MISSING_RANK_S)) == []
    bring(assembly, 1, 2, "shard-1", now=1000)
    assert the_commit(deliver(assembly, 1, 2, "shard-1", now=1000)).ordinal == 2


def test_waiting_long_for_such_a_rank_is_said_once() -> None:
    assembly = assembly_of(2)
    for rank in (0, 1):
        bring(assembly, rank, 1, f"shard-{rank}")
        deliver(assembly, rank, 1, f"shard-{rank}")
    bring(assembly, 0, 2, "shard-0")
    deliver(assembly, 0, 2, "shard-0")
    [said] = assembly.tick(MISSING_RANK_S)
    assert isinstance(said, ShowLine)
    assert "rank 1" in said.text
    assert assembly.tick(2 * MISSING_RANK_S) == []


def test_a_rank_that_brought_one_and_finished_is_not_waited_for() -> None:
    assembly = assembly_of(2)
    for rank in (0, 1):
        bring(assembly, rank, 1, f"shard-{rank}")
        deliver(assembly, rank, 1, f"shard-{rank}")
    bring(assembly, 0, 2, "shard-0")
    deliver(assembly, 0, 2, "shard-0")
    assert the_commit(assembly.finished(1, 1.0)).ranks == (0,)


# -- the same file name ----------------------------------------------------------------------------------------------


def test_of_the_same_file_name_the_lowest_rank_is_kept_and_the_others_copy_nothing() -> None:
    assembly = assembly_of(3)
    assert bring(assembly, 0, 1, "model") == [RequestFiles(0, 1, ("model",))]
    for rank in (1, 2):
        assert bring(assembly, rank, 1, "model") == [RequestFiles(rank, 1, ())]
    for rank in (1, 2):
        deliver(assembly, rank, 1, skipped=["model"])
    commit = the_commit(deliver(assembly, 0, 1, "model"))
    assert owners(commit) == {"model": 0}
    assert commit.ranks == (0, 1, 2)


def test_rank_1_waits_for_rank_0_and_is_then_spared_the_copy() -> None:
    assembly = assembly_of(2)
    assert bring(assembly, 1, 1, "model") == []
    assert bring(assembly, 0, 1, "model", now=PATIENCE_S / 2) == [
        RequestFiles(0, 1, ("model",)),
        RequestFiles(1, 1, ()),
    ]


def test_rank_1_waits_no_longer_than_its_patience() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "model")
    assert assembly.tick(PATIENCE_S * 0.99) == []
    assert assembly.tick(PATIENCE_S) == [RequestFiles(1, 1, ("model",))]


def test_when_patience_ran_out_the_lowest_rank_is_kept_all_the_same() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "model")
    assert assembly.tick(PATIENCE_S) == [RequestFiles(1, 1, ("model",))]
    deliver(assembly, 1, 1, "model", now=2)
    assert bring(assembly, 0, 1, "model", now=3) == [RequestFiles(0, 1, ("model",))]
    assert owners(the_commit(deliver(assembly, 0, 1, "model", now=4))) == {"model": 0}


def test_no_two_ranks_store_a_file_of_the_same_name_at_the_same_time() -> None:
    """Else the bytes of the higher rank could be the last ones, with the lower rank's crc32 in the manifest."""
    assembly = assembly_of(4)
    bring(assembly, 3, 1, "model", "shard-3")
    assert assembly.tick(PATIENCE_S) == [RequestFiles(3, 1, ("model", "shard-3"))]
    bring(assembly, 2, 1, "model", now=2)
    assert bring(assembly, 1, 1, "model", "shard-1", now=2) == [RequestFiles(2, 1, ())]
    deliver(assembly, 2, 1, now=2)
    assert assembly.tick(2 + PATIENCE_S) == []
    ordered = deliver(assembly, 3, 1, "model", "shard-3", now=4)
    assert ordered == [RequestFiles(1, 1, ("model", "shard-1"))]
    assert bring(assembly, 0, 1, "model", now=5) == []
    assert deliver(assembly, 1, 1, "model", "shard-1", now=6) == [RequestFiles(0, 1, ("model",))]
    assert owners(the_commit(deliver(assembly, 0, 1, "model", now=7))) == {"model": 0, "shard-1": 1, "shard-3": 3}


def test_a_rank_replaces_files_of_a_rank_that_could_not_store_them() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "model")
    assembly.tick(PATIENCE_S)
    assert bring(assembly, 0, 1, "model", now=3) == []
    assert stored(assembly, 1, 1, [], [], 4, "no") == [RequestFiles(0, 1, ("model",))]


def test_rank_1_does_not_wait_for_a_finished_rank_0() -> None:
    assembly = assembly_of(2)
    assembly.finished(0, 0.0)
    assert bring(assembly, 1, 1, "model") == [RequestFiles(1, 1, ("model",))]


# -- ranks that are just slow ----------------------------------------------------------------------------------------


def test_a_rank_that_has_just_started_is_slow_not_silent() -> None:
    assembly = assembly_of(2, running_since=0.0)
    bring(assembly, 0, 1, "shard-0", now=0.1)
    deliver(assembly, 0, 1, "shard-0", now=0.1)
    assert only(Commit, bring(assembly, 0, 2, "shard-0", now=0.2)) == []
    bring(assembly, 1, 1, "shard-1", now=1)
    assert the_commit(deliver(assembly, 1, 1, "shard-1", now=1)).ranks == (0, 1)


def test_a_rank_that_enters_train_func_late_has_as_much_time_as_the_others() -> None:
    assembly = CheckpointAssembly(2, CheckpointConfig(missing_rank_s=MISSING_RANK_S))
    assembly.running(0, 0.0)
    bring(assembly, 0, 1, "shard-0", now=1)
    deliver(assembly, 0, 1, "shard-0", now=1)
    [said] = assembly.tick(3 * MISSING_RANK_S)
    assert "rank 1 has not entered train_func" in said.text  # type: ignore[union-attr]
    assembly.running(1, 200.0)
    assert assembly.deadline() == 200.0 + HEAD_START_S
    assembly.tick(200.0 + HEAD_START_S)
    assert assembly.deadline() == 200.0 + MISSING_RANK_S
    assert assembly.tick(199.0 + MISSING_RANK_S) == []
    assert the_commit(assembly.tick(200.0 + MISSING_RANK_S)).ranks == (0,)


def test_a_silent_rank_that_reports_after_all_is_waited_for_again() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "shard-0")
    deliver(assembly, 0, 1, "shard-0")
    the_commit(assembly.tick(MISSING_RANK_S))
    bring(assembly, 0, 2, "shard-0", now=61)
    assert only(ShowLine, note(assembly, 1, 1, now=61)) == []
    assert only(Refuse, bring(assembly, 1, 2, "shard-1", now=61)) == []
    deliver(assembly, 0, 2, "shard-0", now=61)
    commit = the_commit(deliver(assembly, 1, 2, "shard-1", now=61))
    assert (commit.ranks, commit.silent) == ((0, 1), ())


@pytest.mark.parametrize("end", ["failure", "stop"])
@pytest.mark.parametrize("fetching", [False, True])
def test_checkpoints_that_may_lack_ranks_are_dropped_at_the_end_of_an_attempt(end: str, *, fetching: bool) -> None:
    assembly = assembly_of(3, running_since=0.0)
    if fetching:
        assembly.fetching(2)
    for ordinal in (1, 2):
        for rank in (0, 1):
            bring(assembly, rank, ordinal, f"shard-{rank}", now=0.1)
            deliver(assembly, rank, ordinal, f"shard-{rank}", now=0.1)
    if end == "failure":
        assembly.ended(2)
        assert assembly.tick(2 * MISSING_RANK_S) == []
    assert assembly.close(2 * MISSING_RANK_S if end == "failure" else MISSING_RANK_S) == [
        ShowLine(
            "the checkpoints of reports 1 to 2 are dropped: the attempt ended before rank 2 made that report, so "
            "files may be missing. If only some ranks save checkpoints, name them: "
            "CheckpointConfig(checkpoint_ranks=[0])"
        )
    ]


def test_at_the_end_of_an_attempt_nothing_is_said_of_ranks_that_were_just_behind() -> None:
    assembly = assembly_of(2)
    for rank in (0, 1):
        bring(assembly, rank, 1, f"shard-{rank}")
        deliver(assembly, rank, 1, f"shard-{rank}")
    bring(assembly, 0, 2, "shard-0")
    deliver(assembly, 0, 2, "shard-0")
    assert assembly.close(1000.0) == []


def test_what_is_known_of_the_silent_ranks_holds_at_the_end_of_an_attempt() -> None:
    assembly = assembly_of(3, running_since=0.0)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    assembly.finished(1, 1.0)
    note(assembly, 2, 1, now=1.0)
    note(assembly, 2, 2, now=1.0)
    bring(assembly, 0, 2, "model", now=2.0)
    assert [commit.silent for commit in only(Commit, deliver(assembly, 0, 2, "model", now=2.0))] == [()]
    assert assembly.close(3.0) == []


def test_the_end_of_an_attempt_commits_nothing_that_is_not_whole() -> None:
    assembly = assembly_of(1)
    bring(assembly, 0, 1, "model")
    assert assembly.close(1.0) == []


def test_a_checkpoint_may_wait_for_nothing_but_uploads() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "shard-0")
    assert not assembly.awaits_only({(0, 1)}), "rank 1 has not said what it brings"
    bring(assembly, 1, 1, "shard-1")
    assert not assembly.awaits_only({(0, 1)}), "nobody is bringing the files of rank 1"
    assert assembly.awaits_only({(0, 1), (1, 1)})
    deliver(assembly, 0, 1, "shard-0")
    assert assembly.awaits_only({(1, 1)})
    assert the_commit(deliver(assembly, 1, 1, "shard-1")).ranks == (0, 1)
    assert not assembly.awaits_only(set())


# -- calls of report() that fail ---------------------------------------------------------------------------------------


def test_a_checkpoint_whose_report_has_failed_on_a_rank_is_dropped_and_the_next_one_is_whole() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "shard-0")
    deliver(assembly, 0, 1, "shard-0")
    said, dropped = assembly.failed(1, 1, "TypeError: a metric", 0.0, has_checkpoint=True)
    assert said == ShowLine(
        "the checkpoint of report 1 is dropped, as report() has failed on rank 1: TypeError: a metric"
    )
    assert dropped == Drop(1)
    for rank in (0, 1):
        bring(assembly, rank, 2, f"shard-{rank}")
        actions = deliver(assembly, rank, 2, f"shard-{rank}")
    assert the_commit(actions).ranks == (0, 1)


def test_a_report_that_has_failed_on_all_ranks_is_dropped() -> None:
    assembly = assembly_of(2)
    assert assembly.failed(0, 1, "no", 0.0, has_checkpoint=True) == []
    assert Drop(1) in assembly.failed(1, 1, "no", 0.0, has_checkpoint=True)


def test_a_report_without_a_checkpoint_that_has_failed_is_in_step() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    assert the_commit(assembly.failed(1, 1, "no", 0.0, has_checkpoint=False)).silent == ()


def test_a_part_that_an_exception_kept_from_being_sent_is_missing() -> None:
    assembly = assembly_of(2)
    for ordinal in (1, 2):
        bring(assembly, 0, ordinal, "shard-0")
        deliver(assembly, 0, ordinal, "shard-0")
    assert Drop(1) in bring(assembly, 1, 2, "shard-1")
    assert the_commit(deliver(assembly, 1, 2, "shard-1")).ordinal == 2


def test_reports_of_a_rank_that_may_not_have_checkpoints_are_not_missing() -> None:
    assembly = assembly_of(2, ranks=[0])
    note(assembly, 1, 2)
    bring(assembly, 0, 1, "model")
    assert the_commit(deliver(assembly, 0, 1, "model")).ordinal == 1


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
    assert Drop(1) in deliver(assembly, 1, 1, "b")


# -- what is still being stored when a rank fails ----------------------------------------------------------------------


def test_a_checkpoint_needs_nothing_more_from_a_rank_that_has_reported_without_one() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    assert assembly.storing({1}, ()) == frozenset(), "rank 1 has not made that report"
    note(assembly, 1, 1)
    assert assembly.storing({1}, ()) == {(0, 1)}
    assert assembly.storing({0, 1}, ()) == frozenset(), "nobody is left to store it"
    deliver(assembly, 0, 1, "model")
    assert assembly.storing({1}, ()) == frozenset()


def test_a_checkpoint_needs_nothing_more_from_a_rank_that_has_delivered() -> None:
    assembly = assembly_of(3)
    for rank in range(3):
        bring(assembly, rank, 1, f"shard-{rank}")
    assert assembly.storing({1}, ()) == frozenset(), "rank 1 has not stored its own part"
    deliver(assembly, 1, 1, "shard-1")
    assert assembly.storing({1}, ()) == {(0, 1), (2, 1)}
    stored(assembly, 2, 1, [], [], 0.0, "disk full")
    assert assembly.storing({1}, ()) == frozenset(), "it will be dropped"


def test_nobody_waits_for_a_checkpoint_after_one_that_cannot_be() -> None:
    assembly = assembly_of(3)
    bring(assembly, 2, 1, "shard-2")
    for rank in (0, 1):
        bring(assembly, rank, 1, f"shard-{rank}")
        deliver(assembly, rank, 1, f"shard-{rank}")
        bring(assembly, rank, 2, f"shard-{rank}")
    deliver(assembly, 1, 2, "shard-1")
    assert assembly.storing({1}, ()) == {(2, 1), (0, 2)}
    assert assembly.storing({2}, ()) == frozenset()


def test_ranks_that_have_made_fewer_reports_than_a_failed_one_may_make_as_many() -> None:
    assembly = assembly_of(3)
    for rank in (0, 1):
        note(assembly, rank, 1)
        note(assembly, rank, 2)
    bring(assembly, 0, 3, "model")
    note(assembly, 1, 3)
    deliver(assembly, 0, 3, "model")
    assembly.ended(1)
    assert assembly.expected({1}, (), 1.0) == {2: 0}, "rank 0 has made as many reports"
    note(assembly, 1, 6)
    assert assembly.expected({1}, (), 1.0) == {0: 3, 2: 0}
    assert assembly.expected({1, 2}, (), 1.0) == {}, "rank 2 has not made that report"
    assembly.ended(2)
    assert assembly.expected({1}, (), 1.0) == {0: 3}


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_ranks_that_have_never_reported_may_make_the_report_of_a_failed_one(rank: int, other: int) -> None:
    assembly = assembly_of(2)
    note(assembly, other, 1)
    assert assembly.expected({other}, (), 1.0) == {rank: 0}
    assembly.finished(rank, 0.0)
    assert assembly.expected({other}, (), 1.0) == {}


def test_ranks_that_had_their_time_and_never_reported_are_not_waited_for_after_a_failure() -> None:
    """Only rank 0 reports, for an hour by now, and no checkpoints."""
    assembly = assembly_of(2, running_since=0.0)
    for index in range(1, 100):
        note(assembly, 0, index, now=float(index))
    assert assembly.expected({0}, (), MISSING_RANK_S) == {1: 0}
    assert assembly.expected({0}, (), 1.0 + MISSING_RANK_S) == {}


@pytest.mark.parametrize(("rank", "pending", "seconds"), [(0, False, 60), (1, False, 5), (1, True, 60)])
def test_ranks_that_may_never_report_are_not_waited_for_long(rank: int, pending: bool, seconds: float) -> None:
    """In most scripts that report on one rank only, this is rank 0."""
    assembly = assembly_of(2)
    (bring if pending else note)(assembly, 1 - rank, 1)
    assert assembly.time_for([rank]) == seconds


def test_nobody_waits_for_more_metrics_of_ranks_that_save_no_checkpoints() -> None:
    assembly = assembly_of(2)
    for index in (1, 2, 3):
        note(assembly, 1, index)
    note(assembly, 0, 1)
    assert assembly.expected({1}, (), 1.0) == {}


def test_a_rank_that_was_storing_when_it_failed_has_not_made_that_report() -> None:
    assembly = assembly_of(2)
    for rank in (0, 1):
        bring(assembly, rank, 1, f"shard-{rank}")
    for rank in (0, 1):
        deliver(assembly, rank, 1, f"shard-{rank}")
    bring(assembly, 1, 2, "shard-1")
    assert assembly.expected({1}, (), 1.0) == {}
    assert assembly.expected({1}, {(1, 2)}, 1.0) == {0: 1}, "an uploader stores it"
    deliver(assembly, 1, 2, "shard-1")
    assert assembly.expected({1}, (), 1.0) == {0: 1}


def test_what_uploaders_bring_needs_no_rank() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "a")
    note(assembly, 1, 1)
    assert assembly.storing({1}, {(0, 1)}) == frozenset()


# -- ranks that show no sign -----------------------------------------------------------------------------------------


def test_a_silent_rank_is_written_off_in_time_with_one_notice() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model", now=5)
    assert assembly.tick(MISSING_RANK_S * 0.99) == []
    said, committed = assembly.tick(MISSING_RANK_S)
    assert isinstance(said, ShowLine)
    assert "rank 1" in said.text
    assert "missing_rank_s" in said.text
    assert isinstance(committed, Commit)


def test_the_notice_comes_once() -> None:
    assembly, said = assembly_of(2), []
    for ordinal in (1, 2):
        start = ordinal * 1000.0
        said += only(ShowLine, bring(assembly, 0, ordinal, "model", now=start))
        deliver(assembly, 0, ordinal, "model", now=start)
        said += only(ShowLine, assembly.tick(start + MISSING_RANK_S))
    assert len(said) == 1


def test_the_notice_names_only_ranks_that_are_missing() -> None:
    assembly = assembly_of(3)
    assembly.finished(1, 0.0)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    [said] = only(ShowLine, assembly.tick(MISSING_RANK_S))
    assert "without rank 2: " in said.text


def test_a_written_off_rank_that_comes_later_is_refused_with_the_reason() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    assembly.tick(MISSING_RANK_S)
    [refusal] = bring(assembly, 1, 1, "model", now=MISSING_RANK_S + 1)
    assert isinstance(refusal, Refuse)
    assert (refusal.rank, refusal.ordinal) == (1, 1)
    assert "without rank 1" in refusal.why
    assert "missing_rank_s" in refusal.why


def test_a_refused_rank_may_say_that_an_exception_took_it_out_of_report() -> None:
    """Before it heard of the refusal."""
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    assembly.tick(MISSING_RANK_S)
    assert only(Refuse, bring(assembly, 1, 1, "model"))
    assert stored(assembly, 1, 1, [], [], MISSING_RANK_S, "TimeoutError('alarm')") == []
    bring(assembly, 0, 2, "model", now=MISSING_RANK_S)
    bring(assembly, 1, 2, "model", now=MISSING_RANK_S)
    deliver(assembly, 1, 2, skipped=["model"])
    assert the_commit(deliver(assembly, 0, 2, "model")).ordinal == 2


# -- metrics and contents --------------------------------------------------------------------------------------------


def test_the_metrics_are_rank_0s() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "b", loss=1.0)
    bring(assembly, 0, 1, "a", loss=0.0)
    deliver(assembly, 1, 1, "b")
    assert the_commit(deliver(assembly, 0, 1, "a")).metrics == {"loss": 0.0}


def test_the_metrics_are_rank_0s_when_it_brings_no_checkpoint() -> None:
    assembly = assembly_of(2)
    note(assembly, 0, 1, loss=0.0)
    bring(assembly, 1, 1, "b", loss=1.0)
    assert the_commit(deliver(assembly, 1, 1, "b")).metrics == {"loss": 0.0}


def test_the_metrics_are_the_lowest_ranks_when_rank_0_never_reported() -> None:
    assembly = assembly_of(2)
    assembly.finished(0, 0.0)
    bring(assembly, 1, 1, "b", loss=1.0)
    assert the_commit(deliver(assembly, 1, 1, "b")).metrics == {"loss": 1.0}


def test_different_contents_give_one_notice() -> None:
    assembly, said = assembly_of(2), []
    for ordinal in (1, 2):
        for rank in (0, 1):
            bring(assembly, rank, ordinal, "model")
        deliver(assembly, 0, ordinal, "model", crc=1)
        said += only(ShowLine, deliver(assembly, 1, ordinal, skipped=["model"], crc=2))
    [notice] = said
    assert "'model'" in notice.text


def test_different_contents_are_noticed_also_when_both_were_copied() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "model")
    assembly.tick(PATIENCE_S)
    deliver(assembly, 1, 1, "model", crc=2, now=2)
    bring(assembly, 0, 1, "model", now=3)
    assert len(only(ShowLine, deliver(assembly, 0, 1, "model", crc=1, now=4))) == 1


@pytest.mark.parametrize(("path", "notices"), [("dict.pkl", 0), ("best/model.keras", 0), ("keras", 1)])
def test_files_that_always_differ_are_not_compared(path: str, notices: int) -> None:
    assembly = CheckpointAssembly(2, CheckpointConfig(), incomparable=("dict.pkl", ".keras"))
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
    assert dropped == Drop(1)
    for rank in range(3):
        assert only(Refuse, bring(assembly, rank, 2, "model")) == []


# -- when to look again ----------------------------------------------------------------------------------------------


def test_the_first_deadline_is_the_end_of_patience() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "model", now=5)
    assert assembly.deadline() == 5 + PATIENCE_S


def test_then_comes_the_deadline_of_missing_ranks() -> None:
    assembly = assembly_of(2)
    note(assembly, 1, 1)
    note(assembly, 0, 1)
    bring(assembly, 0, 2, "model", now=5)
    assert assembly.deadline() == 5 + MISSING_RANK_S


def test_a_deadline_that_was_looked_at_is_over() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    assembly.tick(MISSING_RANK_S)
    assert assembly.deadline() is None


def test_a_deadline_that_nobody_looked_at_is_not_forgotten() -> None:
    """However long the loop was busy with something else."""
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "model", now=0)
    assert assembly.deadline() == PATIENCE_S
    assert assembly.deadline() == PATIENCE_S  # still, as no tick came
    assert len(assembly.tick(PATIENCE_S + 5)) == 1


# -- many ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_file", [False, True])
def test_the_time_for_a_checkpoint_is_proportional_to_the_number_of_ranks(*, same_file: bool) -> None:
    """If each event looked at all ranks, this would take minutes."""
    world_size = 10_000
    assembly = assembly_of(world_size)
    ranks = random.Random(1).sample(range(world_size), world_size)
    began = time.process_time()
    for ordinal in (1, 2):
        ordered: list[RequestFiles] = []
        for rank in ranks:
            ordered += only(RequestFiles, bring(assembly, rank, ordinal, "model" if same_file else f"shard-{rank}"))
            assembly.deadline()
        ordered += only(RequestFiles, assembly.tick(PATIENCE_S * ordinal))
        assert len(ordered) == world_size
        done = [deliver(assembly, order.rank, ordinal, *order.files) for order in ordered]
        assert len(the_commit(done[-1]).files) == (1 if same_file else world_size)
    assert time.process_time() - began < 10


def test_the_time_for_parts_that_wait_for_a_rank_is_proportional_to_their_number() -> None:
    world_size, n = 4000, MOST_UNCOMMITTED + 1
    assembly = assembly_of(world_size, running_since=0.0)
    run_ahead(assembly, n)
    began = time.process_time()
    for rank in range(1, world_size - 1):
        for index in range(1, n):
            note(assembly, rank, index)
        assert only(RequestFiles, bring(assembly, rank, n, f"shard-{rank}")) == []
        assembly.deadline()
    assert len(only(RequestFiles, assembly.tick(MISSING_RANK_S))) == world_size - 1
    assert time.process_time() - began < 5


# -- any order of events ---------------------------------------------------------------------------------------------

FILES = ("a", "b", "c")


@dataclass
class Oracle:
    """By number of the report: the files that a rank has brought; None for a report without a checkpoint."""

    brought: dict[int, frozenset[str] | None] = field(default_factory=dict)
    granted: dict[int, tuple[str, ...]] = field(default_factory=dict)
    delivered: set[int] = field(default_factory=set)
    finished: bool = False

    @property
    def unstored(self) -> set[int]:
        return {n for n, files in self.brought.items() if files is not None} - self.delivered


class JoiningMachine(RuleBasedStateMachine):
    """Ranks announce, deliver and finish in any order; each report has a checkpoint or none."""

    @initialize(world_size=st.integers(1, 4))
    def begin(self, world_size: int) -> None:
        self.assembly = CheckpointAssembly(world_size, CheckpointConfig(missing_rank_s=1e6))
        self.ranks = [Oracle() for _ in range(world_size)]
        for rank in range(world_size):
            self.assembly.running(rank, 0.0)
        self.committed: list[int] = []
        self.now = 0.0

    def _obey(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case RequestFiles(rank, ordinal, files):
                    brought = self.ranks[rank].brought[ordinal]
                    assert brought is not None
                    assert ordinal not in self.ranks[rank].granted
                    assert set(files) <= brought
                    self.ranks[rank].granted[ordinal] = files
                case Refuse():
                    raise AssertionError(action)
                case Commit():
                    self._check(action)

    def _check(self, commit: Commit) -> None:
        n = commit.ordinal
        assert not self.committed or n > self.committed[-1]
        self.committed.append(n)
        self._obey(self.assembly.committed(n, self.now))
        assert all(n in oracle.brought or oracle.finished for oracle in self.ranks)
        brought = {
            rank: files for rank, oracle in enumerate(self.ranks) if (files := oracle.brought.get(n)) is not None
        }
        assert commit.ranks == tuple(brought)
        lowest: dict[str, int] = {}
        for rank, files in brought.items():
            assert n in self.ranks[rank].delivered
            for path in files:
                lowest.setdefault(path, rank)
        assert owners(commit) == lowest
        assert commit.metrics == {"n": (n, 0 if n in self.ranks[0].brought else min(brought))}

    @rule(rank=st.integers(0, 3), files=st.none() | st.frozensets(st.sampled_from(FILES)))
    def report(self, rank: int, files: frozenset[str] | None) -> None:
        if rank >= len(self.ranks) or self.ranks[rank].unstored or self.ranks[rank].finished:
            return
        me = self.ranks[rank]
        n = len(me.brought) + 1
        me.brought[n] = files
        self._obey(reported(self.assembly, rank, n, {"n": (n, rank)}, files, self.now))

    @rule(rank=st.integers(0, 3))
    def copy(self, rank: int) -> None:
        if rank >= len(self.ranks):
            return
        me = self.ranks[rank]
        for ordinal in sorted(me.granted.keys() - me.delivered):
            me.delivered.add(ordinal)
            contents = [(path, 1, 1) for path in me.granted[ordinal]]
            self._obey(stored(self.assembly, rank, ordinal, contents, [], self.now))

    @rule(seconds=st.sampled_from((0.1, PATIENCE_S, PATIENCE_S)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._obey(self.assembly.tick(self.now))

    @rule(rank=st.integers(0, 3))
    def finish(self, rank: int) -> None:
        if rank < len(self.ranks) and not self.ranks[rank].unstored and not self.ranks[rank].finished:
            self.ranks[rank].finished = True
            self._obey(self.assembly.finished(rank, self.now))

    def teardown(self) -> None:
        """Every rank stores what is left to it and finishes; then nothing may be left uncommitted."""
        if not hasattr(self, "ranks"):
            return
        brought = {n for oracle in self.ranks for n, files in oracle.brought.items() if files is not None}
        for _ in range(2 * len(self.ranks) * (len(brought) + 1)):  # a checkpoint may take two rounds
            self.wait(PATIENCE_S)
            for rank in range(len(self.ranks)):
                self.copy(rank)
                self.finish(rank)
        assert self.committed == sorted(brought)


TestJoining = JoiningMachine.TestCase
TestJoining.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


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
        self.assembly = CheckpointAssembly(world_size, config, silent=self.written_off)
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

    def _obey(self, actions: list[Action]) -> None:
        for rank, life in enumerate(self.ranks):
            if self.assembly._ranks[rank].silent and rank not in self.written_off:
                assert life.trains
                assert not life.brought
                assert self.now >= max(life.entered_at, self.first_part_at) + MISSING_RANK_S
                self.written_off.add(rank)
        for action in actions:
            match action:
                case RequestFiles(rank, ordinal, _):
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
        self._obey(stored(self.assembly, rank, ordinal, [(f"shard-{rank}", 1, 1)], [], self.now))

    def end(self, rank: int) -> None:
        if (life := self.living(rank)) is None or self.chance.random() < 0.5:
            return
        if self.chance.random() < 0.5:
            life.died = True
            self.assembly.ended(rank)
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


@pytest.mark.parametrize(("order", "best"), [("min", [1, 2, 0]), ("max", [0, 2, 1])])
def test_best_first_by_score(order: str, best: list[int]) -> None:
    assert best_first(losses(3, 1, 2), keeping(None, order=order)) == best


def test_without_a_score_the_newest_is_the_best() -> None:
    assert best_first(losses(1, 2, 3), keeping(None, None)) == [2, 1, 0]


def test_of_equal_scores_the_newer_is_better() -> None:
    assert best_first(losses(1, 1, 1), keeping(None)) == [2, 1, 0]


@pytest.mark.parametrize("order", ["min", "max"])
@pytest.mark.parametrize("bad", [math.nan, None, "text", True, {"nested": 1}])
def test_a_score_that_is_no_number_is_worst_in_either_order(bad: object, order: str) -> None:
    assert best_first(losses(1, bad, 2), keeping(None, order=order))[-1] == 1


@pytest.mark.parametrize("order", ["min", "max"])
def test_a_missing_score_is_worst_in_either_order(order: str) -> None:
    assert best_first([{"loss": 1}, {}, {"loss": 2}], keeping(None, order=order))[-1] == 1


def test_a_slash_looks_into_nested_metrics() -> None:
    metrics = [{"eval": {"loss": 2}}, {"eval": {"loss": 1}}, {"eval": 0}]
    assert best_first(metrics, keeping(None, "eval/loss")) == [1, 0, 2]


def test_a_slash_may_be_a_part_of_the_name() -> None:
    assert best_first([{"eval/loss": 1}, {"eval/loss": 2}], keeping(None, "eval/loss")) == [0, 1]


def test_an_integer_beyond_floats_is_a_score_too() -> None:
    assert best_first(losses(10**400, 1), keeping(None)) == [1, 0]


def test_without_a_number_everything_is_kept() -> None:
    assert surplus(losses(1, 2, 3), keeping(None)) == []


def test_surplus_spares_the_best() -> None:
    assert surplus(losses(3, 1, 2, 0), keeping(2)) == [0, 2]


def test_surplus_spares_the_latest_although_it_is_the_worst() -> None:
    assert surplus(losses(1, 2, 3), keeping(1)) == [1]


def test_surplus_without_a_score_keeps_the_newest() -> None:
    assert surplus(losses(1, 2, 3), keeping(2, None)) == [0]


@pytest.mark.parametrize(("doubtful", "deleted"), [({2, 3}, [0, 2]), ({0, 1, 2}, [0, 1, 2]), ({0, 1, 2, 3}, [0, 1, 2])])
def test_surplus_spares_a_complete_one_rather_than_one_that_may_lack_ranks(
    doubtful: set[int], deleted: list[int]
) -> None:
    assert surplus(losses(1, 2, 3, 4), keeping(1, None), doubtful) == deleted


def test_fewer_than_the_number_are_all_kept() -> None:
    assert surplus(losses(1), keeping(3)) == []
    assert surplus([], keeping(1)) == []
