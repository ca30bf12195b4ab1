"""``ray.data.preprocessors``: the most common ones, on the columns that numpy has. Runs in: anywhere.

``fit()`` reads the columns into memory. ``transform()`` adds a function that the workers call, batch by batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from distrain.as_ray.data.dataset import Dataset
from distrain.data.blocks import as_block, is_instance, object_types, to_columns, to_frame
from distrain.data.dataset import Dataset as PlainDataset
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.data.blocks import Columns


class PreprocessorNotFittedException(RuntimeError):
    """``transform()`` came before ``fit()``."""


class Preprocessor:
    """A change of columns. A class derived from it has ``_transform_numpy()`` or ``_transform_pandas()``.

    ``_fit()``, which not all need, stores what it finds in ``stats_``.
    """

    _is_fittable = True
    stats_: Any = None

    def _fit(self, ds: Any) -> Any:
        return self

    def fit(self, ds: PlainDataset) -> Any:
        """Look at the rows."""
        self._fit(Dataset.of(ds))
        if self.stats_ is None:
            self.stats_ = {}
        return self

    def transform(self, ds: PlainDataset) -> Dataset:
        """Return the dataset with the new columns."""
        function, batch_format = self._function()
        return Dataset.of(PlainDataset.map_batches(ds, function, batch_format=batch_format))

    def fit_transform(self, ds: PlainDataset) -> Dataset:
        """Look at the rows, and return the dataset with the new columns."""
        self.fit(ds)
        return self.transform(ds)

    def transform_batch(self, data: Any) -> Any:
        """Return a DataFrame or a dict of arrays with the new columns."""
        function, batch_format = self._function()
        convert = to_frame if batch_format == "pandas" else to_columns
        made = as_block(function(convert(as_block(data, "transform_batch()"))), type(self).__name__)
        return to_frame(made) if is_instance(data, "pandas", "DataFrame") else to_columns(made)

    def _function(self) -> tuple[Callable[[Any], Any], str]:
        """Return the function for batches, and their format. Raises an error before ``fit()``."""
        if self._is_fittable and self.stats_ is None:
            raise PreprocessorNotFittedException("call fit() before transform(), or fit_transform() for both")
        if function := getattr(self, "_transform_numpy", None):
            return function, "numpy"
        return getattr(self, "_transform_pandas"), "pandas"  # noqa: B009 - derived classes of the user's have it


_EMPTY: np.ndarray[Any, Any] = np.empty(0)


class _OfColumns(Preprocessor):
    """A change of each of some columns by itself."""

    def __init__(self, columns: Sequence[str], output_columns: Sequence[str] | None = None) -> None:
        self.columns = list(columns)
        self.output_columns = list(output_columns or columns)

    def _fit(self, ds: Dataset) -> Any:
        found = to_columns(ds.select_columns(self.columns).read())
        self.stats_ = {
            key: value for name in self.columns for key, value in self._facts(name, found.get(name, _EMPTY)).items()
        }
        return self

    def _transform_numpy(self, batch: Columns) -> Columns:
        pairs = zip(self.columns, self.output_columns, strict=True)
        return {**batch, **{new: self._changed(name, _column(batch, name)) for name, new in pairs}}

    def _facts(self, name: str, column: np.ndarray[Any, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _changed(self, name: str, column: np.ndarray[Any, Any]) -> Any:
        raise NotImplementedError


def _column(batch: Columns, name: str) -> np.ndarray[Any, Any]:
    if name not in batch:
        raise DataError(f"there is no column {name!r}; there are {sorted(batch)}")
    return batch[name]


def _numbers(name: str, column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a column of numbers, with NaN for those that are missing. Raises DataError for other values."""
    kinds = set(map(type, column)) if column.dtype == object else set()
    if not kinds <= {int, float, type(None)} or column.dtype.kind not in "biufcO":
        types = object_types(column) if kinds else column.dtype
        raise DataError(f"column {name!r} has values of type {types}, where numbers are needed")
    return np.asarray(column, float) if kinds else column


def _present(name: str, column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the numbers of a column that are not missing. Raises DataError if there are none."""
    numbers = _numbers(name, column)
    found: np.ndarray[Any, Any] = numbers[~np.isnan(numbers)]
    if not found.size:
        raise DataError(f"column {name!r} has no values to fit to: all are missing")
    return found


class StandardScaler(_OfColumns):
    """Scale columns to mean 0 and standard deviation 1."""

    def _facts(self, name: str, column: np.ndarray[Any, Any]) -> dict[str, Any]:
        numbers = _present(name, column)
        return {f"mean({name})": float(numbers.mean()), f"std({name})": float(numbers.std())}

    def _changed(self, name: str, column: np.ndarray[Any, Any]) -> Any:
        return (_numbers(name, column) - self.stats_[f"mean({name})"]) / (self.stats_[f"std({name})"] or 1)


class MinMaxScaler(_OfColumns):
    """Scale columns to values from 0 to 1."""

    def _facts(self, name: str, column: np.ndarray[Any, Any]) -> dict[str, Any]:
        numbers = _present(name, column)
        return {f"min({name})": numbers.min().item(), f"max({name})": numbers.max().item()}

    def _changed(self, name: str, column: np.ndarray[Any, Any]) -> Any:
        least, most = self.stats_[f"min({name})"], self.stats_[f"max({name})"]
        return (_numbers(name, column) - least) / ((most - least) or 1)


class Concatenator(Preprocessor):
    """Join columns into one column of arrays."""

    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        output_column_name: str = "concat_out",
        dtype: Any = None,
        raise_if_missing: bool = False,
        flatten: bool = False,
    ) -> None:
        self.columns = list(columns)
        self.output_column_name = output_column_name
        self.dtype = dtype

    def _transform_numpy(self, batch: Columns) -> Columns:
        numbers = [_numbers(name, _column(batch, name)) for name in self.columns]
        parts = [column.reshape(len(column), -1) for column in numbers]
        kept = {name: column for name, column in batch.items() if name not in self.columns}
        joined = np.concatenate(parts, axis=1)
        return {**kept, self.output_column_name: joined if self.dtype is None else joined.astype(self.dtype)}


class Chain(Preprocessor):
    """Several changes, one after the other."""

    def __init__(self, *preprocessors: Preprocessor) -> None:
        self.preprocessors = preprocessors
        self._is_fittable = any(each._is_fittable for each in preprocessors)

    def _fit(self, ds: Dataset) -> Any:
        for each in self.preprocessors:
            ds = each.fit_transform(ds)
        return self

    def transform(self, ds: PlainDataset) -> Dataset:
        """Return the dataset after all changes."""
        for each in self.preprocessors:
            ds = each.transform(ds)
        return Dataset.of(ds)

    def transform_batch(self, data: Any) -> Any:
        """Return a batch after all changes."""
        for each in self.preprocessors:
            data = each.transform_batch(data)
        return data
