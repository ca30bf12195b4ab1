"""Joining the checkpoints of N ranks: who copies what, when it is committed, and who is told what."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from distrain.config import CheckpointConfig
from distrain.decisions.checkpoint_assembly import (
    FIRST_PATIENCE_S,
    FIRST_REPORT_TIMEOUT_S,
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
    from collections.abc import Iterable

MISSING_RANK_S = 60.0


def assembly_of(world_size: int, *, running_since: float = -FIRST_REPORT_TIMEOUT_S) -> CheckpointAssembly:
    """By default every rank has been in train_func long enough to have reported."""
    assembly = CheckpointAssembly(world_size, CheckpointConfig(missing_rank_s=MISSING_RANK_S))
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
    assert deliver(assembly, 0, 1, "a", "b") == [Commit(1, files, (0,), {"loss": 0.5})]


def test_metrics_alone_decide_nothing() -> None:
    assert note(assembly_of(2), 0, 1) == []


def test_an_empty_checkpoint_is_committed() -> None:
    assembly = assembly_of(1)
    assert bring(assembly, 0, 1) == [RequestFiles(0, 1, ())]
    assert the_commit(deliver(assembly, 0, 1)).files == ()


def test_nothing_is_committed_before_it_is_delivered() -> None:
    assembly = assembly_of(1)
    bring(assembly, 0, 1, "a")
    assert assembly.tick(1e6) == []


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


def test_rank_0_only_commits_when_rank_0_goes_on() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    assert deliver(assembly, 0, 1, "model") == []
    assert the_commit(bring(assembly, 0, 2, "model", now=1)).ordinal == 1


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
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    bring(assembly, 0, 2, "model", now=1)
    assert the_commit(deliver(assembly, 0, 2, "model", now=1)).ordinal == 2


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
    actions += [*assembly.fetched(1, 1000.0), *assembly.tick(1000.0 + FIRST_REPORT_TIMEOUT_S / 2)]
    assert not only(Commit, actions)
    bring(assembly, 1, 1, "b", now=1006.0)
    assert the_commit(deliver(assembly, 1, 1, "b", now=1007.0)).ranks == (0, 1)


def test_a_rank_that_has_brought_a_part_of_the_last_checkpoint_is_not_taken_for_one_that_brings_none() -> None:
    assembly = CheckpointAssembly(2, CheckpointConfig(missing_rank_s=MISSING_RANK_S), brought_last=[0, 1])
    for rank in range(2):
        assembly.running(rank, 0.0)
    bring(assembly, 0, 1, "a")
    deliver(assembly, 0, 1, "a")
    actions = [*note(assembly, 0, 2, now=20.0), *assembly.tick(30.0), *assembly.close(40.0)]
    assert not only(Commit, actions)
    assert the_commit(assembly.tick(MISSING_RANK_S)).ranks == (0,)


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_end_of_an_attempt_writes_off_no_rank_that_had_to_wait_for_files(goes_on: bool) -> None:
    assembly = assembly_of(2)
    assembly.fetching(1)
    if goes_on:
        assembly.fetched(1, 0.0)
    bring(assembly, 0, 1, "a")
    actions = [*deliver(assembly, 0, 1, "a"), *note(assembly, 0, 2), *assembly.close(FIRST_REPORT_TIMEOUT_S / 2)]
    assert not only(Commit, actions)


def test_rank_0_only_says_nothing_about_it() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    assert only(ShowLine, note(assembly, 0, 2, now=1)) == []


# -- some ranks ------------------------------------------------------------------------------------------------------


def test_ranks_1_and_3_only() -> None:
    assembly = assembly_of(4)
    bring(assembly, 1, 1, "shard-1")
    bring(assembly, 3, 1, "shard-3")
    assert only(RequestFiles, assembly.tick(FIRST_PATIENCE_S)) == [
        RequestFiles(1, 1, ("shard-1",)),
        RequestFiles(3, 1, ("shard-3",)),
    ]
    deliver(assembly, 1, 1, "shard-1", now=2)
    assert deliver(assembly, 3, 1, "shard-3", now=2) == []
    assert only(Commit, note(assembly, 1, 2, now=3)) == []
    commit = the_commit(note(assembly, 3, 2, now=3))
    assert owners(commit) == {"shard-1": 1, "shard-3": 3}
    assert commit.ranks == (1, 3)


def test_ranks_that_share_nothing_keep_all_their_files() -> None:
    assembly = assembly_of(2)
    assert bring(assembly, 0, 1, "shard-0") == [RequestFiles(0, 1, ("shard-0",))]
    assert bring(assembly, 1, 1, "shard-1") == [RequestFiles(1, 1, ("shard-1",))]
    deliver(assembly, 0, 1, "shard-0")
    assert owners(the_commit(deliver(assembly, 1, 1, "shard-1"))) == {"shard-0": 0, "shard-1": 1}


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


def test_a_rank_copies_what_only_it_has() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model")
    assert bring(assembly, 1, 1, "model", "rng-1") == [RequestFiles(1, 1, ("rng-1",))]


def test_rank_1_waits_for_rank_0_and_is_then_spared_the_copy() -> None:
    assembly = assembly_of(2)
    assert bring(assembly, 1, 1, "model") == []
    assert bring(assembly, 0, 1, "model", now=FIRST_PATIENCE_S / 2) == [
        RequestFiles(0, 1, ("model",)),
        RequestFiles(1, 1, ()),
    ]


def test_rank_1_waits_no_longer_than_its_patience() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "model")
    assert assembly.tick(FIRST_PATIENCE_S * 0.99) == []
    assert assembly.tick(FIRST_PATIENCE_S) == [RequestFiles(1, 1, ("model",))]


def test_rank_1_waits_longer_for_what_rank_0_brought_last_time() -> None:
    assembly = assembly_of(2)
    for rank in (0, 1):
        bring(assembly, rank, 1, "model")
    deliver(assembly, 0, 1, "model")
    deliver(assembly, 1, 1)
    assert bring(assembly, 1, 2, "model", now=100) == []
    assert assembly.tick(100 + PATIENCE_S * 0.99) == []
    assert assembly.tick(100 + PATIENCE_S) == [RequestFiles(1, 2, ("model",))]


def test_rank_1_does_not_wait_at_all_for_what_only_it_brought_last_time() -> None:
    assembly = assembly_of(2)
    for rank in (0, 1):
        bring(assembly, rank, 1, f"shard-{rank}")
        assembly.tick(FIRST_PATIENCE_S)
        deliver(assembly, rank, 1, f"shard-{rank}", now=FIRST_PATIENCE_S)
    assert bring(assembly, 1, 2, "shard-1", now=100) == [RequestFiles(1, 2, ("shard-1",))]


def test_when_patience_ran_out_the_lowest_rank_is_kept_all_the_same() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "model")
    assert assembly.tick(FIRST_PATIENCE_S) == [RequestFiles(1, 1, ("model",))]
    deliver(assembly, 1, 1, "model", now=2)
    assert bring(assembly, 0, 1, "model", now=3) == [RequestFiles(0, 1, ("model",))]
    assert owners(the_commit(deliver(assembly, 0, 1, "model", now=4))) == {"model": 0}


def test_no_two_ranks_store_a_file_of_the_same_name_at_the_same_time() -> None:
    """Else the bytes of the higher rank could be the last ones, with the lower rank's crc32 in the manifest."""
    assembly = assembly_of(4)
    bring(assembly, 3, 1, "model", "shard-3")
    assert assembly.tick(FIRST_PATIENCE_S) == [RequestFiles(3, 1, ("model", "shard-3"))]
    bring(assembly, 2, 1, "model", now=2)
    assert bring(assembly, 1, 1, "model", "shard-1", now=2) == [RequestFiles(2, 1, ())]
    deliver(assembly, 2, 1, now=2)
    assert assembly.tick(2 + FIRST_PATIENCE_S) == []
    ordered = deliver(assembly, 3, 1, "model", "shard-3", now=4)
    assert ordered == [RequestFiles(1, 1, ("model", "shard-1"))]
    assert bring(assembly, 0, 1, "model", now=5) == []
    assert deliver(assembly, 1, 1, "model", "shard-1", now=6) == [RequestFiles(0, 1, ("model",))]
    assert owners(the_commit(deliver(assembly, 0, 1, "model", now=7))) == {"model": 0, "shard-1": 1, "shard-3": 3}


