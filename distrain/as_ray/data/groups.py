"""``Dataset.groupby()`` of ``ray.data``, with the groups of pandas. Runs in: anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.as_ray.data.arguments import check_options, names_of
from distrain.data.blocks import as_block, formatter, joined, to_columns

if TYPE_CHECKING:
    from collections.abc import Callable


class GroupedData:
    """Rows in groups, in memory; ``Dataset.groupby()`` returns it."""

    def __init__(self, frame: Any, key: str | list[str], make: Callable[[Any], Any]) -> None:
        """``make``: returns the dataset of a block."""
        self._make = make
        self._groups = frame.groupby(names_of(key), dropna=False)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"GroupedData has no {name}() in distrain: use map_groups(), or to_pandas().groupby()")

    def count(self) -> Any:
        """Return the number of rows of each group."""
        return self._make(self._groups.size().reset_index(name="count()"))

    def map_groups(self, fn: Callable[..., Any], *, batch_format: str | None = "default", **options: Any) -> Any:
        """Return the rows that a function makes of each group."""
        check_options("map_groups", options)
        to_format = formatter(batch_format)
        groups = (to_format(as_block(frame, "groupby()")) for _, frame in self._groups)
        return self._make(joined([to_columns(as_block(fn(group), "map_groups()")) for group in groups]))
