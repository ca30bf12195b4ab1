"""The identity of a worker, the storage of its run, and the checkpoints that were reported. Runs in: worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.api.current import session_of
from distrain.hosts.world import WorkerFacts
from distrain.storage.checkpoint import Checkpoint
from distrain.system.remote_path import RemotePath, decode_filesystem, locate

if TYPE_CHECKING:
    from pathlib import Path

    from fsspec import AbstractFileSystem

    from distrain.data.iterator import DataIterator


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageContext:
    """The storage of a run. Its locations are paths within ``storage_filesystem``, or URLs."""

    storage_fs_path: str
    experiment_dir_name: str
    filesystem: str = ""

    @property
    def storage_filesystem(self) -> AbstractFileSystem:
        """The filesystem of the paths, as fsspec has it."""
        return Checkpoint(self.storage_fs_path, decode_filesystem(self.filesystem)).filesystem

    @property
    def run(self) -> Path | RemotePath:
        """The run directory. Raises OSError if its filesystem is not available on this host."""
        return locate(self.experiment_fs_path, decode_filesystem(self.filesystem))

    def checkpoint(self, path: str) -> Checkpoint:
        """Return the checkpoint at a path or URL of the run's filesystem."""
        return Checkpoint(path, decode_filesystem(self.filesystem))

    @property
    def experiment_fs_path(self) -> str:
        """The run directory."""
        return f"{self.storage_fs_path}/{self.experiment_dir_name}"

    def build_checkpoint_path_from_name(self, checkpoint_dir_name: str) -> str:
        """Return the path of a checkpoint of the run."""
        return f"{self.experiment_fs_path}/{checkpoint_dir_name}"


class TrialResources(dict[str, float]):
    """The resources of a worker. Ray returns them as a ``PlacementGroupFactory``, so this has its attributes, too.

    bundles: what each worker has, in the order of the ranks.

    ::

        cpus = distrain.get_context().get_trial_resources().bundles[-1].get("CPU", 1)
    """

    bundles: list[dict[str, float]]

    @property
    def required_resources(self) -> dict[str, float]:
        """The resources of all workers together."""
        return {name: amount * len(self.bundles) for name, amount in self.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainContext(WorkerFacts):
    """The identity of this worker and the facts of its run. Ranks count from 0.

    ::

        context = distrain.get_context()
        print(f"rank {context.get_world_rank()} of {context.get_world_size()}")
    """

    def get_world_rank(self) -> int:
        """Return the rank of this worker among all workers."""
        return self.world_rank

    def get_world_size(self) -> int:
        """Return the number of workers."""
        return self.world_size

    def get_local_rank(self) -> int:
        """Return the rank of this worker among the workers of its host."""
        return self.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers on this worker's host."""
        return self.local_world_size

    def get_node_rank(self) -> int:
        """Return the index of this worker's host."""
        return self.node_rank

    def get_experiment_name(self) -> str:
        """Return the name of the run."""
        return self.run_name

    def get_storage(self) -> StorageContext:
        """Return the storage of the run."""
        return StorageContext(
            storage_fs_path=self.storage_path, experiment_dir_name=self.run_name, filesystem=self.filesystem
        )

    def get_dataset_shard(self, dataset_name: str | None = None) -> DataIterator:
        """Return this worker's part of a dataset; see :func:`distrain.get_dataset_shard`."""
        shard: DataIterator = session_of("get_dataset_shard").dataset_shard(dataset_name)
        return shard

    def get_metadata(self) -> dict[str, Any]:
        """Return the ``metadata=`` of the trainer."""
        return dict(self.metadata)

    def get_coordinator_address(self, name: str = "default") -> str:
        """Return an address on rank 0's host with a free port, such as ``10.0.0.1:43123``, the same on all ranks.

        It is for frameworks whose ranks connect to a server of rank 0. The first call with a name is a collective,
        like :func:`distrain.collective.barrier`: every rank makes it, and it waits for all of them. Further calls with
        the name return the same address at once. Other names have other ports, and every attempt reserves its own.
        Listen soon after the call, because the port is no longer reserved when it has returned.

        Raises CollectiveError, which names the ranks, if a rank does not make the call.

        ::

            address = distrain.get_context().get_coordinator_address("jax")
        """
        [address] = self._reserve("get_coordinator_address", name)
        return address

    def get_worker_addresses(self, name: str = "default") -> list[str]:
        """Return the address of every rank, each with a free port on the rank's host, in the order of the ranks.

        It is for frameworks in which every rank listens. Apart from that, it is like :meth:`get_coordinator_address`;
        the names of the two are not related.

        ::

            machines = ",".join(distrain.get_context().get_worker_addresses("lightgbm"))
        """
        return self._reserve("get_worker_addresses", name, on_every_rank=True)

    @staticmethod
    def _reserve(call: str, name: str, *, on_every_rank: bool = False) -> list[str]:
        reserved = session_of(f"get_context().{call}").addresses
        addresses: list[str] = reserved.by_name(call, name, on_every_rank=on_every_rank)
        return addresses

    # Ray Tune calls a run a trial.

    def get_trial_name(self) -> str:
        """Return the name of the run."""
        return self.run_name

    def get_trial_id(self) -> str:
        """Return the id of the run. A run that is continued gets a new id."""
        return self.run_id

    def get_trial_dir(self) -> str:
        """Return the run directory.

        On a host that does not see it, return a directory of that host. When the run ends, the files in it come to the
        run directory.

        ::

            notes = f"{distrain.get_context().get_trial_dir()}/notes.txt"
        """
        return self.trial_dir or self.get_storage().experiment_fs_path

    def get_trial_resources(self) -> TrialResources:
        """Return what each worker has: ``{"CPU": 1}`` or ``{"GPU": 1}``, or the ``resources_per_worker``."""
        resources = TrialResources(self.resources)
        resources.bundles = [dict(self.resources) for _ in range(self.world_size)]
        return resources


class CheckpointConsistencyMode(enum.Enum):
    """The state of checkpoints that ``get_all_reported_checkpoints()`` waits for.

    COMMITTED: every checkpoint of a report that this rank has made is committed. If only other ranks had a checkpoint
        in the same report, that counts, too.
    VALIDATED: in addition, no checkpoint waits for its validation.

    ::

        kept = distrain.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
    """

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


class ReportedCheckpointStatus(enum.Enum):
    """The state of a checkpoint. COMMITTED means that no validation was requested.

    ::

        for reported in distrain.get_all_reported_checkpoints():
            is_validated = reported.status is ReportedCheckpointStatus.VALIDATED
    """

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_FAILED = "VALIDATION_FAILED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"


@dataclass(frozen=True, slots=True)
class ReportedCheckpoint:
    """A committed checkpoint, with the metrics of its report and of its validation.

    ::

        for reported in distrain.get_all_reported_checkpoints():
            print(reported.checkpoint, reported.metrics)
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus
