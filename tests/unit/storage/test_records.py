"""Lines of metrics.jsonl: non-finite numbers, and lines that a crash has torn."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrain.coordinator.store.local_store import LocalStore
from distrain.storage.lines import read_metrics
from distrain.storage.paths import RunPaths

if TYPE_CHECKING:
    from pathlib import Path


def written(root: Path, *metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Return metrics as a reader gets them after a store has written them."""
    store = LocalStore(root)
    for index, values in enumerate(metrics, start=1):
        store.append_metrics({"time": 1.0, "attempt": 0, "rank": 0, "index": index}, values)
    store.close()
    return [record["metrics"] for record in read_metrics(RunPaths(root).metrics)]


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # NaN is not equal to itself


def test_non_finite_numbers_are_null_and_named_in_the_file(root: Path) -> None:
    written(root, {"loss": math.nan, "eval": {"best": -math.inf}, "lr": 0.1, "all": [1.0, math.inf]})
    [line] = RunPaths(root).metrics.read_text().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["metrics"] == {"loss": None, "eval": {"best": None}, "lr": 0.1, "all": [1.0, None]}
    assert record["nonfinite"] == {"/loss": "nan", "/eval/best": "-inf", "/all/1": "inf"}


def test_names_with_slashes_are_not_taken_for_nested_ones(root: Path) -> None:
    metrics = [{"eval/loss": math.nan, "eval": {"loss": 0.5}}, {"eval/loss": 0.5, "eval": {"loss": math.nan}}]
    assert same(written(root, *metrics), metrics)


metrics_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50)
@given(metrics=st.dictionaries(st.text("abc", min_size=1, max_size=2), metrics_values, max_size=4))
def test_any_metrics_survive_the_round_trip(metrics: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    assert same(written(tmp_path_factory.mktemp("run"), metrics), [metrics])


def test_a_torn_last_line_is_cut_off_before_new_ones_are_written(root: Path) -> None:
    written(root, {"loss": 1})
    with RunPaths(root).metrics.open("a") as file:
        file.write('{"time":1.0,"attempt":0,"ra')
    assert written(root, {"loss": 2}) == [{"loss": 1}, {"loss": 2}]


def test_readers_choose_one_rank_or_all(store: LocalStore) -> None:
    for rank in (0, 1):
        store.append_metrics({"time": 1.0, "attempt": 0, "rank": rank, "index": 1}, {"rank": rank})
    store.flush()
    assert [record["rank"] for record in read_metrics(store.paths.metrics, rank=1)] == [1]
    assert [record["rank"] for record in read_metrics(store.paths.metrics, rank=None)] == [0, 1]
