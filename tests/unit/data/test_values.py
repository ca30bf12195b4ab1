"""Values of any type, through every source and every consumer: they are those of pyarrow, or an error names the column.

A normal run has a few examples, ``--all`` many.
"""

from __future__ import annotations

import datetime
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrain import data
from distrain.as_ray.data.dataset import Dataset
from distrain.data.constructors import as_dataset
from distrain.data.iterator import DataIterator
from distrain.data.passes import Worker
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distrain.data.dataset import Dataset as PlainDataset

# -- columns ---------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=5)
LONG = st.integers(-(2**63), 2**63 - 1)
ZONE = datetime.timezone(datetime.timedelta(hours=5))
MOMENT = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1))
SCALARS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int64(): LONG,
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): TEXT,
    pa.string_view(): TEXT,
    pa.large_string(): TEXT,
    pa.binary(): st.binary(max_size=4),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.decimal128(20, 3): st.decimals(-(10**9), 10**9, places=3),
    pa.date32(): st.dates(datetime.date(1900, 1, 1)),
    pa.timestamp("us"): MOMENT,
    pa.timestamp("ns"): st.integers(-(2**62), 2**62).map(pd.Timestamp),
    pa.timestamp("ns", "Europe/Berlin"): st.integers(-(2**62), 2**62).map(pd.Timestamp),
    pa.timestamp("us", "+05:00"): MOMENT.map(lambda moment: moment.replace(tzinfo=ZONE)),
    pa.duration("us"): st.timedeltas(-datetime.timedelta(9999), datetime.timedelta(9999)),
    pa.time64("us"): st.times(),
    pa.dictionary(pa.int32(), pa.int64()): LONG,
    pa.dictionary(pa.int32(), pa.string()): TEXT,
    pa.null(): st.none(),
}
"""The types of one value."""
MIXED = st.one_of(
    LONG, st.integers(2**63, 2**70), st.floats(), st.booleans(), TEXT, st.binary(max_size=3), st.none(), MOMENT,
    MOMENT.map(lambda moment: moment.replace(tzinfo=ZONE)), MOMENT.map(datetime.datetime.date),
    st.decimals(-100, 100, places=2), st.lists(st.one_of(st.integers(0, 3), TEXT), max_size=2),
    st.dictionaries(st.sampled_from("ab"), st.one_of(LONG, TEXT), max_size=2),
)  # fmt: skip


@st.composite
def typed(draw: st.DrawFn) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    """A type, perhaps nested, with its values, of which some may be missing."""
    kind = draw(st.sampled_from(list(SCALARS)))
    values = SCALARS[kind]
    for nesting in draw(st.lists(st.sampled_from(["list", "large", "fixed", "view", "struct", "tensor"]), max_size=2)):
        has_gaps = draw(st.booleans())
        inside = st.none() | values if has_gaps else values
        if nesting == "struct":
            kind, values = pa.struct([("k", kind)]), st.fixed_dictionaries({"k": inside})
        elif nesting in ("fixed", "tensor"):
            kind, values = pa.list_(kind, 2), st.lists(inside, min_size=2, max_size=2)
        else:
            make = {"list": pa.list_, "large": pa.large_list, "view": pa.list_view}[nesting]
            kind, values = make(kind), st.lists(inside, max_size=2)
    return kind, st.none() | values if draw(st.booleans()) else values


@st.composite
def columns(draw: st.DrawFn) -> tuple[pa.Array | None, list[Any]]:
    """A column of Arrow and its values; or values that Arrow may have no type for."""
    if draw(st.integers(0, 3)) == 0:
        return None, draw(st.lists(MIXED, min_size=1, max_size=5))
    kind, values = draw(typed())
    made = pa.array(draw(st.lists(values, min_size=1, max_size=5)), kind)
    if pa.types.is_fixed_size_list(kind) and kind.value_type == pa.int64() and draw(st.booleans()):
        return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int64(), [2]), made), made.to_pylist()
    return made, made.to_pylist()


# -- sources ---------------------------------------------------------------------------------------------------------


def parquet(column: pa.Array, values: list[Any], folder: Path) -> PlainDataset:
    pq.write_table(pa.table({"v": column}), folder / "rows.parquet", row_group_size=2)
    return data.read_parquet(folder / "rows.parquet")


def arrow_frame(column: pa.Array, values: list[Any], folder: Path) -> PlainDataset:
    return data.from_pandas(pd.DataFrame({"v": pd.Series(pd.arrays.ArrowExtensionArray(column))}))


