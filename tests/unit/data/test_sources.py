"""Datasets that users pass: the rows of each format, and errors that name the file."""

from __future__ import annotations

import datetime
import gzip
import http
import json
import math
import time
from typing import TYPE_CHECKING, Any

import cloudpickle
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
import pytest
import torch

from distrain import data
from distrain.data import loops
from distrain.data.constructors import as_dataset
from distrain.data.iterator import DataIterator
from distrain.data.passes import Worker
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distrain.data.dataset import Dataset as PlainDataset

ROWS = [{"x": number, "y": number / 2} for number in range(5)]


def shard(dataset: PlainDataset, rank: int = 0, ranks: int = 1) -> DataIterator:
    return DataIterator(cloudpickle.loads(cloudpickle.dumps(dataset)), name="x", worker=Worker(rank, ranks), rank=rank)


def plain(rows: list[Any]) -> list[Any]:
    return [{name: np.asarray(value).tolist() for name, value in row.items()} for row in rows]


def write_all_kinds(folder: Path) -> dict[str, Any]:
    frame = pd.DataFrame(ROWS)
    table = pa.Table.from_pandas(frame)
    pq.write_table(table.slice(0, 2), folder / "a.parquet")
    pq.write_table(table.slice(2), folder / "b.parquet", row_group_size=1)
    frame.to_csv(folder / "rows.csv", index=False)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text(lines)
    with gzip.open(folder / "rows.csv.gz", "wt") as file:
        frame.to_csv(file, index=False)
    with fsspec.open("memory://rows/a.parquet", "wb") as file:
        pq.write_table(table, file)
    return {
        "table": table,
        "frame": frame,
        "arrays": {"x": np.arange(5), "y": np.arange(5) / 2},
        "tensors": {"x": torch.arange(5), "y": torch.arange(5) / 2},
        "rows": ROWS,
        "file": folder / "rows.csv",
        "compressed": str(folder / "rows.csv.gz"),
        "lines": str(folder / "*.jsonl"),
        "files": [str(folder / "a.parquet"), folder / "b.parquet"],
        "glob": str(folder / "*.parquet"),
        "url": "memory://rows/a.parquet",
        "callable": lambda: frame,
        "generator": lambda: iter(ROWS),
    }


def test_every_kind_of_data_gives_the_same_rows(tmp_path: Path) -> None:
    for kind, value in write_all_kinds(tmp_path).items():
        part = shard(as_dataset(value, "x"))
        assert plain(list(part.iter_rows())) == ROWS, kind
        assert part.schema().names == ["x", "y"], kind
        (batch,) = part.iter_torch_batches(device="cpu", dtypes=torch.float32)
        assert torch.equal(batch["y"], torch.arange(5, dtype=torch.float32) / 2), kind
        assert plain(as_dataset(value, "x").take(2)) == ROWS[:2], kind


