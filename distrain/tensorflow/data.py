"""Datasets that hold one worker's part, as TensorFlow's. Runs in: anywhere with TensorFlow."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from distrain.data.blocks import Block, Columns, converted, object_types
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


def prepare_dataset_shard(tf_dataset_shard: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset with prefetching and without automatic sharding.

    Use it for a dataset that holds only this worker's share. A strategy would divide it again. ::

        rank, size = distrain.get_context().get_world_rank(), distrain.get_context().get_world_size()
        dataset = prepare_dataset_shard(tf.data.Dataset.range(100).shard(size, rank).batch(10))
    """
    return _unsharded(tf_dataset_shard).prefetch(tf.data.AUTOTUNE)


def _unsharded(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def converter(dtypes: Any) -> Callable[[Block], Any]:
    """Return the function that makes a dict of tensors of a block. ``dtypes``: of all tensors, or a dict by column."""
    return partial(converted, dtypes=dtypes, convert=_tensor)


def _tensor(name: str, column: Any, dtype: Any = None) -> tf.Tensor:
    try:
        kinds = set(map(type, column.flat)) if column.dtype == object else set()
        if kinds and not any(all(issubclass(kind, text) for kind in kinds) for text in (str, bytes)):
            raise TypeError(f"it has values of type {object_types(column)}")
        tensor = tf.convert_to_tensor(column)
        return tensor if dtype is None else tf.cast(tensor, dtype)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r} ({column.dtype}) cannot become a tensor: {error}; leave it out with columns=, or convert "
            "it with map_batches()"
        ) from error


def dataset_of(
    batches: Iterable[Columns], wanted: Sequence[tuple[str | Sequence[str], Any]], example: Columns
) -> tf.data.Dataset:
    """Return a ``tf.data.Dataset`` of tuples.

    wanted: for each element a column, or the columns of a dict; and its ``tf.TypeSpec`` (or a dict of these), or None.
    example: a batch from which the types follow.
    """
    specs = tuple(_map(_type_spec, columns, example) if spec is None else spec for columns, spec in wanted)

    def elements() -> Iterator[tuple[Any, ...]]:
        for batch in batches:
            yield tuple(
                _map(partial(_as_first, spec=spec) if own is None else _as_is, columns, batch)
                for (columns, own), spec in zip(wanted, specs, strict=True)
            )

    return _unsharded(tf.data.Dataset.from_generator(elements, output_signature=specs))


def _type_spec(name: str, column: Any) -> tf.TypeSpec:
    tensor = _tensor(name, column)
    return tf.TensorSpec(shape=(None, *tensor.shape[1:]), dtype=tensor.dtype)


def _as_is(name: str, column: Any) -> Any:
    return column


def _as_first(name: str, column: Any, spec: Any) -> Any:
    """Return a column of a batch with the type of the first row. Raises DataError if that would change values."""
    spec = spec[name] if isinstance(spec, dict) else spec
    tensor = _tensor(name, column)
    found = tensor
    if all(kind.is_floating or kind.is_integer for kind in (tensor.dtype, spec.dtype)):
        found = tf.cast(tensor, spec.dtype)
        is_same = tf.cast(found, tensor.dtype) == tensor
        if spec.dtype.is_floating and tensor.dtype.is_floating:
            is_same |= tensor != tensor
        found = found if tf.reduce_all(is_same) else tensor
    if not spec.is_compatible_with(found):
        raise DataError(
            f"column {name!r} is {spec.dtype.name} in the first row, with the shape {tuple(spec.shape[1:])}, and "
            f"{tensor.dtype.name} later, with the shape {tuple(tensor.shape[1:])}; convert it with map_batches(), or "
            "give to_tf() a type spec"
        )
    return found


def _map(function: Callable[[str, Any], Any], columns: str | Sequence[str], batch: Mapping[str, Any]) -> Any:
    """Return a function's value for one column, or a dict of those for several. Raises DataError for an unknown one."""
    try:
        if isinstance(columns, str):
            return function(columns, batch[columns])
        return {name: function(name, batch[name]) for name in columns}
    except KeyError as error:
        raise DataError(f"there is no column {error}; there are {sorted(batch)}") from None