def huggingface(column: pa.Array, values: list[Any], folder: Path) -> PlainDataset:
    found = datasets.Dataset(datasets.table.InMemoryTable(pa.table({"v": column})))
    found.with_format("arrow")[:]
    return data.from_huggingface(found)


def categories(column: pa.Array, values: list[Any], folder: Path) -> PlainDataset:
    return data.from_pandas(pd.DataFrame({"v": pd.Categorical(pd.Series(values, dtype=object))}))


def csv(column: pa.Array, values: list[Any], folder: Path) -> PlainDataset:
    pyarrow.csv.write_csv(pa.table({"v": column, "n": pa.array(range(len(column)))}), folder / "rows.csv")
    values[:] = pyarrow.csv.read_csv(folder / "rows.csv").column("v").to_pylist()
    return data.read_csv(folder / "rows.csv", columns=["v"])


def json_lines(column: pa.Array, values: list[Any], folder: Path) -> PlainDataset:
    lines = [json.dumps({"v": value}, allow_nan=False) + "\n" for value in values]
    (folder / "rows.json").write_text("".join(lines))
    read = pyarrow.json.read_json(folder / "rows.json").column("v")
    read.validate(full=True)  # pyarrow 26 makes broken columns of lists of lists with gaps
    values[:] = read.to_pylist()
    return data.read_json(folder / "rows.json")


def objects(values: list[Any]) -> np.ndarray[Any, Any]:
    return np.fromiter(values, dtype=object, count=len(values))


def rows_of(values: list[Any]) -> list[dict[str, Any]]:
    return [{"v": value} for value in values]


SOURCES: dict[str, Callable[[Any, list[Any], Path], PlainDataset]] = {
    "arrow": lambda column, values, folder: as_dataset(
        pa.table({"v": pa.chunked_array([column[:1], column[1:]])}), "x"
    ),
    "parquet": parquet,
    "huggingface": huggingface,
    "arrow frame": arrow_frame,
    "csv": csv,
    "json": json_lines,
    "items": lambda column, values, folder: data.from_items(rows_of(values)),
    "objects": lambda column, values, folder: data.from_numpy({"v": objects(values)}),
    "parts": lambda column, values, folder: data.from_numpy([{"v": values[:1]}, {"v": values[1:]}]),
    "frame": lambda column, values, folder: data.from_pandas(pd.DataFrame({"v": pd.Series(values, dtype=object)})),
    "inferred frame": lambda column, values, folder: data.from_pandas(pd.DataFrame({"v": objects(values)})),
    "stream": lambda column, values, folder: as_dataset(lambda: iter(rows_of(values)), "x"),
    "categories": categories,
}
OF_ARROW = ("arrow", "parquet", "huggingface", "arrow frame", "csv", "json", "categories")
"""Those for columns of Arrow. pandas takes False and Decimal(0) for one category."""
CANNOT = (pa.ArrowException, NotImplementedError, ValueError, TypeError, KeyError, OverflowError)
"""The errors of libraries that have no such type, when they make the source."""


# -- consumers -------------------------------------------------------------------------------------------------------


def shard(dataset: PlainDataset) -> DataIterator:
    return DataIterator(dataset, name="x", worker=Worker(0, 1))


def same(thing: Any) -> Any:
    return thing


def batches(batch_format: str, dataset: PlainDataset, folder: Path) -> Iterator[Any]:
    for batch in shard(dataset).iter_batches(batch_size=2, batch_format=batch_format):
        if batch_format == "pyarrow":
            yield from batch.column("v").to_pylist()
        else:
            yield from batch["v"]


def torch_batches(dataset: PlainDataset, folder: Path) -> Iterator[Any]:
    for batch in shard(dataset).iter_torch_batches(batch_size=2, device="cpu"):
        yield from batch["v"].numpy()


def mapped(batch_format: str, batch_size: int | None, dataset: PlainDataset, folder: Path) -> Iterator[Any]:
    changed = dataset.map_batches(same, batch_format=batch_format, batch_size=batch_size)
    return batches("default", changed, folder)


def of_ray(dataset: PlainDataset) -> Dataset:
    return Dataset(dataset._make, dataset._operations, dataset._shuffle)


def written(dataset: PlainDataset, folder: Path) -> list[Any]:
    of_ray(dataset).write_parquet(str(folder / "parquet"))
    (file,) = (folder / "parquet").iterdir()
    return pq.read_table(file).column("v").to_pylist()


