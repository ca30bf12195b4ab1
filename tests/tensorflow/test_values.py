"""Values of any type as TensorFlow's tensors: they are those of the rows, or an error names the column."""

from __future__ import annotations

from datetime import datetime
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrain import data
from distrain.data.iterator import DataIterator
from distrain.data.passes import Worker
from distrain.errors import DataError

if find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; scripts/test_tensorflow", allow_module_level=True)

import tensorflow as tf

FLOATS = st.floats(allow_subnormal=False)
"""TensorFlow makes subnormal numbers 0."""
VALUES: list[st.SearchStrategy[Any]] = [
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**65),
    FLOATS,
    st.integers(-3, 3) | FLOATS,
    st.text(max_size=4),
    st.binary(max_size=4),
    st.none() | FLOATS,
    st.none() | st.integers(0, 2**62),
    st.lists(st.integers(0, 2**62), min_size=2, max_size=2),
    st.lists(st.text(max_size=2), max_size=2),
    st.one_of(st.booleans(), st.integers(), st.text(max_size=2), st.binary(max_size=2), st.datetimes()),
]


def shard(rows: list[dict[str, Any]]) -> DataIterator:
    return DataIterator(data.from_items(rows), name="x", worker=Worker(0, 1))


def read(way: str, values: list[Any]) -> list[Any]:
    if way == "to_tf":
        rows = shard([{"v": value, "y": 0, "unused": {"no": "tensor"}} for value in values])
        return [value for v, _ in rows.to_tf("v", "y", batch_size=1) for value in v.numpy()]
    batches = shard([{"v": value} for value in values]).iter_tf_batches(batch_size=2)
    return [value for batch in batches for value in batch["v"].numpy()]


def plain(value: Any) -> Any:
    if isinstance(value, (list, np.ndarray)):
        return [plain(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, str):
        return value.encode()
    if value is None or value != value:
        return None
    return ("bool", value) if isinstance(value, bool) else value


@pytest.mark.parametrize("way", ["to_tf", "iter_tf_batches"])
def test_values_are_those_of_the_rows(way: str, request: pytest.FixtureRequest) -> None:
    @settings(max_examples=400 if request.config.getoption("--all") else 40)
    @given(st.sampled_from(VALUES).flatmap(lambda values: st.lists(values, min_size=1, max_size=4)))
    def check(values: list[Any]) -> None:
        try:
            found = read(way, values)
        except (DataError, tf.errors.OpError) as error:
            found, refused = [], str(error)
        else:
            refused = ""
        if refused:
            kinds = set(map(type, values))
            assert "column 'v' " in refused
            assert len(kinds) > 1 or kinds & {list, datetime, type(None)} or max(values, default=0) >= 2**64, refused
        else:
            assert list(map(plain, found)) == list(map(plain, values))

    check()


def test_a_later_row_of_another_type_names_the_column() -> None:
    with pytest.raises(tf.errors.OpError, match=r"column 'v' is int64 in the first row, .*, and float64 later"):
        read("to_tf", [1, 2.5])
    assert read("to_tf", [1.5, 2]) == [1.5, 2]


@pytest.mark.parametrize("way", ["to_tf", "iter_tf_batches"])
def test_subclasses_of_text_are_text(way: str) -> None:
    assert read(way, [np.str_("a"), "b"]) == [b"a", b"b"]
