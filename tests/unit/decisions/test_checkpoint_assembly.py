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
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from distrain.api.config import CheckpointConfig
from distrain.decisions.checkpoint_assembly import (
    PATIENCE_S,
    Action,
    CheckpointAssembly,
    Drop,
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
    absent: Sequence[int] = (),
    silent: Sequence[int] = (),
) -> CheckpointAssembly:
    """All ranks are in train_func. ``ranks``: those that bring checkpoints, as the user says."""
    config = CheckpointConfig(missing_rank_s=MISSING_RANK_S, checkpoint_ranks=ranks)
    assembly = CheckpointAssembly(world_size, config, absent=absent, silent=silent)
    for rank in range(world_size):
        assembly.running(rank, running_since)
    return assembly


def bring(
    assembly: CheckpointAssembly,
    rank: int,
    ordinal: int,
    *files: str,
    index: int | None = None,
    now: float = 0.0,
    **metrics: Any,
) -> list[Action]:
    """report() with a checkpoint; by default the rank reports nothing else, so index and ordinal agree."""
    return assembly.reported(rank, index or ordinal, metrics, ordinal, files, now)


def note(assembly: CheckpointAssembly, rank: int, index: int, now: float = 0.0, **metrics: Any) -> list[Action]:
    """report() without a checkpoint."""
    return assembly.reported(rank, index, metrics, None, (), now)


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
    return assembly.stored(rank, ordinal, *contents, now)


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
    assert assembly.reported(0, 1, {}, 1, (), 0.0, "/run/a") == []
    assert assembly.reported(2, 1, {}, 1, (), 0.0, "/run/a") == []
    assert note(assembly, 1, 1) == [RequestFiles(0, 1, ())]
    assert owners(the_commit(deliver(assembly, 0, 1, "a", "b"))) == {"a": 0, "b": 0}


@pytest.mark.parametrize(("other", "named"), [("/run/b", "/run/b"), ("", "files to copy")])
def test_a_checkpoint_whose_ranks_name_different_directories_is_dropped(other: str, named: str) -> None:
    assembly = assembly_of(2)
    assembly.reported(0, 1, {}, 1, (), 0.0, "/run/a")
    assembly.reported(1, 1, {}, 1, (), 0.0, other)
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
    assert assembly.deadline() == MISSING_RANK_S
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


@pytest.mark.parametrize("absent_before", [False, True])
def test_rank_0_only_commits_at_once_if_the_user_or_an_earlier_checkpoint_says_so(*, absent_before: bool) -> None:
    assembly = assembly_of(2, absent=[1]) if absent_before else assembly_of(2, ranks=[0])
    bring(assembly, 0, 1, "model")
    commit = the_commit(deliver(assembly, 0, 1, "model"))
    assert (commit.ranks, commit.silent) == ((0,), ())


def test_a_rank_that_was_silent_before_and_is_again_may_still_bring_something() -> None:
    assembly = assembly_of(2, absent=[1], silent=[1])
    bring(assembly, 0, 1, "model")
    assert the_commit(deliver(assembly, 0, 1, "model")).silent == (1,)
    note(assembly, 1, 2)
    bring(assembly, 0, 2, "model")
    assert the_commit(deliver(assembly, 0, 2, "model")).silent == (1,)
    bring(assembly, 0, 3, "model")
    note(assembly, 1, 3)
    assert the_commit(deliver(assembly, 0, 3, "model")).silent == ()


@pytest.mark.parametrize("ranks", [[0, 1], "all"])
def test_ranks_that_bring_checkpoints_as_the_user_says_are_waited_for(ranks: list[int] | Literal["all"]) -> None:
    assembly = assembly_of(2, ranks=ranks)
    bring(assembly, 0, 1, "shard-0")
    deliver(assembly, 0, 1, "shard-0")
    note(assembly, 1, 1)
    [said] = assembly.tick(2 * MISSING_RANK_S)
    assert isinstance(said, ShowLine)
    assert "checkpoint_000000 of rank 0 is not complete: rank 1 has not reported one yet." in said.text
    bring(assembly, 1, 1, "shard-1", index=2)
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
    assert (
        "not complete: rank 1 has to wait for the files of a checkpoint to read. It" in only(ShowLine, actions)[0].text
    )
    actions += [*assembly.fetched(1, 1000.0), *assembly.tick(999.0 + MISSING_RANK_S)]
    assert not only(Commit, actions)
    bring(assembly, 1, 1, "b", now=1059.0)
    assert the_commit(deliver(assembly, 1, 1, "b", now=1060.0)).ranks == (0, 1)


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


