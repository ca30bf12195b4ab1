"""``Dataset.groupby()`` of ``ray.data``, with the groups of pandas. Runs in: anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from distrain.as_ray.data.arguments import ELSEWHERE, check_options, names_of
from distrain.data.blocks import as_block, formatter, joined, to_columns
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable


class GroupedData:
    """Rows in groups, in memory; ``Dataset.groupby()`` returns it."""

    def __init__(self, frame: Any, key: str | list[str], make: Callable[[Any], Any]) -> None:
        """``make``: returns the dataset of a block."""
        self._make = make
        self._groups = frame.groupby(names_of(key), dropna=False)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"GroupedData has no {name}() in distrain: {ELSEWHERE}")

    def count(self) -> Any:
        """Return the number of rows of each group."""
        return self._make(self._groups.size().reset_index(name="count()"))

    def sum(self, on: str | list[str] | None = None) -> Any:
        """Return the sums of columns in each group."""
        return self._aggregated("sum", on)

    def mean(self, on: str | list[str] | None = None) -> Any:
        """Return the means of columns in each group."""
        return self._aggregated("mean", on)

    def min(self, on: str | list[str] | None = None) -> Any:
        """Return the least values of columns in each group."""
        return self._aggregated("min", on)

    def max(self, on: str | list[str] | None = None) -> Any:
        """Return the largest values of columns in each group."""
        return self._aggregated("max", on)

    def std(self, on: str | list[str] | None = None) -> Any:
        """Return the standard deviations of columns in each group."""
        return self._aggregated("std", on)

    def map_groups(
        self, fn: Callable[..., Any], *, batch_format: str | None = "default", fn_kwargs: Any = None, **options: Any
    ) -> Any:
        """Return the rows that a function makes of each group."""
        check_options("map_groups", options)
        to_format = formatter(batch_format)
        groups = (to_format(as_block(frame, "groupby()")) for _, frame in self._groups)
        made = [to_columns(as_block(fn(group, **(fn_kwargs or {})), "map_groups()")) for group in groups]
        return self._make(joined(made))

    def _aggregated(self, how: str, on: str | list[str] | None) -> Any:
        try:
            chosen = self._groups if on is None else self._groups[names_of(on)]
            made = getattr(chosen, how)()
        except (KeyError, TypeError) as error:
            raise DataError(f"groupby().{how}(on={on!r}): {error}; name columns of numbers") from error
        return self._make(made.add_prefix(f"{how}(").add_suffix(")").reset_index())
