"""Ray's arguments for the functions of ``ray.data``, and the functions of the user's. Runs in: anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain.data.blocks import as_block, joined, to_columns
from distrain.data.transforms import Constructed
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WITHOUT_EFFECT = frozenset(
    {
        "compute", "concurrency", "max_retries", "memory", "num_blocks", "num_cpus", "num_gpus", "override_num_blocks",
        "parallelism", "ray_remote_args", "ray_remote_args_fn", "resources", "runtime_env", "zero_copy_batch",
    }
)  # fmt: skip
"""Arguments of Ray that say where and in how many pieces it works. Here, each worker reads its own rows."""
ELSEWHERE = (
    "use pandas, Polars, DuckDB or pyarrow before training, and pass the result to ray.data.from_pandas() or "
    "from_arrow()"
)


def check_options(function: str, options: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that would change the rows, and that the stand-in lacks."""
    for name in options.keys() - WITHOUT_EFFECT:
        if options[name]:
            raise TypeError(f"{function}({name}=...) is not supported: {ELSEWHERE}")


# -- functions of the user's -------------------------------------------------------------------------------------------


def constructed(fn: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Return a function; of a class, the object that is constructed at the first call."""
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


def plain(row: Any) -> Any:
    """Return a row with values of Python in place of numpy's."""
    return {name: plain_value(value) for name, value in row.items()} if isinstance(row, dict) else row


def plain_value(value: Any) -> Any:
    """Return a value of Python for one of numpy; of pandas for a time that Python has only as a number."""
    if not isinstance(value, np.generic):
        return value
    found = value.item()
    if isinstance(found, int) and isinstance(value, (np.datetime64, np.timedelta64)):
        pandas = require("pandas")
        return (pandas.Timestamp if isinstance(value, np.datetime64) else pandas.Timedelta)(value)
    return found


def names_of(names: str | Sequence[str]) -> list[str]:
    """Return a list of names for one name, or for several."""
    return [names] if isinstance(names, str) else list(names)
