"""``Dataset.groupby()`` of ``ray.data``, with the groups of pandas. Runs in: anywhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from distrain.as_ray.data.arguments import ELSEWHERE, check_options, names_of
from distrain.data.blocks import as_block, formatter, joined, to_columns
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

AGGREGATES = ("max", "mean", "min", "std", "sum")


class GroupedData:
    """Rows in groups, in memory; ``Dataset.groupby()`` returns it. It has ``mean()``, ``sum()`` and the like."""

    def __init__(self, frame: Any, key: str | list[str], make: Callable[[Any], Any]) -> None:
        """``make``: returns the dataset of a block."""
        self._make = make
        self._groups = frame.groupby(names_of(key), dropna=False)

    def __getattr__(self, name: str) -> Any:
        if name in AGGREGATES:
            return partial(self._aggregated, name)
        raise AttributeError(f"GroupedData has no {name}() in distrain: {ELSEWHERE}")

    def count(self) -> Any:
        """Return the number of rows of each group."""
        return self._make(self._groups.size().reset_index(name="count()"))

    def map_groups(self, fn: Callable[..., Any], *, batch_format: str | None = "default", **options: Any) -> Any:
        """Return the rows that a function makes of each group."""
        check_options("map_groups", options)
        to_format = formatter(batch_format)
        groups = (to_format(as_block(frame, "groupby()")) for _, frame in self._groups)
        return self._make(joined([to_columns(as_block(fn(group), "map_groups()")) for group in groups]))

    def _aggregated(self, how: str, on: str | list[str] | None = None) -> Any:
        try:
            made = getattr(self._groups if on is None else self._groups[names_of(on)], how)()
        except (KeyError, TypeError) as error:
            raise DataError(f"groupby().{how}(on={on!r}): {error}; name columns of numbers") from error
        return self._make(made.add_prefix(f"{how}(").add_suffix(")").reset_index())