def test_ranks_that_come_into_step_later_release_the_checkpoint() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    assert deliver(assembly, 0, 1, "model") == []
    assert the_commit(note(assembly, 1, 1, now=2)).ranks == (0,)


def test_a_rank_that_was_ahead_is_not_waited_for_once_the_others_have_made_as_many_reports() -> None:
    assembly = assembly_of(2, running_since=0.0)
    for index in (1, 2, 3, 4):
        note(assembly, 1, index)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    assert not only(Commit, note(assembly, 0, 2)), "it may make more reports than rank 0"
    commit = the_commit(note(assembly, 0, 3))
    assert (commit.ranks, commit.silent) == ((0,), ())


def test_a_rank_in_step_may_run_ahead_while_the_others_copy() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    for index in (1, 2, 3):
        note(assembly, 1, index, now=index)
    assert the_commit(deliver(assembly, 0, 1, "model", now=4)).ranks == (0,)


def test_a_rank_that_has_reported_is_waited_for_although_the_others_go_on() -> None:
    """Only ranks that have never reported are written off then; this one is one step behind."""
    assembly = assembly_of(2)
    for rank in (0, 1):
        note(assembly, rank, 1)
    bring(assembly, 0, 1, "shard-0", index=2)
    deliver(assembly, 0, 1, "shard-0")
    note(assembly, 0, 3, now=1)
    assert only(Refuse, bring(assembly, 1, 1, "shard-1", index=2, now=1.1)) == []
    assert the_commit(deliver(assembly, 1, 1, "shard-1", now=1.2)).ranks == (0, 1)


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
    assert assembly.stored(1, 1, [], [], 4, failed="no") == [RequestFiles(0, 1, ("model",))]


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
    assert assembly.deadline() == 200.0 + MISSING_RANK_S
    assert assembly.tick(199.0 + MISSING_RANK_S) == []
    assert the_commit(assembly.tick(200.0 + MISSING_RANK_S)).ranks == (0,)


def test_a_silent_rank_that_reports_after_all_is_waited_for_again() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "shard-0")
    deliver(assembly, 0, 1, "shard-0")
    the_commit(assembly.tick(MISSING_RANK_S))
    bring(assembly, 0, 2, "shard-0", now=61)
    assert only(Refuse, bring(assembly, 1, 2, "shard-1", index=1, now=61)) == []
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
            "checkpoint_000000 to checkpoint_000001 are dropped: the attempt ended before rank 2 had reported one, so "
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
    assert not assembly.awaits_only({(0, 1)}, 0), "rank 1 has not said what it brings"
    bring(assembly, 1, 1, "shard-1")
    assert not assembly.awaits_only({(0, 1)}, 0), "nobody is bringing the files of rank 1"
    assert assembly.awaits_only({(0, 1), (1, 1)}, 0)
    deliver(assembly, 0, 1, "shard-0")
    assert assembly.awaits_only({(1, 1)}, 0)
    assert the_commit(deliver(assembly, 1, 1, "shard-1")).ranks == (0, 1)
    assert not assembly.awaits_only(set(), 0)


# -- calls of report() that fail ---------------------------------------------------------------------------------------


def test_a_checkpoint_whose_report_has_failed_on_a_rank_is_dropped_and_the_next_one_is_whole() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "shard-0")
    deliver(assembly, 0, 1, "shard-0")
    said, dropped = assembly.failed(1, 1, 1, "TypeError: a metric", 0.0)
    assert said == ShowLine("checkpoint_000000 is dropped, as report() has failed on rank 1: TypeError: a metric")
    assert dropped == Drop(1)
    for rank in (0, 1):
        bring(assembly, rank, 2, f"shard-{rank}")
        actions = deliver(assembly, rank, 2, f"shard-{rank}")
    assert the_commit(actions).ranks == (0, 1)


def test_a_report_that_has_failed_on_all_ranks_is_dropped() -> None:
    assembly = assembly_of(2)
    assert assembly.failed(0, 1, 1, "no", 0.0) == []
    assert Drop(1) in assembly.failed(1, 1, 1, "no", 0.0)


def test_a_report_without_a_checkpoint_that_has_failed_is_in_step() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    assert the_commit(assembly.failed(1, 1, None, "no", 0.0)).silent == ()


def test_a_part_that_an_exception_kept_from_being_sent_is_missing() -> None:
    assembly = assembly_of(2)
    for ordinal in (1, 2):
        bring(assembly, 0, ordinal, "shard-0")
        deliver(assembly, 0, ordinal, "shard-0")
    assert Drop(1) in bring(assembly, 1, 2, "shard-1")
    assert the_commit(deliver(assembly, 1, 2, "shard-1")).ordinal == 2