def test_a_rank_replaces_files_of_a_rank_that_could_not_store_them() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "model")
    assembly.tick(FIRST_PATIENCE_S)
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


def test_a_slow_rank_becomes_a_silent_one() -> None:
    assembly = assembly_of(2, running_since=0.0)
    bring(assembly, 0, 1, "model", now=0.1)
    deliver(assembly, 0, 1, "model", now=0.1)
    note(assembly, 0, 2, now=0.2)
    assert assembly.deadline() == FIRST_REPORT_TIMEOUT_S
    assert assembly.tick(FIRST_REPORT_TIMEOUT_S * 0.99) == []
    assert the_commit(assembly.tick(FIRST_REPORT_TIMEOUT_S)).ranks == (0,)


def test_a_rank_that_is_not_in_train_func_yet_is_not_silent() -> None:
    assembly = CheckpointAssembly(2, CheckpointConfig(missing_rank_s=MISSING_RANK_S))
    bring(assembly, 0, 1, "model")
    deliver(assembly, 0, 1, "model")
    assert only(Commit, note(assembly, 0, 2, now=FIRST_REPORT_TIMEOUT_S * 3)) == []


def test_a_silent_rank_that_reports_after_all_is_waited_for_again() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "shard-0")
    deliver(assembly, 0, 1, "shard-0")
    bring(assembly, 0, 2, "shard-0", now=1)
    assert only(Refuse, bring(assembly, 1, 2, "shard-1", index=1, now=1)) == []
    deliver(assembly, 0, 2, "shard-0", now=1)
    assert the_commit(deliver(assembly, 1, 2, "shard-1", now=1)).ranks == (0, 1)


