"""ray.data of the stand-in: what scripts of Ray Data write, with the results that Ray 2.60 gives."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from distrain import DataConfig
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def rd() -> Any:
    import ray.data  # type: ignore[import-not-found, unused-ignore]

    return ray.data


def plain(value: Any) -> Any:
    """Arrays and tensors as lists, with the type of their items in front."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return [str(value.dtype), value.tolist()]
    return value


def sorted_rows(dataset: Any) -> list[Any]:
    return sorted(plain(dataset.take_all()), key=repr)


class Adds:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, thing: dict[str, Any], more: int = 0) -> dict[str, Any]:
        return {"id": thing["id"] + self.number + more}


IDS = [{"id": 0}, {"id": 1}]
PAIRS = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
GROUPS = [{"k": number % 2, "v": number} for number in range(5)]
IDIOMS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "dicts": (lambda rd: rd.from_items(PAIRS).take_all(), PAIRS),
    "types of objects": (lambda rd: list(map(str, rd.from_torch([(torch.ones(2), "a")]).schema().types)), ["object"]),
    "tables": (lambda rd: rd.from_arrow([pa.table({"id": [0]}), pa.table({"id": [1]})]).take(), IDS),
    "values of Python": (lambda rd: json.dumps(rd.range(1).map(lambda row: {"x": type(row["id"]).__name__}).take()),
                         '[{"x": "int"}]'),
    "map class": (lambda rd: rd.range(1).map(Adds, fn_constructor_args=(9,), concurrency=2).take(), [{"id": 9}]),
    "map_batches": (lambda rd: rd.range(2).map_batches(lambda batch: {"y": batch["id"] / 2}, num_gpus=1).take(),
                    [{"y": 0.0}, {"y": 0.5}]),
    "map_batches pandas": (lambda rd: rd.range(2).map_batches(lambda frame: frame.assign(y=frame["id"] + 1),
                                                              batch_format="pandas").take(1), [{"id": 0, "y": 1}]),
    "map_batches class": (lambda rd: rd.range(1).map_batches(Adds, fn_constructor_kwargs={"number": 3},
                                                             fn_kwargs={"more": 4}, concurrency=1).take(), [{"id": 7}]),
    "map_batches fewer": (lambda rd: rd.range(9).map_batches(lambda batch: {"id": batch["id"][:1]}, batch_size=3)
                          .take(2), [{"id": 0}, {"id": 3}]),
    "flat_map": (lambda rd: rd.range(3).flat_map(lambda row: [row] * row["id"]).take(),
                 [{"id": 1}, {"id": 2}, {"id": 2}]),
    "add_column": (lambda rd: rd.range(1).add_column("n", lambda frame: frame["id"] + 5).take(), [{"id": 0, "n": 5}]),
    "add_column constant time": (
        lambda rd: rd.range(1).add_column("n", lambda frame: np.datetime64(1, "ns")).take(),
        [{"id": 0, "n": np.datetime64(1, "ns")}],
    ),
    "rename all": (lambda rd: rd.from_arrow(pa.table({"q": [0]})).rename_columns(["id"]).take(), IDS[:1]),
    "split_at_indices": (lambda rd: [part.take_batch()["id"].tolist() for part in rd.range(4).split_at_indices([1, 2])],
                         [[0], [1], [2, 3]]),
    "union": (lambda rd: rd.range(1).union(rd.from_items([{"id": 1}])).materialize().take(), IDS),
    "iter_batches": (lambda rd: [len(batch["id"]) for batch in rd.range(600).iter_batches()], [256, 256, 88]),
    "iter_torch_batches": (lambda rd: list(rd.range(3).iter_torch_batches(batch_size=2, dtypes=torch.float32)),
                           [{"id": ["torch.float32", [0.0, 1.0]]}, {"id": ["torch.float32", [2.0]]}]),
    "sums": (lambda rd: [rd.range(5).sum("id"), rd.range(5).mean("id"), rd.range(5).max(["id"])],
             [10, 2.0, {"max(id)": 4}]),
    "unique text": (lambda rd: rd.from_items([{"t": text} for text in ("a", None, "a")]).unique("t"), ["a", None]),
    "sort": (lambda rd: rd.from_items(GROUPS).sort(["k", "v"], descending=[True, False]).take(1), [{"k": 1, "v": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("name", IDIOMS)
def test_idioms(name: str, rd: Any) -> None:
    idiom, expected = IDIOMS[name]
    found = plain(idiom(rd))
    assert found == expected
    assert repr(found) == repr(expected), "values of Python, too"


def test_files_are_added_to_those_that_are_there(rd: Any, tmp_path: Path) -> None:
    path, dataset = str(tmp_path / "files"), rd.from_items(PAIRS)
    dataset.write_parquet(path)
    dataset.write_parquet(f"{path}/", concurrency=2)
    assert rd.read_parquet(path).count() == 4
    with pytest.raises(
        TypeError, match=r"write_parquet\(mode=...\) is not supported: files are added to a directory: delete it"
    ):
        dataset.write_parquet(path, mode="overwrite")


def test_files(rd: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("cat", "dog"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        Image.fromarray(np.full((4, 6, 3), len(kind), np.uint8)).save(tmp_path / "images" / kind / "1.png")
    images = str(tmp_path / "images")
    assert rd.read_images(images, size=(2, 3)).take_batch()["image"].shape == (2, 2, 3, 3)
    assert rd.read_images(images, mode="L", include_paths=True).drop_columns("image").take() == [
        {"path": f"{images}/{kind}/1.png"} for kind in ("cat", "dog")
    ]
    (tmp_path / "rows.json").write_text("".join(f"{json.dumps(row)}\n" for row in PAIRS))
    rd.from_items(PAIRS).write_parquet(str(tmp_path / "parquet"))
    (tmp_path / "csv").write_text("a;b\n1;x\n2;y\n")
    assert rd.read_json(str(tmp_path / "rows.json")).take() == PAIRS
    assert rd.read_csv(str(tmp_path / "csv"), parse_options=pyarrow.csv.ParseOptions(delimiter=";")).take() == PAIRS
    assert rd.read_parquet(str(tmp_path / "parquet"), columns=["a"], shuffle="files", concurrency=2).count() == 2
    rd.read_parquet(str(tmp_path / "parquet")).show(1)
    assert capsys.readouterr().out == "{'a': 1, 'b': 'x'}\n"


def test_settings_have_no_effect(rd: Any) -> None:
    context = rd.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits.cpu = 2
    context.target_max_block_size = 1 << 20
    assert rd.context.DataContext.get_current().target_max_block_size == 1 << 20
    assert rd.ExecutionOptions(resource_limits=rd.ExecutionResources(cpu=2)).resource_limits.cpu == 2


CONDITIONS = {
    "x > 1": [2, 3],
    "x != 2": [0, 1, 3],
    "not x > 1": [0, 1],
    "-1 < x <= 0 or `s.t` == 'b'": [0, 3],
    "`s.t` in ['a', 'c'] and x + 1 >= 2": [1, 2],
    "x not in (0, 1)": [2, 3, 4],
    "x.isna() or x == 9007199254740993": [3, 4],
}
"""With the rows that meet them; missing values meet no comparison."""


@pytest.mark.parametrize("form", ["from_arrow", "from_items", "read_parquet"])
def test_rows_are_kept_by_a_condition(rd: Any, form: str, tmp_path: Path) -> None:
    table = pa.table({"row": range(5), "x": [0, 1, 2, 2**53 + 1, None], "s.t": ["a", "a", "c", "b", None]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    made = {"from_arrow": table, "from_items": table.to_pylist(), "read_parquet": str(tmp_path)}[form]
    rows = getattr(rd, form)(made)
    found = {text: [row["row"] for row in rows.filter(expr=text).take_all()] for text in CONDITIONS}
    assert found == CONDITIONS
    assert [row["row"] for row in rows.filter(expr=pc.field("x") > 1).select_columns("row").take_all()] == [2, 3]
    assert rows.filter(expr="x > 1").count() == 2
    if form == "read_parquet":
        chosen = rd.read_parquet(made, columns=["row"], filter=(pc.field("x") > 1) & ~pc.field("s.t").isin(["b"]))
        assert chosen.take_all() == [{"row": 2}]


def test_a_file_of_json_may_be_one_list(rd: Any, tmp_path: Path) -> None:
    """Text and integers stay as they are, and a column may be missing in a row or a file."""
    rows = [{"a": 2**60 + 1, "s": "2020-01-01"}, {"a": 2, "b": [1.5]}]
    (tmp_path / "0.json").write_text("\ufeff \n" + json.dumps(rows, indent=2))
    (tmp_path / "1.json").write_text('[{"a": 3}]')
    found = rd.read_json(str(tmp_path))
    assert [{name: value for name, value in row.items() if value is not None} for row in plain(found.take_all())] == [
        rows[0],
        {"a": 2, "b": ["float64", [1.5]]},
        {"a": 3},
    ]
    assert found.count() == 3
    (tmp_path / "1.json").write_text("[1, 2]")
    with pytest.raises(DataError, match=r"cannot read .*1.json"):
        rd.read_json(str(tmp_path)).take_all()


def test_file_extensions_choose_files(rd: Any, tmp_path: Path) -> None:
    for name, text in ("a.tab", "x\n1\n"), ("b.CSV", "x\n2\n"), ("c.txt", "x\n3\n"):
        (tmp_path / name).write_text(text)
    Image.new("L", (1, 1)).save(tmp_path / "d.png")
    found = {
        "tab": rd.read_csv(str(tmp_path), file_extensions=["tab"]).count(),
        "csv or .txt": rd.read_csv(str(tmp_path), file_extensions=["csv", ".txt"]).count(),
        "None": rd.read_csv(str(tmp_path), file_extensions=None).count(),
        "images": rd.read_images(str(tmp_path), file_extensions=["png"]).count(),
    }
    assert found == {"tab": 1, "csv or .txt": 2, "None": 1, "images": 1}
    with pytest.raises(DataError, match=r"has no .pq files, but 4 others"):
        rd.read_parquet(str(tmp_path), file_extensions=["pq"]).count()


def test_a_shuffle_without_a_seed_is_another_order_each_time(rd: Any) -> None:
    rows = rd.range(100)
    orders = [rows.random_shuffle() for _ in range(3)] + [rows.repartition(2, shuffle=True)]
    orders += [rows.train_test_split(50, shuffle=True)[1] for _ in range(2)]
    assert len({repr(order.take_all()) for order in orders}) == 6
    seeded = rd.FileShuffleConfig(seed=3)
    assert seeded.seed == 3
    assert rows.random_shuffle(seed=0).take_all() == rows.random_shuffle(seed=0).take_all()


@pytest.mark.parametrize(
    ("idiom", "text"),
    [
        (lambda rd: rd.preprocessors.StandardScaler, r"transform the rows in map_batches\(\)"),
        (lambda rd: rd.range(2).iterator().to_torch(), r"use iter_batches\(\), iter_torch_batches\(\)"),
        (lambda rd: rd.range(2).split(2), r"has no split\(\) in distrain: use train_test_split\(\); datasets="),
        (lambda rd: rd.range(2).write_csv("x"), r"use write_parquet\(\), or the methods of to_pandas\(\)"),
        (lambda rd: rd.read_text("x"), r"use ray.data.from_items\(\) with paths or lines, and map\(\)"),
        (
            lambda rd: rd.range(2).map(print, fn_constructor_args=[1]),
            r"map\(fn_constructor_args=...\) is not supported",
        ),
        (lambda rd: rd.range(2).no_such_method(), r"use to_pandas\(\) before training"),
        (lambda rd: rd.range(2).train_test_split(1, stratify="id"), r"\(stratify=...\) is not .* of scikit-learn"),
        (
            lambda rd: rd.from_items([{"a": 1, "b": 2}]).rename_columns({"a": "b"}).take(),
            r"rename_columns\(\) gives several columns one name: \['b', 'b'\]",
        ),
        (lambda rd: rd.range(2).filter(expr="idd > 1").take(), r"name 'idd' is not defined"),
        (lambda rd: rd.range(2).groupby("id").sum("id"), r"has no groupby\(\) in distrain: use to_pandas\(\) before"),
        (lambda rd: rd.read_csv("x", filesystem=1), r"read_csv\(filesystem=...\) is not supported: give a URL"),
        (lambda rd: rd.range(2).drop_columns(["q"]).take(), r"names the column 'q'; there are \['id'\]"),
        (lambda rd: type("Own", (DataConfig,), {"configure": print}), r"Own.configure\(\) would never be called"),
    ],
)
def test_what_is_not_offered_says_what_to_do(rd: Any, idiom: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(Exception, match=text) as raised:
        idiom(rd)
    assert "\n" not in str(raised.value)


def test_no_rows(rd: Any, tmp_path: Path) -> None:
    nothing = rd.from_items([{"a": 1.5, "s": "x"}]).filter(lambda row: False)
    for rows in nothing, nothing.materialize(), rd.from_pandas(pd.DataFrame({"a": [1.5], "s": "x"})[:0]):
        assert rows.columns() == ["a", "s"]
        assert {name: len(column) for name, column in rows.take_batch().items()} == {"a": 0, "s": 0}
        assert list(rows.take_batch(batch_format="pandas")) == rows.take_batch(batch_format="pyarrow").column_names
        assert [rows.sum("a"), rows.unique("a")] == [0, []]
        assert rows.sort("a").union(rd.from_items(PAIRS[:0])).count() == 0
    nothing.write_parquet(str(tmp_path / "files"))
    assert rd.read_parquet(str(tmp_path / "files")).columns() == ["a", "s"]


def test_files_that_are_broken_are_named(rd: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=f"cannot read {tmp_path}/a.png: "):
        rd.read_images(str(tmp_path / "a.png")).take()