def test_ranks_that_name_a_checkpoint_differently_are_told_so() -> None:
    assembly = assembly_of(3)
    assembly.reported(0, 1, {}, 1, ["a"], 0.0, name="step-1")
    assembly.reported(1, 1, {}, 1, ["b"], 0.0)
    [refusal] = only(Refuse, assembly.reported(2, 1, {}, 1, ["c"], 0.0, name="step-2"))
    assert refusal.why == (
        "checkpoint_000000: checkpoint_dir_name is 'step-1' on rank 0 and 'step-2' on rank 2; the ranks are not at the "
        "same step, or must give one name"
    )
    deliver(assembly, 0, 1, "a")
    assert Drop(1) in deliver(assembly, 1, 1, "b")


# -- what is still being stored when a rank fails ----------------------------------------------------------------------


def test_a_checkpoint_needs_nothing_more_from_a_rank_that_has_reported_without_one() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    assert assembly.storing({1}, (), 0.0) == frozenset(), "rank 1 has not made that report"
    note(assembly, 1, 1)
    assert assembly.storing({1}, (), 0.0) == {(0, 1)}
    assert assembly.storing({0, 1}, (), 0.0) == frozenset(), "nobody is left to store it"
    deliver(assembly, 0, 1, "model")
    assert assembly.storing({1}, (), 0.0) == frozenset()


def test_a_checkpoint_needs_nothing_more_from_a_rank_that_has_delivered() -> None:
    assembly = assembly_of(3)
    for rank in range(3):
        bring(assembly, rank, 1, f"shard-{rank}")
    assert assembly.storing({1}, (), 0.0) == frozenset(), "rank 1 has not stored its own part"
    deliver(assembly, 1, 1, "shard-1")
    assert assembly.storing({1}, (), 0.0) == {(0, 1), (2, 1)}
    assembly.stored(2, 1, [], [], 0.0, "disk full")
    assert assembly.storing({1}, (), 0.0) == frozenset(), "it will be dropped"


def test_nobody_waits_for_a_checkpoint_after_one_that_cannot_be() -> None:
    assembly = assembly_of(3)
    bring(assembly, 2, 1, "shard-2")
    for rank in (0, 1):
        bring(assembly, rank, 1, f"shard-{rank}")
        deliver(assembly, rank, 1, f"shard-{rank}")
        bring(assembly, rank, 2, f"shard-{rank}")
    deliver(assembly, 1, 2, "shard-1")
    assert assembly.storing({1}, (), 0.0) == {(2, 1), (0, 2)}
    assert assembly.storing({2}, (), 0.0) == frozenset()


def test_a_rank_that_brings_checkpoints_is_due_with_the_next_after_another_one_has_failed() -> None:
    assembly = assembly_of(3)
    for rank in (0, 1):
        note(assembly, rank, 1)
        note(assembly, rank, 2)
    bring(assembly, 0, 1, "model", index=3)
    note(assembly, 1, 3)
    deliver(assembly, 0, 1, "model")
    assert assembly.expected({1}, ()) == frozenset(), "rank 0 has made as many reports"
    note(assembly, 1, 4)
    assert assembly.expected({1}, ()) == {0}
    assert assembly.expected({1, 2}, ()) == frozenset(), "rank 2 has not made that report"
    note(assembly, 1, 6)
    assert assembly.expected({1}, ()) == frozenset(), "they are not in step"


@pytest.mark.parametrize(("rank", "other", "due"), [(0, 1, True), (1, 0, False)])
def test_of_the_ranks_that_have_never_reported_only_rank_0_is_due(rank: int, other: int, *, due: bool) -> None:
    assembly = assembly_of(2)
    note(assembly, other, 1)
    assert assembly.expected({other}, ()) == (frozenset({rank}) if due else frozenset())
    assembly.finished(rank, 0.0)
    assert assembly.expected({other}, ()) == frozenset()


def test_a_rank_that_was_storing_when_it_failed_has_not_made_that_report() -> None:
    assembly = assembly_of(2)
    for rank in (0, 1):
        bring(assembly, rank, 1, f"shard-{rank}")
    for rank in (0, 1):
        deliver(assembly, rank, 1, f"shard-{rank}")
    bring(assembly, 1, 2, "shard-1")
    assert assembly.expected({1}, ()) == frozenset()
    assert assembly.expected({1}, {(1, 2)}) == {0}, "an uploader stores it"
    deliver(assembly, 1, 2, "shard-1")
    assert assembly.expected({1}, ()) == {0}


