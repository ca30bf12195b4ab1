"""Datasets for training: read, divided among the workers, and resumed where a checkpoint was taken.

A trainer pickles descriptions of datasets with the job; a worker opens them. ``order`` computes the order of the rows
and which of them a rank has, as a pure function of the seed, the epoch and the position. ``prefetch`` reads and
converts batches in a thread, and ``loops`` counts a batch when train_func gets it. ``report()`` with a checkpoint takes
the positions along.

Names are loaded when they are first used. Runs in: anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.system.imports import lazy_names

if TYPE_CHECKING:
    from distrain.data.constructors import from_huggingface as from_huggingface
    from distrain.data.constructors import from_items as from_items
    from distrain.data.constructors import from_numpy as from_numpy
    from distrain.data.constructors import from_pandas as from_pandas
    from distrain.data.constructors import range as range
    from distrain.data.constructors import read_csv as read_csv
    from distrain.data.constructors import read_json as read_json
    from distrain.data.constructors import read_parquet as read_parquet
    from distrain.data.dataset import Dataset as Dataset
    from distrain.data.iterator import DataIterator as DataIterator
    from distrain.data.sources import Schema as Schema

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