CONSUMERS: dict[str, Callable[[PlainDataset, Path], Any]] = {
    "iter_rows": lambda dataset, folder: (row["v"] for row in shard(dataset).iter_rows()),
    "take": lambda dataset, folder: [row["v"] for row in dataset.take(9)],
    "take of ray.data": lambda dataset, folder: [row["v"] for row in of_ray(dataset).take(9)],
    "default": lambda dataset, folder: batches("default", dataset, folder),
    "pandas": lambda dataset, folder: batches("pandas", dataset, folder),
    "pyarrow": lambda dataset, folder: batches("pyarrow", dataset, folder),
    "torch": torch_batches,
    "map": lambda dataset, folder: batches("default", dataset.map(same), folder),
    "map_batches": lambda dataset, folder: mapped("numpy", 1, dataset, folder),
    "map_batches pandas": lambda dataset, folder: mapped("pandas", None, dataset, folder),
    "map_batches pyarrow": lambda dataset, folder: mapped("pyarrow", 1, dataset, folder),
    "filter": lambda dataset, folder: batches("default", dataset.map(same).filter(lambda row: True), folder),
    "union": lambda dataset, folder: batches("default", of_ray(dataset).union(dataset), folder),
    "write_parquet": lambda dataset, folder: written(dataset, folder),
}
NEVER_REFUSE = ("iter_rows", "take", "take of ray.data", "default", "map", "map_batches", "filter", "union")
"""They have numpy's arrays of objects for anything."""


def plain(value: Any) -> Any:
    """A value in one form, whoever holds it."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if item is not None}
    if pd.isna(value):
        return None
    if isinstance(value, (np.datetime64, datetime.date)):
        moment = pd.Timestamp(value)
        return ("time", moment.isoformat()) if moment.tz is None else ("moment", moment.tz_convert("UTC").isoformat())
    if isinstance(value, (np.timedelta64, datetime.timedelta)):
        return ("duration", str(np.timedelta64(value, "us")))
    if isinstance(value, np.generic):
        value = value.item()
    return ("bool", value) if isinstance(value, bool) else value


def has_limits(kind: str) -> bool:
    """Return whether Arrow, when it looks at Python's values for their type, has none for some of these."""
    return "[ns" in kind or ("uint64" in kind and kind != "uint64")


def loses_digits(values: list[Any]) -> bool:
    """Return whether a batch has no array for these integers, of which some are missing."""
    flat: list[Any] = [item for value in values for item in (value if isinstance(value, list) else [value])]
    while any(isinstance(item, list) for item in flat):
        flat = [item for value in flat for item in (value if isinstance(value, list) else [value])]
    return None in flat and any(isinstance(item, int) and abs(item) > 2**53 for item in flat)


def is_plain(column: pa.Array | None) -> bool:
    """Return whether these are numbers without gaps, which nothing may refuse."""
    return column is not None and column.null_count == 0 and pa.types.is_integer(column.type)


def check(source: str, column: pa.Array | None, values: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            dataset = SOURCES[source](column, values, folder)
        except CANNOT:
            return
        for consumer, consume in CONSUMERS.items():
            try:
                found = list(consume(dataset, folder))
            except DataError as error:
                refused = str(error)
            except pa.ArrowIndexError:  # pyarrow 26 cannot write an empty dictionary in a missing struct
                assert consumer == "write_parquet"
                continue
            else:
                refused = ""
            if refused:
                assert "'v'" in refused or "StringView" in refused, (source, consumer)
                of_text = "choose the type of the column" in refused  # text files do not say that integers are uint64
                may_refuse = of_text or ("would lose digits as a float" in refused and loses_digits(values))
                assert may_refuse or consumer not in NEVER_REFUSE, (source, consumer, refused)
                may_refuse |= column is None or consumer == "torch" or has_limits(str(column.type))
                may_refuse |= "implemented for StringView" in refused  # pyarrow 26 cannot write those in structs
                assert may_refuse, (source, consumer, refused)
                assert of_text or not is_plain(column), (source, consumer, refused)
                continue
            expected = [*values, *values] if consumer == "union" else values
            assert list(map(plain, found)) == list(map(plain, expected)), (source, consumer, found, values)


@pytest.mark.timeout(1200)  # with --all
def test_values_are_those_that_pyarrow_reads(request: pytest.FixtureRequest) -> None:
    @settings(max_examples=3000 if request.config.getoption("--all") else 40)
    @given(st.data())
    def all_values(chosen: st.DataObject) -> None:
        column, values = chosen.draw(columns())
        source = chosen.draw(st.sampled_from([name for name in SOURCES if column is not None or name not in OF_ARROW]))
        check(source, column, values)

    all_values()
