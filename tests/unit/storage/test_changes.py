"""What is found to differ between two starts of a run."""

from __future__ import annotations

from typing import Any

from distrain.storage.runs.changes import changes_in_words, find_changes


def lines(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    found = find_changes(before, now)
    return changes_in_words(found) if found else []


def test_settings_that_come_and_go_are_missing_once() -> None:
    before, now = ({"train_loop_config": config} for config in ({"a": 1, "b": None}, {"b": 0, "c": "x"}))
    assert lines(before, now) == ["a 1 → (missing)", "b None → 0", "c (missing) → x"]


def test_what_only_one_start_knows_about_the_code_is_no_change() -> None:
    known = {"git": {"commit": "0123456789abcdef", "dirty": False}, "script": "train.py", "arguments": "--lr 1"}
    assert lines({}, known) == lines(known, {}) == lines({"train_loop_config": "<Config>"}, {}) == []
    edited = {**known, "git": {"commit": "0123456789abcdef", "dirty": True}, "arguments": "--lr 2"}
    assert lines(known, edited) == [
        "arguments --lr 1 → --lr 2",
        "git commit 0123456789ab → 0123456789ab-dirty",
    ]


def test_large_configs_stay_short() -> None:
    before, now = ({"train_loop_config": {str(n): [end] * 1000 for n in range(1000)}} for end in (1, 2))
    found = lines(before, now)
    assert len(found) == 21
    assert found[-1] == "... 980 more"
    assert max(map(len, found)) < 150
