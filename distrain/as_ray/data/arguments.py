"""Ray's arguments for the functions of ``ray.data``, and the functions of the user's. Runs in: anywhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain.data.blocks import as_block, joined, row_count, to_columns, to_table
from distrain.data.dataset import Constructed
from distrain.errors import DataError
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.data.blocks import Block

WITHOUT_EFFECT = frozenset(
    {
        "compute", "concurrency", "lines", "locality_hints", "max_retries", "memory", "num_blocks", "num_cpus",
        "num_gpus", "override_num_blocks", "parallelism", "ray_remote_args", "ray_remote_args_fn", "resources",
        "runtime_env", "zero_copy_batch",
    }
)  # fmt: skip
"""Arguments of Ray that say where and in how many pieces it works. Here, each worker reads its own rows."""
_INSTEAD = {
    "aggregate": "use sum(), mean() and the like, or to_pandas().agg()",
    "arrow_open_stream_args filesystem": "give a URL of fsspec, such as s3://bucket/folder, as the path",
    "describe summary": "use to_pandas().describe()",
    "filters": "use filter=, with an expression of pyarrow.compute",
    "ignore_missing_paths partition_filter": "pass the list of the files to read, or a pattern",
    "include_paths": "only read_images() has it; for others, pass the paths to from_items(), and read them in map()",
    "input_files": "keep the paths that you read",
    "join zip": "use pandas.merge() or pandas.concat() with to_pandas() of both, and ray.data.from_pandas()",
    "partitioning": "leave it out: key=value in a path is a column",
    "random_sample": "use random_shuffle().limit(), or filter(lambda row: random.random() < 0.1).materialize()",
    "randomize_block_order": "use random_shuffle(), which also brings the blocks in a random order",
    "schema tensor_column_schema dtype": "convert the columns in map_batches()",
    "split_proportionately": "use split_at_indices(), or train_test_split() for two parts",
    "stratify": "use train_test_split() of scikit-learn with to_pandas(), and ray.data.from_pandas() for both parts",
    "streaming_split iterator_split": "pass it as datasets= of the trainer, and call get_dataset_shard() in train_func",
    "streaming_train_test_split": "use train_test_split()",
    "to_arrow to_arrow_refs to_dask to_modin to_numpy_refs to_pandas_refs to_random_access_dataset to_spark": (
        "use to_pandas()"
    ),
    "to_torch": "use iter_torch_batches()",
    "with_column with_columns": "use add_column() or map_batches()",
    "write_": "use write_parquet() or write_csv(), or the methods of to_pandas()",
    "": "use to_pandas() before training, and pass what you make of it to ray.data.from_pandas()",
}
"""What to use instead of methods and arguments of Ray; the last two are for other names that begin so."""

_CONDITION_ADVICE = (
    "write comparisons of columns as in \"x > 1 and y in ['a', 'b']\", or filter(lambda row: row['x'] > 1)"
)


def instead_of(name: str) -> str:
    """Return what to use instead of a method or an argument of Ray."""
    return next(advice for names, advice in _INSTEAD.items() if name in names.split() or name.startswith(names))


def check_options(function: str, options: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that would change the rows, and that the stand-in lacks."""
    for name in sorted(options.keys() - WITHOUT_EFFECT):
        if options[name]:
            raise TypeError(f"{function}({name}=...) is not supported: {instead_of(name)}")


# -- functions of the user's -------------------------------------------------------------------------------------------


def constructed(fn: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Return a function; of a class, the object that is constructed at the first call."""
    if (args or kwargs) and not isinstance(fn, type):
        raise ValueError(f"fn_constructor_args and fn_constructor_kwargs are for a class, got {fn!r}")
    made: Callable[..., Any] = Constructed(fn, args or (), kwargs or {}) if isinstance(fn, type) else fn
    return made


def all_batches(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return a function of a batch, which joins the batches that the user's function yields."""

    def mapped(batch: Any) -> Any:
        made = function(batch, *args, **kwargs)
        if isinstance(made, Iterator):
            return joined([to_columns(as_block(piece, "map_batches()")) for piece in made])
        return made

    return mapped


def for_rows(name: str, fn: Any, options: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a function of a row, which gets Python's values, and the arguments of Ray for it."""
    args, kwargs = options.pop("fn_args", None) or (), options.pop("fn_kwargs", None) or {}
    constructor = options.pop("fn_constructor_args", None), options.pop("fn_constructor_kwargs", None)
    check_options(name, options)
    function = constructed(fn, *constructor)
    return lambda row: function(plain(row), *args, **kwargs)


def kept_by(condition: Any) -> Callable[[Block], Block]:
    """Return a function that keeps the rows of a block for which a condition is true.

    Missing values meet no comparison.

    condition: an expression of ``pyarrow.compute``; or text for ``DataFrame.eval()`` of pandas, such as
        ``"x > 1 and (`a name`.notna() or z not in [2, 3])"``. Raises ValueError for others.
    """
    if isinstance(condition, str):
        try:
            ast.parse(re.sub("`[^`]*`", "name", condition), mode="eval")
        except SyntaxError as error:
            raise ValueError(f"filter(expr={condition!r}) cannot be read: {error}; {_CONDITION_ADVICE}") from error
    elif not isinstance(condition, require("pyarrow.compute").Expression):
        raise ValueError(f"filter(expr=...) takes text or an expression of pyarrow.compute, got {condition!r}")

    def kept(block: Block) -> Block:
        table, chosen = to_table(block), condition
        try:
            if isinstance(condition, str):
                frame = table.to_pandas(types_mapper=require("pandas").ArrowDtype)  # which has Arrow's missing values
                chosen = require("pyarrow").array(frame.eval(condition, engine="python"))
            return table.filter(chosen)
        except Exception as error:
            raise DataError(f"filter(expr={condition!r}): {error}; {_CONDITION_ADVICE}") from error

    return lambda block: kept(block) if row_count(block) else block


def plain(row: Any) -> Any:
    """Return a row with values of Python in place of numpy's."""
    return {name: plain_value(value) for name, value in row.items()} if isinstance(row, dict) else row


def plain_value(value: Any) -> Any:
    """Return a value of Python for one of numpy; of pandas for a time that Python has only as a number."""
    if not isinstance(value, np.generic):
        return value
    found = value.item()
    is_time = isinstance(value, (np.datetime64, np.timedelta64))
    return require("pandas").Series([value])[0] if is_time and isinstance(found, int) else found


def names_of(names: str | Sequence[str]) -> list[str]:
    """Return a list of names for one name, or for several."""
    return [names] if isinstance(names, str) else list(names)
