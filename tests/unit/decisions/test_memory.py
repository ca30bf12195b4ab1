"""Which checkpoints stay in memory, and where their copies are."""

from __future__ import annotations

from distrain.decisions.memory import copy_hosts, to_keep


def add(rounds: str, *, safe: str = "", needed: str = "") -> str:
    """Return which rounds are kept, of some whose names are letters, when another one was committed."""
    kept = to_keep(list(rounds), safe=safe, needed=[*needed, ""])
    return "".join(name for name in rounds if name in kept)


def test_the_copies_of_a_host_are_on_the_next_one() -> None:
    assert copy_hosts(["a", "b", "c"], {}) == {"a": "b", "b": "c", "c": "a"}
    assert copy_hosts(["a"], {}) == {"a": ""}


def test_the_copies_of_a_host_are_in_another_rack_if_there_is_one() -> None:
    racks = {"a": "1", "b": "1", "c": "2", "d": "2"}
    assert copy_hosts(list("abcd"), racks) == {"a": "c", "b": "d", "c": "a", "d": "b"}
    assert copy_hosts(list("ab"), racks) == {"a": "b", "b": "a"}


def test_one_host_keeps_the_newest_round_and_the_one_before() -> None:
    assert add("a") == "a"
    assert add("abcd") == "cd"


def test_the_round_that_is_on_two_hosts_is_kept_until_a_newer_one_is() -> None:
    assert add("abc", safe="a") == "ac"
    assert add("acd", safe="c") == "cd"
    assert add("cde", safe="b") == "de", "it is no longer a checkpoint of the run"


def test_rounds_that_are_read_or_on_their_way_are_kept() -> None:
    assert add("abcde", safe="a", needed="bc") == "abce"
    assert add("abcef", safe="a", needed="b") == "abf"