def test_columns_of_arrow_become_arrays(tmp_path: Path) -> None:
    table = pa.table({
        "list": [[1.0, 2.0], [3.0, 4.0]],
        "ragged": [[1], [2, 3]],
        "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)),
        "word": pa.array(["a", "b"]).dictionary_encode(),
        "gap": [1.5, None],
        "hole": [2**60, None],
        "holes": pa.array([[1, None], [2, 3]], pa.list_(pa.int64(), 2)),
        "large": [2**60 + 1, None],
        "flag": [True, None],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    numbers = data.read_parquet(tmp_path, columns=[name for name in table.column_names if name != "large"])
    (batch,) = shard(numbers).iter_batches()
    assert batch["list"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert [list(row) for row in batch["ragged"]] == [[1], [2, 3]]
    assert batch["fixed"].shape == (2, 2)
    assert batch["fixed"].dtype == np.int8
    assert batch["word"].tolist() == ["a", "b"]
    assert np.isnan(batch["gap"][1])
    for name, expected in {"hole": [2**60, math.nan], "holes": [[1, math.nan], [2, 3]]}.items():
        rows = shard(data.read_parquet(tmp_path, columns=[name]))
        (tensors,), (frame,) = rows.iter_torch_batches(device="cpu"), rows.iter_batches(batch_format="pandas")
        for found in (batch[name], tensors[name].numpy(), np.array(frame[name].tolist())):
            np.testing.assert_array_equal(found, np.array(expected))
    assert [row["hole"] for row in shard(numbers).iter_rows()] == [2**60, None]
    alone = shard(data.read_parquet(tmp_path, columns=["hole"])).iter_torch_batches(batch_size=1, device="cpu")
    assert [math.isnan(tensors["hole"].item()) for tensors in alone] == [False, True]
    large = data.read_parquet(tmp_path, columns=["large"])
    assert large.take() == [{"large": 2**60 + 1}, {"large": None}]
    for read in ("iter_batches", "iter_torch_batches"):
        with pytest.raises(
            DataError, match=rf"column 'large' cannot become an array: {2**60 + 1} would lose digits as"
        ):
            list(getattr(shard(large), read)())
    for name, cause in {"ragged": "its arrays have different shapes", "flag": "values of type NoneType, bool"}.items():
        rows = data.read_parquet(tmp_path, columns=[name])
        with pytest.raises(DataError, match=rf"'x': column '{name}' \(object\) cannot become a tensor: .*{cause}"):
            list(shard(rows).iter_torch_batches(device="cpu"))


def test_rows_that_are_no_dicts_are_collated_as_a_data_loader_does() -> None:
    pairs = torch.utils.data.TensorDataset(torch.arange(4), torch.arange(4) * 2)
    (batch,) = shard(as_dataset(pairs, "x")).iter_torch_batches(device="cpu")
    assert [part.tolist() for part in batch] == [[0, 1, 2, 3], [0, 2, 4, 6]]
    (batch,) = shard(as_dataset(pairs, "x")).iter_torch_batches(device="cpu", collate_fn=len)
    assert batch == 4


def test_operations() -> None:
    def half(batch: dict[str, Any]) -> dict[str, Any]:
        assert len(batch["id"]) <= 3
        return {"half": batch["id"] / 2}

    rows = data.range(10)
    assert [row["half"] for row in rows.map_batches(half, batch_size=3).take(3)] == [0, 0.5, 1]
    assert rows.map(lambda row: {"y": row["id"] + 1}).filter(lambda row: row["y"] > 5).limit(3).count() == 3
    _, test = rows.train_test_split(0.3)
    assert [row["id"] for row in test.take()] == [7, 8, 9]
    for shuffled in rows.train_test_split(3, shuffle=True, seed=1), rows.random_shuffle(seed=1).train_test_split(3):
        found = [[int(row["id"]) for row in part.take()] for part in shuffled]
        assert list(map(len, found)) == [7, 3]
        assert sorted(found[0] + found[1]) == list(range(10))
        assert sorted(found[1]) != [7, 8, 9]
    assert [row["id"] for row in rows.random_shuffle(seed=1).limit(3).take()] != [0, 1, 2]
    assert data.from_items([1, 2]).take() == [{"item": 1}, {"item": 2}]
    assert data.from_numpy([np.arange(2), np.arange(1)]).count() == data.from_pandas([pd.DataFrame(ROWS)]).count() - 2
    with pytest.raises(DataError, match=r"map\(\) or flat_map\(\): the function returned None for a row"):
        list(shard(rows.map(lambda row: None)).iter_batches())
    with pytest.raises(ValueError, match=r"test_size must be a fraction below 1, or a number of rows, got 1\.5"):
        rows.train_test_split(1.5)
    with pytest.raises(DataError, match="the dataset has 10 rows, so 0 of them cannot be set aside for tests"):
        rows.train_test_split(0.01)[0].count()
    with pytest.raises(DataError, match=r"map_batches\(\) returned 1 rows for 10; it must keep the number of rows"):
        list(shard(rows.map_batches(lambda batch: {"x": batch["id"][:1]})).iter_batches())


def test_functions_that_change_the_number_of_rows(tmp_path: Path) -> None:
    """All ranks get equally many rows of the new ones. A function for batches is tried if nobody says what it does."""
    pq.write_table(pa.table({"id": range(3000)}), tmp_path / "a.parquet", row_group_size=700)

    def fewer(batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"][batch["id"] % 7 == 0]}

    for rows in (data.read_parquet(tmp_path), data.range(3000), data.range(3000).map(lambda row: row)):
        doubled = rows.map_batches(fewer, keeps_rows=None).flat_map(lambda row: [row, {"id": -row["id"]}])
        assert doubled.count() == 2 * len(range(0, 3000, 7))
        parts = [row["id"] for rank in (0, 1) for row in shard(doubled.random_shuffle(seed=2), rank, 2).iter_rows()]
        assert sorted(map(int, parts)) == sorted(sign * place for place in range(0, 3000, 7) for sign in (1, -1))
    assert rows.flat_map(lambda row: []).count() == 0
    assert [row["id"] for row in rows.map_batches(fewer, batch_size=3, keeps_rows=False).take(2)] == [0, 7]
    assert rows.flat_map(lambda row: [{"x": "a"}]).schema().names == ["x"]
    same = data.range(3000).map_batches(lambda batch: {"id": -batch["id"]}, keeps_rows=None)
    assert same.count() == 3000
    assert len(same.opened.functions) == 1, "it keeps the number of rows, so that they need not be counted"
    with pytest.raises(DataError, match="a stream does not know the number of its rows: change the number"):
        as_dataset(lambda: iter([1]), "x").flat_map(lambda row: [row, row]).take(1)


def test_functions_get_no_batches_without_rows(tmp_path: Path) -> None:
    """Many fail there. Whether one changes the number of rows is not known then, and does not matter."""

    def more(batch: dict[str, Any]) -> dict[str, Any]:
        assert len(batch["id"])
        return {"id": batch["id"] + 1}

    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    for rows in (data.read_parquet(tmp_path), data.range(3).filter(lambda row: False), as_dataset([], "x")):
        changed = rows.map_batches(more).map_batches(more, keeps_rows=None).filter(lambda row: True)
        assert (changed.take(), changed.count()) == ([], 0)


def test_rows_that_are_read_into_memory_stay_in_the_order_of_the_first_epoch() -> None:
    shuffled = data.range(50).map(lambda row: {"x": row["id"]}).random_shuffle(seed=4)
    once = shuffled.materialize()
    assert [row["x"] for row in shard(once).iter_rows()] == [row["x"] for row in shuffled.take(50)] != [*range(50)]
    assert data.range(5).filter(lambda row: False).materialize().count() == 0


def test_functions_may_change_what_they_get() -> None:
    """They get copies, so the next epoch begins with the same values."""

    def half(batch: dict[str, Any]) -> dict[str, Any]:
        batch["x"] /= 2
        return batch

    def more(row: dict[str, Any]) -> dict[str, Any]:
        row["x"] += 1
        row["list"].append(row["x"])
        return row

    halved = shard(data.from_numpy({"x": np.ones(4)}).map_batches(half)).iter_torch_batches(device="cpu")
    counted = shard(data.from_items([{"x": 1, "list": []}]).map(more)).iter_rows()
    for _ in range(2):
        (batch,) = halved
        assert batch["x"].tolist() == [0.5] * 4
        batch["x"] += 1
        assert list(counted) == [{"x": 2, "list": [2]}]


def test_a_function_that_raises_is_shown_with_its_own_line() -> None:
    def broken(row: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("no such key")

    with pytest.raises(KeyError, match="no such key") as raised:
        list(shard(data.range(4).map(broken)).iter_batches())
    assert raised.traceback[-1].name == "broken"


def test_rows_that_do_not_divide_evenly(capfd: pytest.CaptureFixture[str]) -> None:
    def rows(ranks: int) -> list[list[int]]:
        parts = [shard(data.range(10), rank, ranks) for rank in range(ranks)]
        return [[row for batch in part.iter_batches() for row in batch["id"]] for part in parts]

    assert rows(2) == [list(range(5)), list(range(5, 10))]
    assert rows(4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert "2 rows of an epoch are left out" in capfd.readouterr().err
    with pytest.raises(DataError, match=r"10 rows are too few for 11 ranks; .* leave its name out of DataConfig\("):
        rows(11)


@pytest.mark.parametrize(("value", "error"), [
    (lambda: {"x": 1}, r"must be arrays of one length, .* but are \{'x': 'one value'\}"),
    (lambda: [{"x": 1}, 3], r"some rows are dicts, but one is 3"),
    (lambda: [None], r"rows such as None cannot be joined: .*; give a collate_fn"),
])  # fmt: skip
def test_data_without_rows_and_columns(value: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        list(shard(as_dataset(value, "x")).iter_torch_batches(device="cpu"))


def test_no_rows_are_an_error() -> None:
    for empty in ({"x": np.zeros(0)}, lambda: iter(())):
        with pytest.raises(DataError, match="dataset 'x': it has no rows"):
            list(shard(as_dataset(empty, "x")).iter_batches())


def test_files_among_others(tmp_path: Path) -> None:
    """Only files with the format count, and only ``key=value`` below the given directory is a column."""
    folder = tmp_path / "lr=0.1" / "rows"
    for part in (1, 2):
        (folder / f"part={part}").mkdir(parents=True)
        pq.write_table(pa.table({"x": [part]}), folder / f"part={part}" / "rows[1].parquet")
    (folder / "README.md").write_text("text")
    both = [{"x": 1, "part": 1}, {"x": 2, "part": 2}]
    for found in as_dataset(folder, "x"), data.read_parquet(f"{folder}/*/*.parquet"), data.read_parquet(f"{folder}/p*"):
        assert found.take() == both
    assert data.read_parquet(folder, columns=["part"]).take() == [{"part": 1}, {"part": 2}]
    assert as_dataset(str(folder / "part=2" / "rows[1].parquet"), "x").take() == [{"x": 2}]
    with pytest.raises(DataError, match=r"README.md has no known ending: use read_parquet\(\), read_csv\(\) or"):
        as_dataset(folder / "README.md", "x").count()
    with pytest.raises(DataError, match=r"README.md and memory://x are on different filesystems"):
        data.read_csv([str(folder / "README.md"), "memory://x"]).count()
    with pytest.raises(TypeError, match="columns must be a list of names, got 'x'"):
        data.read_parquet(folder, columns="x")
    pq.write_table(pa.table({"x": [3]}), folder / "a.parquet")
    assert data.read_parquet(folder).take() == [{"x": 3, "part": None}, *both]


@pytest.mark.timeout(60)
def test_linked_files_are_read_and_linked_directories_only_where_they_are_named(tmp_path: Path) -> None:
    """Any other one, and a broken link, is an error instead of a silent gap."""
    folder, other = tmp_path / "rows", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    for place, path in enumerate((folder / "a.parquet", other / "b.parquet")):
        pq.write_table(pa.table({"x": [place]}), path)
    (folder / "link.parquet").symlink_to(folder / "a.parquet")
    assert [row["x"] for row in data.read_parquet(folder).take()] == [0, 0]
    (folder / "linked").symlink_to(other)
    assert [row["x"] for row in data.read_parquet(folder / "linked").take()] == [1]
    assert [row["x"] for row in data.read_parquet(f"{folder}/*").take()] == [0, 0, 1]
    with pytest.raises(DataError, match=r"rows/linked is a link to a directory: name it, too, in the list of paths"):
        data.read_parquet(folder).count()
    (folder / "linked").unlink()
    (folder / "gone.parquet").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"cannot read .*/gone.parquet: .* No such file or directory"):
        data.read_parquet(folder).count()


def test_columns_that_some_files_lack(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They have no values there, and a line says which files lack them."""
    (tmp_path / "1.csv").write_text("a\n1\n")
    (tmp_path / "2.csv").write_text("b,a\n4,3\n")
    both = [{"a": 1, "b": None}, {"a": 3, "b": 4}]
    for rows in data.read_csv(tmp_path), as_dataset(tmp_path, "x").limit(2):
        assert [*shard(rows).iter_rows()] == rows.take() == both
        assert f"column 'b' is missing in {tmp_path}/1.csv; rows from there have no value" in capfd.readouterr().err
    assert data.read_csv(tmp_path, columns=["a"]).take() == [{"a": 1}, {"a": 3}]
    for name, columns in {"a": {"x": [1]}, "b": {"y": ["t"], "x": [2]}, "c": {"x": [3]}}.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    assert data.read_parquet(tmp_path).take() == [{"x": 1, "y": None}, {"x": 2, "y": "t"}, {"x": 3, "y": None}]
    with pytest.raises(DataError, match=r"there is no column 'q' in /.*; there are \['x', 'y'\]"):
        data.read_parquet(tmp_path, columns=["q"]).schema()


def test_values_of_json_stay_what_they_are(tmp_path: Path) -> None:
    """Texts that look like times are text, and no integer loses digits."""
    lines = [{"t": "2020-01-01", "n": [{"t": "2020-01-01T00:00:00Z"}], "i": 2**62 + 1}, {"t": "x", "n": [], "i": -1}]
    (tmp_path / "a.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.json").write_text('{"i": 18446744073709551615, "late": 1}\n')
    rows = data.read_json(tmp_path / "a.json")
    assert plain(rows.take()) == lines
    assert rows.schema().names == ["t", "n", "i"]
    chosen = pa.schema([("i", pa.uint64()), ("t", pa.timestamp("s"))])
    some = data.read_json(tmp_path / "b.json", parse_options=pyarrow.json.ParseOptions(explicit_schema=chosen))
    assert [row["i"] for row in some.take()] == [2**64 - 1]
    assert some.schema().types == [pa.uint64(), pa.timestamp("s"), pa.int64()]


TABLE = "x,y\n1,a\n\n2,NA\n"
READ, PARSE, CONVERT = pyarrow.csv.ReadOptions, pyarrow.csv.ParseOptions, pyarrow.csv.ConvertOptions
OPTIONS: list[tuple[str | bytes, dict[str, Any]]] = [
    ("title\n1,2\n", {"read_options": READ(skip_rows=1, column_names=["p", "q"])}),
    (TABLE, {"read_options": READ(skip_rows_after_names=1)}),
    (TABLE, {"read_options": READ(column_names=["p", "q"], use_threads=False)}),
    ("é,y\n1,é\n".encode("latin1"), {"read_options": READ(encoding="latin1")}),
    ("x;y\n1,5;2\n", {"parse_options": PARSE(delimiter=";"), "convert_options": CONVERT(decimal_point=",")}),
    ("x,y\n1,2\n3\n4,5\n", {"parse_options": PARSE(invalid_row_handler=lambda row: "skip")}),
    (TABLE, {"convert_options": CONVERT(column_types={"x": pa.float32()}, null_values=["a"])}),
    ('x,y\n1,""\n2,b\n', {"convert_options": CONVERT(strings_can_be_null=True, quoted_strings_can_be_null=False)}),
    ("x,y\n01/02/2020,2\n", {"convert_options": CONVERT(timestamp_parsers=["%d/%m/%Y"])}),
]


@pytest.mark.parametrize(("text", "options"), OPTIONS, ids=map(str, range(len(OPTIONS))))
def test_every_option_of_csv_has_its_effect(text: str | bytes, options: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    source = data.read_csv(file, **options).opened.source
    expected = pyarrow.csv.read_csv(file, **options)
    assert pa.concat_tables(source.read(0)).equals(expected)
    assert not expected.equals(pa.table({})), "the example is of use"


JSON_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ('{"x": 1, "y": 2}\n', {"unexpected_field_behavior": "ignore"}),
    ('{"x":\n1\n} {"x": 2}', {"newlines_in_values": True}),
]


@pytest.mark.parametrize(("text", "options"), JSON_OPTIONS)
def test_every_option_of_json_has_its_effect(text: str, options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    parse = pyarrow.json.ParseOptions(explicit_schema=pa.schema([("x", pa.uint64())]), **options)
    read = pyarrow.json.ReadOptions(block_size=1 << 10, use_threads=False)
    source = data.read_json(tmp_path, read_options=read, parse_options=parse).opened.source
    expected = pyarrow.json.read_json(tmp_path / "a.json", read_options=read, parse_options=parse)
    assert pa.concat_tables(source.read(0)).equals(expected)


@pytest.mark.parametrize(("read", "error"), [
    (lambda: data.read_csv("x", convert_options=CONVERT(include_columns=["a"])), r"include_columns=...\): name"),
    (lambda: data.read_csv("x", read_options=READ(skip_rows=1)), r"skip_rows=...\) without column_names="),
])  # fmt: skip
def test_options_without_effect_are_refused(read: Callable[[], Any], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        read()


@pytest.mark.parametrize(("texts", "error"), [
    (['{"x": 1.5}\n{"x": 9007199254740993}\n'], "0"),
    (['{"x": 9223372036854775809}\n{"x": 1}\n'], "0"),
    (['{"x": {"k": [1.5, -9007199254740993]}}\n'], "0"),
    (['{"x": 1.5}\n', '{"x": 9007199254740993}'], "1"),
    (["x,y\n1.5,1\n", "x,y\n9007199254740993,1\n"], "1"),
])  # fmt: skip
def test_integers_that_would_lose_digits_are_an_error(texts: list[str], error: str, tmp_path: Path) -> None:
    kind = "json" if texts[0].startswith("{") else "csv"
    for place, text in enumerate(texts):
        (tmp_path / f"{place}.{kind}").write_text(text)
    with pytest.raises(
        DataError, match=rf"column 'x' has floats and the integer .* in {tmp_path}/{error}.*explicit_schema="
    ):
        as_dataset(tmp_path, "x").take()
    float64 = pyarrow.json.ParseOptions(explicit_schema=pa.schema([("x", pa.float64())]))
    if kind == "json" and "k" not in texts[0]:
        assert len(data.read_json(tmp_path, parse_options=float64).take()) == 2, "as it was asked"


def test_keys_of_json_that_appear_late(tmp_path: Path) -> None:
    """pyarrow's scanner looks at the first megabyte only, and finds nulls in one row without a line end."""
    (tmp_path / "0.json").write_text(
        '{"a": 1, "s": {"k": 1}}\n' * 50_000 + '{"a": 1.5, "s": {"m": "2020-01-01"}, "b": [2]}'
    )
    (tmp_path / "1.json").write_text('{"a": 7, "b": null}')
    rows = data.read_json(tmp_path)
    assert plain(rows.take(50_002)[49_999:]) == [
        {"a": 1, "s": {"k": 1, "m": None}, "b": None},
        {"a": 1.5, "s": {"k": None, "m": "2020-01-01"}, "b": [2]},
        {"a": 7, "s": None, "b": None},
    ]


def test_hidden_names_do_not_count_unless_a_pattern_has_them(tmp_path: Path) -> None:
    folder = tmp_path / "_runs" / "run[1]"
    for place, name in enumerate(("", "_temporary/0", ".ipynb_checkpoints", "deep/.hidden")):
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table({"x": [place]}), folder / name / "a.parquet")
    for pattern, found in {
        "": [0], "/*": [0], "/**/*.parquet": [0], "/*.parquet": [0], "/_temporary": [1], "/_*/*/*.parquet": [1],
        "/.ipynb*/*": [2], "/*/.hidden/*": [3],
    }.items():  # fmt: skip
        path = str(folder) if not pattern else str(folder).replace("[1]", "?1?") + pattern
        assert [row["x"] for row in data.read_parquet(path).take()] == found, pattern


def test_the_rows_to_shuffle_depend_on_their_size_in_memory(tmp_path: Path) -> None:
    """In Parquet, many equal texts take almost no space."""
    pq.write_table(pa.table({"text": ["a" * 1000] * 300_000}), tmp_path / "a.parquet")
    order = data.read_parquet(tmp_path).random_shuffle().opened.order
    assert order.window == 65536


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def read(**options: Any) -> None:
        list(shard(data.read_parquet(tmp_path, **options)).iter_batches())

    with pytest.raises(DataError, match="has no parquet files"):
        read()
    for name, values in {"a": [1, 2], "b": [3, 4], "c": [5.5, 6.5]}.items():
        pq.write_table(pa.table({"x": values, "y": [0, 0]}), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"c.parquet has other columns than .*Field x .*int64 vs double; convert"):
        read()
    read(columns=["y"])
    with pytest.raises(DataError, match=r"there is no column 'z' in .*; there are \['x', 'y'\]"):
        read(columns=["z"])

    pq.write_table(pa.table({"x": range(3000)}), tmp_path / "c.parquet", row_group_size=1000, compression="none")
    body = bytearray((tmp_path / "c.parquet").read_bytes())
    place = pq.ParquetFile(tmp_path / "c.parquet").metadata.row_group(1).column(0).data_page_offset
    body[place - 20 : place + 60] = bytes(80)
    (tmp_path / "c.parquet").write_bytes(body)
    with pytest.raises(DataError, match=r"dataset 'x': cannot read .*c.parquet, row group 1: "):
        read(columns=["x"])
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"cannot read .*b.parquet: "):
        read()
    with pytest.raises(DataError, match="there is no file or directory /no/such"):
        data.read_csv("/no/such").count()
    with pytest.raises(DataError, match=r"^cannot read example://a: Protocol not known: example$"):
        data.read_csv("example://a").count()


def test_waiting_for_data_is_said_once_on_rank_0(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def slow(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.002)
        return row

    monkeypatch.setattr(loops, "_NOTICE_AFTER_S", 0.01)
    for rank in (0, 1):
        part = shard(data.range(20).map(slow), rank, 2)
        for _ in range(2):
            list(part.iter_batches(batch_size=2))
    errors = capfd.readouterr().err
    assert errors.count("dataset 'x': train_func mostly waits for data: dataset 'x': ") == 1


def test_huggingface_keeps_digits_and_decodes_images() -> None:
    import datasets

    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    columns = {"f": [1700000000.25, 1e300], "i": [2**60, None], "b": [b"\x01\x00", b""], "m": [[[1]], [[2]]]}
    features = datasets.Features({
        "f": datasets.Value("float64"), "image": datasets.Image(), "i": datasets.Value("int64"),
        "b": datasets.Value("binary"), "m": datasets.Array2D((1, 1), "int64"),
    })  # fmt: skip
    dataset = datasets.Dataset.from_dict({**columns, "image": [image, image]}, features=features)
    (batch,) = shard(data.from_huggingface(dataset)).iter_batches()
    assert list(batch) == [*columns, "image"]
    assert {name: batch[name].tolist() for name in "fbm"} == {name: columns[name] for name in "fbm"}
    assert next(iter(shard(data.from_huggingface(dataset)).iter_rows()))["i"] == 2**60
    np.testing.assert_array_equal(batch["i"], [2**60, np.nan])
    assert batch["image"].dtype == np.uint8
    assert (batch["image"] == image).all()
    dataset.set_format(columns=["f"])
    assert shard(data.from_huggingface(dataset)).schema().names == ["f"]
    dataset.set_format("numpy", dtype=np.float16, columns=["m"])
    assert next(iter(shard(data.from_huggingface(dataset)).iter_batches()))["m"].dtype == np.float16, "as it was asked"


def test_a_long_text_does_not_make_the_others_long() -> None:
    rows = [{"text": "a" * 300_000}, *({"text": "b"} for _ in range(255))]
    (batch,) = shard(data.from_items(rows)).iter_batches()
    assert batch["text"].dtype == object
    assert batch["text"].nbytes < 10_000
    frame = pd.DataFrame(rows)
    assert shard(data.from_pandas(frame)).schema().types == [np.dtype(object)]
    assert shard(data.from_numpy({"text": np.array(["a", "b"])})).schema().types == [np.dtype(object)]


@pytest.mark.parametrize(("make", "error"), [
    (lambda: pd.DataFrame([[1, 2]], columns=["x", "x"]), "two columns are named 'x'; rename one of them"),
    (lambda: pd.DataFrame([[1, 2]], columns=[1, "1"]), "two columns are named '1'; rename one of them"),
    (lambda: {1: [1], "1": [2]}, "two columns are named '1'; rename one of them"),
    (lambda: pa.table([[1], [2]], names=["x", "x"]), "two columns are named 'x'; rename one of them"),
    (lambda: {"x": torch.zeros(2, dtype=torch.bfloat16)}, "column 'x' cannot become an array: .*BFloat16"),
    (lambda: {"x": pa.array([1001], pa.time64("ns"))}, "column 'x' cannot become an array: .*nanoseconds"),
])  # fmt: skip
def test_columns_that_have_no_arrays(make: Callable[[], Any], error: str) -> None:
    with pytest.raises(DataError, match=error):
        list(shard(as_dataset(make, "x")).iter_batches())


def test_tensors_and_views_of_arrow(tmp_path: Path) -> None:
    tensors = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [1, 2]), pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    )
    table = pa.table({"tensor": tensors, "view": pa.array(["a", None, "c"], pa.string_view())})
    pq.write_table(table, tmp_path / "a.parquet")
    for rows in as_dataset(table, "x"), data.read_parquet(tmp_path):
        found = shard(rows.random_shuffle(seed=1).filter(lambda row: True)).iter_rows()
        assert sorted(map(repr, plain(list(found)))) == sorted(map(repr, [
            {"tensor": [[1, 2]], "view": "a"}, {"tensor": None, "view": None}, {"tensor": [[3, 4]], "view": "c"},
        ]))  # fmt: skip


def test_tensors_of_arrow_with_missing_values_and_another_order_of_axes() -> None:
    """pyarrow reads missing values as 0, and rows beside missing ones with their values in another order."""
    kind = pa.fixed_shape_tensor(pa.int64(), [2, 3], permutation=[1, 0])
    rows = [[1, 2, 3, 4, 5, 6], None, [None] * 5 + [7]]
    tensors = pa.ExtensionArray.from_storage(kind, pa.array(rows, pa.list_(pa.int64(), 6)))
    found = shard(as_dataset(pa.table({"x": tensors}), "x")).iter_rows()
    values = [[[1, 4], [2, 5], [3, 6]], None, [[None, None], [None, None], [None, 7]]]
    assert plain(list(found)) == [{"x": value} for value in values]


def test_names_of_files_and_directories(tmp_path: Path) -> None:
    """A column must not come from a directory and from its files. Any other name works."""
    error = r"column 'k' is in .*/k=1/a.parquet, and comes from the name of its directory, too; rename"
    for kind in ("int64", "object"):
        (tmp_path / kind / "k=1").mkdir(parents=True)
        pq.write_table(pa.table({"x": [1], "k": np.array([5], kind)}), tmp_path / kind / "k=1" / "a.parquet")
        with pytest.raises(DataError, match=error):
            data.read_parquet(tmp_path / kind).schema()
    (tmp_path / "ok" / "_k=1").mkdir(parents=True)
    (tmp_path / "ok" / "_temporary").mkdir(parents=True)
    for path in ("_k=1/a:b.parquet", "_temporary/c.parquet"):
        pq.write_table(pa.table({"x": [1]}), tmp_path / "ok" / path)
    assert data.read_parquet(tmp_path / "ok").take() == [{"x": 1, "_k": 1}]
    assert data.read_parquet(tmp_path / "ok" / "_k=1" / "a:b.parquet").take() == [{"x": 1}]


def test_subclasses_of_numbers_and_empty_lists_become_tensors() -> None:
    numbers = {"enum": http.HTTPStatus.OK, "large": 2**63, "lists": []}
    (batch,) = shard(data.from_items([numbers, {**numbers, "large": 1}])).iter_torch_batches(device="cpu")
    assert batch["enum"].tolist() == [200, 200]
    assert batch["large"].tolist() == [2**63, 1]
    assert batch["lists"].shape == (2, 0)


def test_lists_of_dates_become_columns_of_arrow() -> None:
    table = pa.table({"x": pa.array([[datetime.date(2000, 1, 2), None], [], None], pa.list_(pa.date32()))})
    rows = as_dataset(table, "x").map_batches(lambda batch: batch)
    (batch,) = shard(rows).iter_batches(batch_format="pyarrow")
    assert batch.equals(table)