def test_at_the_end_of_an_attempt_nobody_is_just_slow() -> None:
    assembly = assembly_of(2, running_since=0.0)
    bring(assembly, 0, 1, "model", now=0.1)
    deliver(assembly, 0, 1, "model", now=0.1)
    note(assembly, 0, 2, now=0.2)
    assert the_commit(assembly.close(0.3)).ranks == (0,)


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


# -- ranks that are ahead of others ------------------------------------------------------------------------------------


def run_ahead(assembly: CheckpointAssembly, ordinals: Iterable[int], now: float = 0.0) -> list[int]:
    """Rank 0 brings checkpoints and stores what it may; returns the ordinals of those."""
    granted = []
    for ordinal in ordinals:
        if RequestFiles(0, ordinal, (f"shard-0-{ordinal}",)) in bring(
            assembly, 0, ordinal, f"shard-0-{ordinal}", now=now
        ):
            granted.append(ordinal)
            deliver(assembly, 0, ordinal, f"shard-0-{ordinal}", now=now)
    return granted


def test_a_rank_that_is_ahead_waits_for_the_checkpoints_before() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "shard-1")
    assert run_ahead(assembly, [1, 2, 3]) == [1, 2]
    committed, granted = deliver(assembly, 1, 1, "shard-1")
    assert isinstance(committed, Commit)
    assert granted == RequestFiles(0, 3, ("shard-0-3",))


def test_a_rank_that_is_ahead_waits_also_for_one_that_has_brought_its_last_and_not_its_next() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "shard-1")
    deliver(assembly, 1, 1, "shard-1")
    assert run_ahead(assembly, [1, 2, 3, 4]) == [1, 2, 3]
    bring(assembly, 1, 2, "shard-1")
    assert RequestFiles(0, 4, ("shard-0-4",)) in deliver(assembly, 1, 2, "shard-1")


