"""The datasets of a run: they travel with the job, and each worker takes its parts. Runs in: anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.data.constructors import as_dataset
from distrain.data.iterator import DataIterator
from distrain.data.passes import Worker

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from distrain.data.dataset import Dataset


@dataclass(frozen=True, slots=True)
class RunDatasets:
    """The ``datasets=`` of a trainer, and its ``dataset_config=``.

    split: the names of those that are divided among the workers. on_change, resume: see ``DataConfig``.
    """

    by_name: dict[str, Dataset]
    split: frozenset[str]
    on_change: str
    resume: bool

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules that the workers need to read the data, and that may be imported before they are forked."""
        files = any(dataset.reads_files for dataset in self.by_name.values())
        return ("distrain.data.iterator", *(("pyarrow.dataset", "pyarrow.fs") if files else ()))

    def shard(self, name: str, rank: int, ranks: int, **of_loops: Any) -> DataIterator:
        """Return a worker's part of a dataset. ``of_loops``: see :class:`~distrain.data.loops.Loops`."""
        worker = Worker(rank, ranks) if name in self.split else Worker(0, 1)
        return DataIterator(
            self.by_name[name], name=name, worker=worker, rank=rank, on_change=self.on_change, **of_loops
        )


def run_datasets(
    datasets: Mapping[str, Any], split: Collection[str] | str, *, on_change: str, resume: bool
) -> RunDatasets:
    """Return the datasets of a run. Raises TypeError for what isn't a dataset, ValueError for an unknown name."""
    found = {name: as_dataset(value, name) for name, value in datasets.items()}
    names = set(found) if split == "all" else set(split)
    if unknown := names - found.keys():
        raise ValueError(
            f"DataConfig(datasets_to_split=...) names {min(unknown)!r}, but datasets= has {sorted(found) or 'no names'}"
        )
    return RunDatasets(found, frozenset(names), on_change, resume)