def test_what_uploaders_bring_needs_no_rank() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "a")
    note(assembly, 1, 1)
    assert assembly.storing({1}, {(0, 1)}, 0.0) == frozenset()


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
    assert assembly.stored(1, 1, [], [], MISSING_RANK_S, "TimeoutError('alarm')") == []
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
    assert (refusal.rank, refusal.why.startswith(f"checkpoint_000000: {why}; give them different names")) == (2, True)
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
    bring(assembly, 0, 1, "model", now=5)
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


# -- any order of events ---------------------------------------------------------------------------------------------

FILES = ("a", "b", "c")
STEPS = 3


@dataclass
class Oracle:
    """By ordinal: the files and metrics that a rank has brought."""

    brought: dict[int, frozenset[str]] = field(default_factory=dict)
    granted: dict[int, tuple[str, ...]] = field(default_factory=dict)
    delivered: set[int] = field(default_factory=set)
    index: int = 0
    finished: bool = False

    @property
    def busy(self) -> bool:
        return len(self.delivered) < len(self.brought)


class JoiningMachine(RuleBasedStateMachine):
    """Ranks announce, deliver and finish in any order. ``in_step``: nobody starts report n+1 before all sent report n,
    as training with collectives has it; then every checkpoint is committed. Else latecomers may be refused."""

    @initialize(world_size=st.integers(1, 4), in_step=st.booleans())
    def begin(self, world_size: int, in_step: bool) -> None:
        self.assembly = CheckpointAssembly(world_size, CheckpointConfig(missing_rank_s=1e6))
        self.ranks = [Oracle() for _ in range(world_size)]
        for rank in range(world_size):
            self.assembly.running(rank, 0.0)
        self.in_step = in_step
        self.committed = 0
        self.now = 0.0

    def may_report(self, rank: int) -> bool:
        me = self.ranks[rank]
        ahead = self.in_step and any(other.index < me.index for other in self.ranks)
        return not (me.busy or me.finished or ahead) and len(me.brought) < STEPS

    def _obey(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case RequestFiles(rank, ordinal, files):
                    assert ordinal not in self.ranks[rank].granted
                    assert set(files) <= self.ranks[rank].brought[ordinal]
                    self.ranks[rank].granted[ordinal] = files
                case Refuse(rank, _, _):
                    assert not self.in_step
                    self.ranks[rank].finished = True  # its report() raised
                case Commit():
                    self._check(action)

    def _check(self, commit: Commit) -> None:
        self.committed += 1
        assert commit.ordinal == self.committed
        bringers = [rank for rank, oracle in enumerate(self.ranks) if commit.ordinal in oracle.brought]
        assert commit.ranks == tuple(bringers)
        lowest: dict[str, int] = {}
        for rank in bringers:
            assert commit.ordinal in self.ranks[rank].delivered
            for path in self.ranks[rank].brought[commit.ordinal]:
                lowest.setdefault(path, rank)
        assert owners(commit) == lowest

    @rule(rank=st.integers(0, 3), files=st.frozensets(st.sampled_from(FILES)), metrics_only=st.booleans())
    def report(self, rank: int, files: frozenset[str], metrics_only: bool) -> None:
        if rank >= len(self.ranks) or not self.may_report(rank):
            return
        me = self.ranks[rank]
        me.index += 1
        if metrics_only and not self.in_step:
            self._obey(self.assembly.reported(rank, me.index, {}, None, (), self.now))
            return
        ordinal = len(me.brought) + 1
        if ordinal > self.committed:
            me.brought[ordinal] = files
        self._obey(self.assembly.reported(rank, me.index, {}, ordinal, files, self.now))

    @rule(rank=st.integers(0, 3))
    def copy(self, rank: int) -> None:
        if rank >= len(self.ranks):
            return
        me = self.ranks[rank]
        for ordinal in sorted(me.granted.keys() - me.delivered):
            me.delivered.add(ordinal)
            contents = [(path, 1, 1) for path in me.granted[ordinal]]
            self._obey(self.assembly.stored(rank, ordinal, contents, [], self.now))

    @rule(seconds=st.sampled_from((0.1, PATIENCE_S, PATIENCE_S)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._obey(self.assembly.tick(self.now))

    @precondition(lambda self: not self.in_step)
    @rule(rank=st.integers(0, 3))
    def finish(self, rank: int) -> None:
        if rank < len(self.ranks) and not self.ranks[rank].busy and not self.ranks[rank].finished:
            self.ranks[rank].finished = True
            self._obey(self.assembly.finished(rank, self.now))

    def teardown(self) -> None:
        """Every rank brings what is left to it and finishes; then nothing may be left uncommitted."""
        if not hasattr(self, "ranks"):
            return
        for _ in range(2 * STEPS + 1):  # a checkpoint may take two rounds
            self.wait(PATIENCE_S)
            for rank in range(len(self.ranks)):
                self.copy(rank)
            if self.in_step:
                for rank in range(len(self.ranks)):
                    self.report(rank, frozenset("a"), metrics_only=False)
        for rank, oracle in enumerate(self.ranks):
            oracle.finished = True
            self._obey(self.assembly.finished(rank, self.now))
        brought = {ordinal for oracle in self.ranks for ordinal in oracle.brought}
        assert self.committed == len(brought)
        if self.in_step:
            assert self.committed == STEPS


TestJoining = JoiningMachine.TestCase
TestJoining.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


# -- any order of starts, reports and deaths -------------------------------------------------------------------------


@dataclass
class Life:
    """A rank as the world sees it. ``brings``: its reports have checkpoints."""

    brings: bool
    entered_at: float = math.inf
    reports: int = 0
    unstored: set[int] = field(default_factory=set)
    finished: bool = False
    died: bool = False

    @property
    def trains(self) -> bool:
        return self.entered_at < math.inf and not (self.finished or self.died)


class World:
    """Ranks start, report, store, finish and die in any order, with any time in between.

    A checkpoint may lack only ranks that are known to bring nothing, and those that were alive in train_func for
    ``missing_rank_s`` after its last part.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.committed = 0
        self.last_part: dict[int, float] = {}
        world_size = chance.randint(2, 4)
        self.ranks = [Life(chance.random() < 0.7) for _ in range(world_size)]
        silent = {rank for rank, life in enumerate(self.ranks) if not life.brings}
        declares = chance.random() < 0.2 and len(silent) < world_size
        self.known = {rank for rank in silent if declares or chance.random() < 0.2}
        bringing = sorted(set(range(world_size)) - silent) if declares else None
        config = CheckpointConfig(missing_rank_s=MISSING_RANK_S, checkpoint_ranks=bringing)
        self.assembly = CheckpointAssembly(world_size, config, absent=self.known)
        for rank in range(world_size):
            if chance.random() < 0.7:
                self.enter(rank)

    def live(self) -> None:
        """Do something at random, again and again, and end the attempt."""
        for _ in range(self.chance.randint(5, 40)):
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
        for action in actions:
            match action:
                case Refuse(rank, ordinal, _):
                    self.ranks[rank].unstored.discard(ordinal)
                case Commit():
                    self._check(action)

    def _check(self, commit: Commit) -> None:
        self.committed += 1
        assert commit.ordinal == self.committed
        for rank, life in enumerate(self.ranks):
            if rank in commit.ranks:
                assert commit.ordinal not in life.unstored
                continue
            long_since = self.last_part[commit.ordinal] + MISSING_RANK_S
            was_silent = life.trains and self.now >= max(life.entered_at + MISSING_RANK_S, long_since)
            if was_silent:
                self.known.add(rank)
            in_step = life.reports > 0 and not life.brings
            assert was_silent or in_step or life.finished or rank in self.known
            assert rank in commit.silent or in_step or life.finished or rank in self.known

    def enter(self, rank: int) -> None:
        if self.ranks[rank].entered_at == math.inf:
            self.ranks[rank].entered_at = self.now
            self._obey(self.assembly.running(rank, self.now))

    def report(self, rank: int) -> None:
        if (life := self.living(rank)) is None:
            return
        life.reports += 1
        ordinal = life.reports if life.brings else None
        if ordinal is not None and ordinal > self.committed:
            life.unstored.add(ordinal)
            self.last_part[ordinal] = self.now
            self.known.discard(rank)
        self._obey(self.assembly.reported(rank, life.reports, {}, ordinal, [f"shard-{rank}"], self.now))
        if self.chance.random() < 0.7:
            self.store(rank)

    def store(self, rank: int) -> None:
        if (life := self.living(rank)) is None or not life.unstored:
            return
        ordinal = min(life.unstored)
        life.unstored.discard(ordinal)
        self._obey(self.assembly.stored(rank, ordinal, [(f"shard-{rank}", 1, 1)], [], self.now))

    def end(self, rank: int) -> None:
        if (life := self.living(rank)) is None or self.chance.random() < 0.5:
            return
        if self.chance.random() < 0.5:
            life.died = True
            self.assembly.ended(rank)
        elif not life.unstored:
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