def test_a_rank_that_is_ahead_waits_for_ranks_that_have_not_begun() -> None:
    assembly = CheckpointAssembly(2, CheckpointConfig(missing_rank_s=MISSING_RANK_S))
    assembly.running(0, 0.0)
    assert run_ahead(assembly, [1, 2, 3]) == [1, 2]
    assert assembly.running(1, 1.0) == [RequestFiles(0, 3, ("shard-0-3",))]


@pytest.mark.parametrize("reports", [0, 1])
def test_a_rank_does_not_wait_for_others_that_never_bring_checkpoints(reports: int) -> None:
    assembly = assembly_of(2, running_since=0.0)
    if reports:
        note(assembly, 1, 100)
    assert run_ahead(assembly, range(1, 6)) == [1, 2, 3, 4, 5]


def test_a_rank_that_waits_in_vain_does_not_wait_again() -> None:
    """Rank 1 has brought one checkpoint, and brings no more."""
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "shard-1")
    deliver(assembly, 1, 1, "shard-1")
    assert run_ahead(assembly, [1, 2, 3, 4], now=5.0) == [1, 2, 3]
    assert assembly.deadline() == 5.0 + MISSING_RANK_S
    actions = assembly.tick(5.0 + MISSING_RANK_S)
    assert only(RequestFiles, actions) == [RequestFiles(0, 4, ("shard-0-4",))]
    assert "rank 1 brought earlier ones" in only(ShowLine, actions)[0].text
    assert run_ahead(assembly, [5, 6], now=6.0 + MISSING_RANK_S) == [5, 6]


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


def test_equal_contents_are_not_worth_a_word() -> None:
    assembly = assembly_of(2)
    for rank in (0, 1):
        bring(assembly, rank, 1, "model")
    deliver(assembly, 0, 1, "model")
    assert only(ShowLine, deliver(assembly, 1, 1, skipped=["model"])) == []


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
    assembly.tick(FIRST_PATIENCE_S)
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
    assert (refusal.rank, refusal.why.startswith(f"checkpoint 1: {why}; give them different names")) == (2, True)
    deliver(assembly, 0, 1, first)
    said, dropped = deliver(assembly, 1, 1, "model-1", skipped=[first])
    assert why in said.text  # type: ignore[union-attr]
    assert dropped == Drop(1)
    for rank in range(3):
        assert only(Refuse, bring(assembly, rank, 2, "model")) == []


def test_names_that_only_begin_alike_are_no_clash() -> None:
    assembly = assembly_of(2)
    bring(assembly, 0, 1, "model/a", "models")
    assert only(Refuse, bring(assembly, 1, 1, "model.txt", "model/b", "models")) == []


# -- when to look again ----------------------------------------------------------------------------------------------


def test_no_deadline_without_a_checkpoint() -> None:
    assembly = assembly_of(2)
    note(assembly, 0, 1)
    assert assembly.deadline() is None


def test_the_first_deadline_is_the_end_of_patience() -> None:
    assembly = assembly_of(2)
    bring(assembly, 1, 1, "model", now=5)
    assert assembly.deadline() == 5 + FIRST_PATIENCE_S


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
    assert assembly.deadline() == FIRST_PATIENCE_S
    assert assembly.deadline() == FIRST_PATIENCE_S  # still, as no tick came
    assert len(assembly.tick(FIRST_PATIENCE_S + 5)) == 1


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
            self.assembly.running(rank, -FIRST_REPORT_TIMEOUT_S)
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

    @rule(seconds=st.sampled_from((0.1, FIRST_PATIENCE_S, PATIENCE_S)))
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
        for _ in range(STEPS + 1):
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


def test_fewer_than_the_number_are_all_kept() -> None:
    assert surplus(losses(1), keeping(3)) == []
    assert surplus([], keeping(1)) == []
