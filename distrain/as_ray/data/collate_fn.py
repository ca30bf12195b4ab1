"""``ray.data.collate_fn``: the base classes of collate functions for ``iter_torch_batches()``. Runs in: worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from distrain.data.frameworks import batches_of


class CollateFn(ABC):
    """A function that makes a batch of rows. ``batch_format``: the form in which it gets them."""

    batch_format = "numpy"

    @abstractmethod
    def __call__(self, batch: Any) -> Any:
        """Return the batch."""


class ArrowBatchCollateFn(CollateFn):
    """A function that gets a pyarrow Table."""

    batch_format = "pyarrow"


class NumpyBatchCollateFn(CollateFn):
    """A function that gets a dict of numpy arrays."""


class PandasBatchCollateFn(CollateFn):
    """A function that gets a pandas DataFrame."""

    batch_format = "pandas"


class DefaultCollateFn(ArrowBatchCollateFn):
    """Makes a tensor of each column. ``options``: of Ray's threads and chunks, without effect."""

    def __init__(self, dtypes: Any = None, **options: object) -> None:
        self._convert = batches_of("torch").converter(dtypes, None)

    def __call__(self, batch: Any) -> Any:
        """Return a dict of tensors."""
        return self._convert(batch)
