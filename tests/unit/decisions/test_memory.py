"""Which checkpoints stay in memory, and where their copies are."""

from __future__ import annotations

from distrain.decisions.memory import KeptRounds, copy_hosts
from distrain.storage.commit import MemoryRound


def a_round(number: int) -> MemoryRound:
    return MemoryRound(f"checkpoint_{number:06}", {"index": number, "files": {}}, {}, {}, {})


def add(kept: KeptRounds, *numbers: int) -> list[int]:
    for number in numbers:
        kept.add(a_round(number), set(kept.rounds))
    return [one.manifest["index"] for one in kept.rounds.values()]


def test_the_copies_of_a_host_are_on_the_next_one() -> None:
    assert copy_hosts(["a", "b", "c"], {}) == {"a": "b", "b": "c", "c": "a"}
    assert copy_hosts(["a"], {}) == {"a": ""}


def test_the_copies_of_a_host_are_in_another_rack_if_there_is_one() -> None:
    racks = {"a": "1", "b": "1", "c": "2", "d": "2"}
    assert copy_hosts(list("abcd"), racks) == {"a": "c", "b": "d", "c": "a", "d": "b"}
    assert copy_hosts(list("ab"), racks) == {"a": "b", "b": "a"}


def test_one_host_keeps_the_newest_round_and_the_one_before() -> None:
    assert add(KeptRounds(), 0, 1, 2, 3) == [2, 3]


def test_the_round_that_is_on_two_hosts_is_kept_until_a_newer_one_is() -> None:
    kept = KeptRounds()
    add(kept, 0)
    kept.safe = "checkpoint_000000"
    assert add(kept, 1, 2) == [0, 2]
    kept.safe = "checkpoint_000002"
    assert add(kept, 3) == [2, 3]


def test_rounds_that_are_read_or_on_their_way_are_kept() -> None:
    kept = KeptRounds()
    add(kept, 0, 1)
    kept.safe, kept.storing = "checkpoint_000000", "checkpoint_000001"
    add(kept, 2)
    kept.copying = "checkpoint_000002"
    assert add(kept, 3, 4) == [0, 1, 2, 4]
    assert len(kept.rounds) + 1 <= 5  # and the one that the ranks are writing
    kept.start = "checkpoint_000001"
    kept.copying = kept.storing = ""
    assert add(kept, 5) == [0, 1, 5]


def test_a_round_that_is_no_longer_a_checkpoint_of_the_run_is_dropped() -> None:
    kept = KeptRounds()
    add(kept, 0, 1)
    kept.add(a_round(2), {"checkpoint_000000"})
    assert list(kept.rounds) == ["checkpoint_000000", "checkpoint_000002"]
    kept.drop(["checkpoint_000002"])
    assert list(kept.rounds) == ["checkpoint_000000"]
