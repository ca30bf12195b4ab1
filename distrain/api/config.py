"""Configs of a run: scaling, failures, checkpoints, logging and validation; and the hooks of a callback.

A bad value raises TypeError or ValueError that names the field and what is allowed. Runs in: anywhere.
"""

from __future__ import annotations

import enum
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from distrain.api.observer import Observer
from distrain.api.ray_names import checks_arguments, is_asked_for_as_ray
from distrain.api.tracker import Tracker
from distrain.hosts.hostfile import check_transport, parse_hosts, split_ssh_args
from distrain.storage.retention import LOWEST_IS_BEST, Retention
from distrain.system.arguments import check_choice, check_fields, check_int, check_ranks, check_seconds, check_type
from distrain.system.log import warn_once

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from distrain.api.backend import BackendConfig
    from distrain.api.result import Result
    from distrain.storage.checkpoint import Checkpoint

RESOURCES = ("CPU", "GPU", "memory")
_PLAIN = (bool, str, dict, Mapping, Callable)
_INTERFACES = re.compile(r"[^\s/,]{1,15}(,[^\s/,]{1,15})*")
"""Names of network interfaces as Linux allows them."""
_SHORTEST_LEASE_S = 1.0
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_LONGEST_NAME = 240
"""Longest name of a run in bytes. File systems take 255, and distrain may append a number or a suffix."""


@cache
def types_of(config: type) -> dict[str, tuple[Any, ...]]:
    """Return the types that the fields of a config may have, as annotated. None is the last of them, if it is one."""
    hints = get_type_hints(config, localns={"AbstractFileSystem": object})
    return {n: get_args(one) if get_origin(one) in (Union, UnionType) else (one,) for n, one in hints.items()}


def check_types(config: object) -> None:
    """Check each field of which the annotation says all: a plain type, one of some words, or a number of seconds."""
    for name, kinds in types_of(type(config)).items():  # type: ignore[arg-type] # a class is hashable
        label, value = f"{type(config).__name__}.{name}", getattr(config, name)
        kind, is_optional = get_origin(kinds[0]) or kinds[0], kinds[-1] is NoneType
        if len(kinds) > 1 + is_optional or (is_optional and value is None):
            continue
        if kind is Literal:
            check_choice(label, value, get_args(kinds[0]))
        elif name.endswith("_s"):
            check_seconds(label, value, optional=is_optional)
        elif kind in _PLAIN or is_dataclass(kind):
            check_type(label, value, kind, optional=is_optional)


# -- scaling ---------------------------------------------------------------------------------------------------------


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """The number of workers, and what each of them needs.

    num_workers: processes to start. More workers than CPUs are allowed. 0 starts none: train_func runs in this process
        as rank 0 of 1, where a debugger works. ``(min, max)`` starts as many as the hosts have slots for. Every attempt
        counts the slots again, so a run continues without a lost host, and uses it once it is back. Leave it out if
        another launcher, such as torchrun, has started this process and others: then they are the workers.
    use_gpu: give every worker a GPU: one, unless ``resources_per_worker["GPU"]`` differs.
    resources_per_worker: any of ``CPU`` (cores), ``GPU`` (devices; a fraction shares one) and ``memory`` (bytes).
        Before the run starts, distrain checks that the hosts have them. It limits nothing afterwards.
    numa_binding: ``node`` binds each worker to the CPUs of its GPU's NUMA node, as ``torchrun --numa-binding node``
        does. It needs ``use_gpu``. By default, workers may use all CPUs that the host has for them.
    interface: the network interface over which workers of different hosts connect, such as ``"ib0"``; or several, of
        which each host uses the first that it has: ``"ib0,eth1"``. By default, the one that leads to rank 0's host.
    start_method: ``forkserver`` forks the workers from a process that has imported torch already; ``spawn`` starts a
        fresh interpreter for each.
    hosts: the machines to train on, as ``"alpha:4,beta:4"`` or ``["alpha:4", "beta:4"]``, each with its number of
        slots, the most ranks that it takes. Hosts are filled in this order.
    hostfile: a file with the hosts, one per line (``alpha slots=4``); without it and hosts, the one that
        DISTRAIN_HOSTFILE names, else the nodes of the Slurm job, else this machine. See docs/hosts.md.
    transport: how hosts other than ``localhost`` are reached: ``ssh``; ``slurm``, by srun in the job of this process;
        or the command line of a program that runs commands on ``{host}``, such as ``"docker exec -i {host}"``.
        ``local`` uses this machine only, also in a Slurm job. ``auto`` takes the environment variable
        DISTRAIN_TRANSPORT if it is set; else srun for the nodes of a Slurm job, and ssh for hosts that are named.
    ssh_args: further arguments for ssh, a list or one string, such as ``"-i my_key"``.
    accelerator_type: a GPU product such as ``"A100"`` or ``"H100"``; the GPUs of every host must be of this product.
    grow: ``checkpoint`` tries missing hosts again while fewer than ``max`` workers train. Once one answers, the run
        restarts from its next checkpoint to use it, which does not count as a failure. By default, the host is used
        after the next failure.

    >>> ScalingConfig(num_workers=4, use_gpu=True, hosts="alpha:2,beta:2").worker_resources
    {'GPU': 1}
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: dict[str, float] | None = None
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    accelerator_type: str | None = None
    hosts: str | Sequence[str] | None = None
    hostfile: str | os.PathLike[str] | None = None
    transport: str = "auto"
    ssh_args: str | Sequence[str] = ()
    numa_binding: Literal["node"] | None = None
    interface: str | None = None
    grow: Literal["checkpoint"] | None = None

    def __post_init__(self) -> None:
        self._check_workers()
        check_types(self)
        if self.grow is not None and isinstance(self.num_workers, int):
            raise ValueError(
                f"ScalingConfig.grow={self.grow!r} needs a range of workers: num_workers=(min, max) instead of "
                f"{self.num_workers}"
            )
        self._check_resources()
        self._check_gpus()
        self._check_hosts()

    def _check_workers(self) -> None:
        label, value = "ScalingConfig.num_workers", self.num_workers
        if not isinstance(value, (tuple, list)):
            check_int(label, value, minimum=0)
            return
        if len(value) != 2:
            raise ValueError(f"{label} must be an int or (min, max), got {value!r}")
        for number in value:
            check_int(f"{label} as (min, max)", number, minimum=1)
        if value[0] > value[1]:
            raise ValueError(f"{label} as (min, max): min must not be larger than max, got {value!r}")
        object.__setattr__(self, "num_workers", tuple(value))

    def _check_resources(self) -> None:
        for name, amount in dict(self.resources_per_worker or {}).items():
            kind = str(name).removeprefix("accelerator_type:")  # Ray's resource for GPUs of a product
            if kind != str(name) and amount and self.accelerator_type in (None, kind):
                others = {own: value for own, value in (self.resources_per_worker or {}).items() if own != name}
                object.__setattr__(self, "resources_per_worker", others)
                object.__setattr__(self, "accelerator_type", kind)
                continue
            label = f"ScalingConfig.resources_per_worker[{name!r}]"
            if name not in RESOURCES and amount == 0:
                continue
            if name not in RESOURCES:
                raise ValueError(f"{label}: unknown resource; known are {', '.join(RESOURCES)}, and accelerator_type=")
            if isinstance(amount, bool) or not isinstance(amount, (int, float)):
                raise TypeError(f"{label} must be a number, got {amount!r} ({type(amount).__name__})")
            if not (math.isfinite(amount) and amount >= 0):
                raise ValueError(f"{label} must be finite and not negative, got {amount!r}")
            if name == "GPU" and amount > 1 and amount != int(amount):
                raise ValueError(f"{label} must be a fraction of one GPU or a whole number, got {amount!r}")

    def _check_gpus(self) -> None:
        if self.use_gpu and self.gpus_per_worker == 0:
            raise ValueError('ScalingConfig: use_gpu=True, but resources_per_worker has "GPU": 0; drop one of the two')
        if not self.use_gpu and self.gpus_per_worker:
            raise ValueError('ScalingConfig: resources_per_worker asks for "GPU"; set use_gpu=True, too')
        if not self.use_gpu and self.accelerator_type is not None:
            raise ValueError(f"ScalingConfig: accelerator_type={self.accelerator_type!r} names a GPU; set use_gpu=True")

    def _check_hosts(self) -> None:
        for name in ("hosts", "ssh_args"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                check_fields(self, check_type, name, kind=Sequence, allowed="a str or a list of str")
                for part in value:
                    check_type(f"ScalingConfig.{name}", part, str, "a str or a list of str")
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.ssh_args, str):
            object.__setattr__(self, "ssh_args", split_ssh_args(self.ssh_args, "ScalingConfig.ssh_args"))
        if self.hostfile is not None:
            check_fields(self, check_type, "hostfile", kind=(str, os.PathLike), allowed="a str or a Path")
            object.__setattr__(self, "hostfile", os.fspath(self.hostfile))
        if self.hosts is not None:
            parse_hosts(self.hosts, "ScalingConfig.hosts")
        check_transport(self.transport, "ScalingConfig.transport")
        if self.interface is not None and not _INTERFACES.fullmatch(self.interface):
            raise ValueError(
                "ScalingConfig.interface must be a network interface such as 'ib0', or several such as 'ib0,eth1', got "
                f"{self.interface!r}"
            )
        if self.hosts is not None and self.hostfile is not None:
            raise ValueError("ScalingConfig.hosts and ScalingConfig.hostfile are both given; drop one of the two")
        if self.num_workers == 0 and (self.hosts is not None or self.hostfile is not None):
            raise ValueError("ScalingConfig: num_workers=0 trains in this process; it needs no hosts")

    @property
    def min_workers(self) -> int:
        """The smallest number of workers that may train."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        """The largest number of workers that may train."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def gpus_per_worker(self) -> float:
        """GPUs of one worker; below 1 several workers share one."""
        return (self.resources_per_worker or {}).get("GPU", 1 if self.use_gpu else 0)

    @property
    def worker_resources(self) -> dict[str, float]:
        """Resources of one worker, as Ray counts them: by default one CPU, or with ``use_gpu`` one GPU."""
        named = {name: amount for name, amount in (self.resources_per_worker or {}).items() if amount}
        if self.use_gpu:
            return {**named, "GPU": self.gpus_per_worker}
        return named or {"CPU": 1}


# -- policies --------------------------------------------------------------------------------------------------------


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The way in which workers read the ``datasets=`` of a trainer.

    datasets_to_split: the names of the datasets that are divided among the workers, or "all". Of other datasets, each
        worker gets all rows.
    on_change: what to do if a dataset is not the one that the checkpoint knows: "error"; "restart" begins the epoch
        again; "ignore" continues at the same place.
    resume: False: a run that starts from the checkpoint of another run begins with the first row of epoch 0.

    Raises TypeError or ValueError for bad values.

    ::

        DataConfig(datasets_to_split=["train"])
    """

    datasets_to_split: Literal["all"] | Sequence[str] = "all"
    on_change: Literal["error", "restart", "ignore"] = "error"
    resume: bool = True

    def __init_subclass__(cls) -> None:
        if "configure" in vars(cls):
            raise TypeError(
                f"{cls.__name__}.configure() would never be called: name datasets_to_split=[...], or choose the rows "
                "in train_func"
            )

    def __post_init__(self) -> None:
        if isinstance(self.datasets_to_split, str) and self.datasets_to_split != "all":
            raise ValueError(
                f"DataConfig.datasets_to_split must be 'all' or a list of names, got {self.datasets_to_split!r}"
            )
        check_types(self)


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """Restarts after failures, and the time limits that detect hangs and lost hosts.

    max_failures: the number of failures after which the workers restart from the last committed checkpoint, counted
        over the whole run; 0 never restarts, -1 always. A run in which no rank ever entered train_func does not
        restart.
    retry_same_failure: restart even if the same rank has raised exactly the same exception twice in a row, after as
        many reports and without a checkpoint in between. By default distrain takes such a failure for a bug, and the
        run fails. Scripts that do not report checkpoints always restart: they may resume from snapshots of their own.
    backoff_s: seconds to wait before a restart. The wait doubles each time there was no new checkpoint, up to 5
        minutes.
    hang_report_s: seconds without any report or output of any rank before distrain shows the stacks of all ranks, once;
        None never shows them.
    hang_timeout_s: seconds without any report or output of any rank before the attempt counts as failed. Unless it is
        None, an attempt also fails once a rank can only wait for one that has finished train_func.
    host_lease_s: seconds of silence after which a remote host counts as lost, and after which its workers end
        themselves. A lost host is a failure like any other: with restarts left, the run continues.
    host_wait_s: seconds to wait for a lost host before a restart, if the others have too few slots without it. The host
        is tried once in any case.
    on_nan: ``"rollback"`` has ``report()`` raise :class:`Rollback` with ``skip_batch=True`` if ``nan_metric`` is not
        finite. ``"ignore"`` does nothing.
    nan_metric: the metric to look at; ``"train/loss"`` reads ``metrics["train"]["loss"]``.
    on_divergence: what to do if ranks no longer have the same parameters, although they train one model: ``"warn"``
        names the ranks that differ from the majority, or all if there is none; ``"rollback"`` has ``report()`` raise
        :class:`Rollback`; ``"ignore"`` does not look. Compared are the parameters of DistributedDataParallel, and
        DTensors on mesh dimensions where they are replicated, as in hybrid sharding; others, such as those of FSDP 1,
        are left out. All ranks must report after the same steps. See docs/failures.md.
    divergence_every: the number of reports from one comparison to the next.
    max_rollbacks: the number of rollbacks after which the run fails instead; -1 sets no limit.
    peer_failure_grace_s: seconds between SIGTERM and SIGKILL for the other ranks after one has failed; None, the
        default, means 5 for a script and 0 for train_func, which gets SIGKILL at once. Only ranks that handle SIGTERM
        can use them, others end at once; train_func handles it, as SystemExit.

    >>> FailureConfig(max_failures=3, hang_timeout_s=1800).max_failures
    3
    """

    max_failures: int = 0
    retry_same_failure: bool = False
    backoff_s: float = 0.0
    hang_report_s: float | None = 600.0
    hang_timeout_s: float | None = math.inf
    host_lease_s: float = 15.0
    host_wait_s: float = 60.0
    on_nan: Literal["ignore", "rollback"] = "ignore"
    nan_metric: str = "loss"
    on_divergence: Literal["ignore", "warn", "rollback"] = "ignore"
    divergence_every: int = 100
    max_rollbacks: int = 10
    peer_failure_grace_s: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, check_int, "max_failures", "max_rollbacks", minimum=-1)
        check_fields(self, check_int, "divergence_every", minimum=1)
        check_fields(self, check_seconds, "host_lease_s", minimum=_SHORTEST_LEASE_S)


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Retention):
    """The checkpoints to keep, and the time to wait for ranks that do not report.

    num_to_keep: keep this many (None: all): the best by score, or the newest without a score attribute. The latest
        checkpoint is never deleted.
    checkpoint_score_attribute: metric to rank by; ``"eval/loss"`` reads ``metrics["eval"]["loss"]``. Missing and NaN
        scores rank worst, whatever the order.
    checkpoint_score_order: the better scores: the higher ones (``"max"``, the default) or the lower ones (``"min"``).
        A metric of which the lowest value usually is the best, by its name, such as a loss, needs one of the two.
    checkpoint_ranks: the ranks that report checkpoints, such as ``[0]`` if only rank 0 saves, or ``"all"``. A
        checkpoint waits for the n-th report of these ranks only. With None, it waits for all ranks, but only
        ``missing_rank_s`` for those that have never reported.
    missing_rank_s: seconds for which a checkpoint waits for a rank that has never called ``report()``.
    memory_every: keep checkpoints in the memory of the hosts, as ``CheckpointUploadMode.MEMORY`` does, and copy every
        n-th to another host. Calls of ``report()`` with another ``checkpoint_upload_mode`` than SYNC, with a
        ``checkpoint_upload_fn`` or with a ``validation`` are not affected. None leaves the choice to ``report()``.
    storage_every_s: seconds between two checkpoints in memory that are also written to storage.

    >>> CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min").num_to_keep
    2
    >>> CheckpointConfig(checkpoint_ranks=range(0, 8, 4)).checkpoint_ranks
    (0, 4)
    """

    checkpoint_score_order: Literal["max", "min"] = None  # type: ignore[assignment] # __post_init__ replaces it
    checkpoint_ranks: Sequence[int] | Literal["all"] | None = None
    missing_rank_s: float = 60.0
    memory_every: int | None = None
    storage_every_s: float = 600.0

    def __post_init__(self) -> None:
        check_fields(self, check_int, "num_to_keep", "memory_every", minimum=1, optional=True)
        if is_default := vars(self)["checkpoint_score_order"] is None:
            object.__setattr__(self, "checkpoint_score_order", "max")
        check_types(self)
        metric = self.checkpoint_score_attribute or ""
        if is_default and LOWEST_IS_BEST.search(metric.lower()):
            choose = 'checkpoint_score_order="min" keeps the lowest ones, checkpoint_score_order="max" the highest'
            if not is_asked_for_as_ray():
                raise ValueError(f"CheckpointConfig.checkpoint_score_attribute is {metric!r}: {choose}; choose one")
            warn_once(f"the checkpoints with the highest {metric} are kept, as in Ray: {choose}")
        if self.checkpoint_ranks not in (None, "all"):
            check_fields(self, check_ranks, "checkpoint_ranks", allowed='ranks, such as [0], "all"')
            object.__setattr__(self, "checkpoint_ranks", tuple(sorted(set(self.checkpoint_ranks or ()))))
            if not self.checkpoint_ranks:
                raise ValueError("CheckpointConfig.checkpoint_ranks must name a rank; leave it out to have them found")


class CheckpointUploadMode(enum.Enum):
    """The ways to store the files of a checkpoint.

    SYNC: ``report()`` returns when this rank's files are in the run directory.
    ASYNC: ``report()`` returns at once. A separate process stores the files and, by default, deletes the local ones.
    NO_UPLOAD: the files are already in a directory of the run directory, and stay there.
    MEMORY: ``report()`` returns when this rank's files are in the memory of its host. From time to time, and at the end
        of the run, the newest checkpoint is stored (``CheckpointConfig.storage_every_s``).

    >>> CheckpointUploadMode("ASYNC") is CheckpointUploadMode.ASYNC
    True
    """

    SYNC = "SYNC"
    ASYNC = "ASYNC"
    NO_UPLOAD = "NO_UPLOAD"
    MEMORY = "MEMORY"


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The lines and the output that appear on the console.

    log_level: the lowest level of distrain's own lines, as in ``logging``: INFO shows progress, WARNING only what you
        should read, ERROR nothing.
    ranks: the ranks whose output is shown, all by default. The log files have everything.

    >>> LoggingConfig(log_level="warning", ranks=[0]).log_level
    'WARNING'
    """

    log_level: str = "INFO"
    ranks: Collection[int] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "log_level", self.log_level.upper())
        check_fields(self, check_choice, "log_level", choices=_LOG_LEVELS)
        if self.ranks is not None:
            check_fields(self, check_ranks, "ranks", allowed="a list of ranks")


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class ShippingConfig:
    """Files and packages for hosts that do not see the user's files; see docs/hosts.md.

    enabled: copy distrain and the user's code to them. False: all hosts have both already, at the same paths.
    include: further files and directories, such as small data files, relative to the working directory. Only files
        that are named here are copied even if their names look like secrets (``.env``, keys), or if they are large.
    limit_bytes: the largest size of all that is copied.
    env_from: a requirements file, from which a virtual environment is made on each host. None, the default: hosts use
        the interpreter that they have.
    fetch_limit_bytes: the largest size of the files in ``get_context().get_trial_dir()`` that come back from each host
        at the end.

    >>> RunConfig(shipping_config=ShippingConfig(include=["data/words.txt"])).shipping_config.enabled
    True
    """

    enabled: bool = True
    include: Sequence[str | os.PathLike[str]] = ()
    limit_bytes: int = 100_000_000
    env_from: str | os.PathLike[str] | None = None
    fetch_limit_bytes: int = 1_000_000_000

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, check_int, "fetch_limit_bytes", minimum=0)
        if isinstance(self.include, (str, os.PathLike)):
            raise TypeError(f"ShippingConfig.include must be a list of paths, got {self.include!r}")
        check_fields(self, check_type, "include", kind=Sequence, allowed="a list of paths")
        check_fields(self, check_int, "limit_bytes", minimum=1)
        check_fields(self, check_type, "env_from", kind=(str, os.PathLike), allowed="a str or a Path", optional=True)


@checks_arguments
@dataclass(frozen=True)
class ValidationTaskConfig:
    """Settings for the validation of one checkpoint.

    fn_kwargs: keyword arguments of the validation function, in addition to the checkpoint.
    timeout_s: seconds after which the validation is ended; None, the default, sets no limit.

    ::

        distrain.report(metrics, checkpoint, validation=ValidationTaskConfig(fn_kwargs={"split": "test"}))
    """

    fn_kwargs: Mapping[str, Any] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, check_seconds, "timeout_s", above_zero=True, optional=True)


@checks_arguments
@dataclass(frozen=True)
class ValidationConfig:
    """The validation of checkpoints that workers report with ``report(..., validation=True)``.

    fn: ``fn(checkpoint, **fn_kwargs) -> dict`` of metrics, which are added to those of the checkpoint. distrain calls
        it in a process of its own on the machine of ``fit()``, for one checkpoint after the other, while the training
        continues. A validation that fails or takes too long does not end the run.
    task_config: the settings of validations that ``report(validation=ValidationTaskConfig(...))`` does not override.

    ::

        def validate(checkpoint):
            with checkpoint.as_directory() as folder:
                return {"accuracy": evaluate(folder)}

        trainer = TorchTrainer(train_func, validation_config=ValidationConfig(validate))
    """

    fn: Callable[..., Mapping[str, Any]]
    task_config: ValidationTaskConfig | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.task_config is None:
            object.__setattr__(self, "task_config", ValidationTaskConfig())


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """The arguments of ``report()`` that tell how to store a checkpoint. Raises TypeError, ValueError for bad ones.

    delete: None for the default of the mode. function: the ``checkpoint_upload_fn``.
    """

    name: str | None = None
    mode: CheckpointUploadMode = CheckpointUploadMode.SYNC
    delete: bool | None = None
    function: Callable[[Checkpoint, str], Checkpoint] | None = None
    validation: ValidationTaskConfig | None = None

    def __post_init__(self) -> None:
        check_type("report(): checkpoint_upload_mode", self.mode, CheckpointUploadMode, "a CheckpointUploadMode")
        check_type("report(): delete_local_checkpoint_after_upload", self.delete, bool, optional=True)
        check_type("report(): checkpoint_upload_fn", self.function, Callable, optional=True)
        allowed = "a bool or a ValidationTaskConfig"
        check_type("report(): validation", self.validation, ValidationTaskConfig, allowed, optional=True)
        check_type("report(): checkpoint_dir_name", self.name, str, optional=True)
        if self.mode is CheckpointUploadMode.MEMORY and self.function is not None:
            raise ValueError(
                "report(): checkpoint_upload_fn stores the checkpoint itself; leave out CheckpointUploadMode.MEMORY"
            )
        if self.name is not None:
            from distrain.storage.paths import RunPaths  # workers have loaded it, and others may not need it

            if (why_not := RunPaths(Path()).name_problem(self.name)) is not None:
                raise ValueError(f"report(): checkpoint_dir_name {why_not}")

    @property
    def deletes(self) -> bool:
        """True if the local files are deleted once the checkpoint is committed."""
        return self.mode is CheckpointUploadMode.ASYNC if self.delete is None else self.delete


# -- the run ---------------------------------------------------------------------------------------------------------


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name, storage and policies of a run; its directory is ``{storage_path}/{name}``.

    name: a file name, under which an unfinished run continues; by default the name of the script, the time and a
        random suffix.
    storage_path: local or shared directory, where ``~`` and relative paths are allowed, or a URL that fsspec knows,
        such as ``s3://bucket/runs``; by default ``~/distrain_results``.
    storage_filesystem: the file system of ``storage_path``, one of fsspec's or pyarrow's, instead of a URL.
    log_dir: directory for the logs, in a directory named like the run; by default ``logs`` in the run directory.
    stop_grace_s: seconds that workers have to end when a signal stops the run; None, the default, means 10, and 30 for
        a script. If any of them calls should_stop(), that returns True, and after these seconds the remaining workers
        get the signal, and SIGKILL two seconds later. If none calls it, they get the signal at once, and SIGKILL after
        these seconds. They get SIGTERM instead of a signal that they do not handle. See docs/failures.md.
    stop_signals: names of the signals that stop the run, such as ``["SIGTERM", "SIGUSR1"]``; None, the default, means
        SIGINT, SIGTERM, SIGHUP and SIGQUIT, and in a job of Slurm SIGUSR1 and SIGUSR2. Other signals have the effect on
        your process that they have without distrain.
    worker_runtime_env: ``{"env_vars": {...}}``, environment variables of the workers, set before they import anything.
        The other keys of Ray's runtime environment have no effect; a value causes a warning.
    callbacks: objects of :class:`~distrain.UserCallback` or :class:`~distrain.Observer`, called in this process.
        Trackers, which Ray expects here, work, too.
    trackers: names such as ``"tensorboard"`` or ``"wandb:project=mnist"``, or objects of
        :class:`distrain.trackers.Tracker`; by default those that the environment variable DISTRAIN_TRACKERS names,
        separated by semicolons. See docs/trackers.md.
    failure_config: see :class:`~distrain.FailureConfig`.
    checkpoint_config: see :class:`~distrain.CheckpointConfig`.
    logging_config: see :class:`~distrain.LoggingConfig`.
    shipping_config: see :class:`~distrain.ShippingConfig`.
    on_end: a shell command that runs when the run ends, however it ends; by default the one in the environment variable
        DISTRAIN_ON_END. See docs/observers.md.
    progress: how the console shows the progress: ``"live"``, a footer on a terminal, or a block in a notebook;
        ``"plain"``, a line every 30 seconds; ``"off"``, not at all; ``"auto"``, live where that is possible.
    debug_rank: rank on which breakpoint() and an exception of train_func open pdb; on other ranks breakpoint() does
        nothing. The rank waits for ``distrain debug`` in another terminal. See docs/debugging.md.

    >>> config = RunConfig(name="mnist", storage_path="~/runs", failure_config=FailureConfig(max_failures=2))
    >>> config.env_vars
    {}
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: AbstractFileSystem | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    log_dir: str | os.PathLike[str] | None = None
    stop_grace_s: float | None = None
    stop_signals: Sequence[str] | None = None
    worker_runtime_env: dict[str, Any] | None = None
    logging_config: LoggingConfig = field(default_factory=LoggingConfig)
    shipping_config: ShippingConfig = field(default_factory=ShippingConfig)
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    callbacks: Sequence[UserCallback | Observer] | None = field(default_factory=tuple)
    trackers: Sequence[Tracker | str] | None = None
    debug_rank: int | None = None
    on_end: str | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.default_factory is not MISSING and getattr(self, one.name) is None:
                object.__setattr__(self, one.name, one.default_factory())
        check_types(self)
        self._check_name()
        self._check_paths()
        self._check_stop_signals()
        self._check_runtime_env()
        self._check_callbacks()
        allowed = "a list of names and of objects of distrain.trackers.Tracker"
        check_fields(self, check_type, "trackers", kind=(list, tuple), allowed=allowed, optional=True)
        check_fields(self, check_int, "debug_rank", minimum=0, optional=True)

    def _check_name(self) -> None:
        if self.name is None:
            return
        if not self.name or self.name in (".", "..") or "/" in self.name or "\0" in self.name:
            raise ValueError(f"RunConfig.name must be a plain file name without '/', got {self.name!r}")
        if (size := len(self.name.encode(errors="surrogateescape"))) > _LONGEST_NAME:
            raise ValueError(f"RunConfig.name must not be longer than {_LONGEST_NAME} bytes, got {size}")

    def _check_paths(self) -> None:
        names = ("storage_path", "log_dir")
        check_fields(self, check_type, *names, kind=(str, os.PathLike), allowed="a str or a Path", optional=True)
        for name in names:
            if getattr(self, name) is not None and not os.fspath(getattr(self, name)):
                raise ValueError(f"RunConfig.{name} must not be empty; leave it out for the default")
        if self.log_dir is not None and "://" in (log_dir := os.fspath(self.log_dir)):
            raise ValueError(f"RunConfig.log_dir={log_dir!r}: logs are written to a local or shared directory")
        if self.storage_filesystem is not None and not _is_filesystem(self.storage_filesystem):
            check_fields(self, check_type, "storage_filesystem", kind=(), allowed="fsspec's or pyarrow's filesystem")

    def _check_stop_signals(self) -> None:
        allowed = "a list of names such as 'SIGTERM'"
        check_fields(self, check_type, "stop_signals", kind=(list, tuple), allowed=allowed, optional=True)
        for name in self.stop_signals or ():
            check_choice("RunConfig.stop_signals", name, _STOP_SIGNALS)

    def _check_runtime_env(self) -> None:
        runtime_env = self.worker_runtime_env or {}
        if others := sorted(str(name) for name in runtime_env if name != "env_vars" and runtime_env[name]):
            warnings.warn(
                f"RunConfig.worker_runtime_env: no effect for {', '.join(others)}: workers use the interpreter, the "
                "packages, the directory and the files of this process, or of their host",
                UserWarning,
                stacklevel=5,  # the user's line that makes the config
            )
        check_type("RunConfig.worker_runtime_env['env_vars']", self.env_vars, dict)
        for name, value in self.env_vars.items():
            if not _is_variable(name, value):
                label = f"RunConfig.worker_runtime_env['env_vars'][{name!r}]"
                raise TypeError(f"{label} must be a str with a plain name, got {value!r}")

    def _check_callbacks(self) -> None:
        allowed = "a list of distrain.UserCallback or distrain.Observer objects"
        check_fields(self, check_type, "callbacks", kind=Sequence, allowed=allowed)
        if trackers := [one for one in self.callbacks or () if isinstance(one, Tracker)]:
            object.__setattr__(self, "trackers", [*(self.trackers or ()), *trackers])
            object.__setattr__(self, "callbacks", [one for one in self.callbacks or () if not isinstance(one, Tracker)])
        for callback in self.callbacks or ():
            check_type("RunConfig.callbacks", callback, (UserCallback, Observer), allowed)

    @property
    def env_vars(self) -> dict[str, str]:
        """Environment variables for the workers."""
        variables: dict[str, str] = (self.worker_runtime_env or {}).get("env_vars") or {}
        return variables


def _is_filesystem(value: object) -> bool:
    """Recognize a file system of fsspec or pyarrow without importing either."""
    return any(kind.__module__.partition(".")[0] in ("fsspec", "pyarrow") for kind in type(value).__mro__)


def _is_variable(name: object, value: object) -> bool:
    """Tell if both are text that an environment can hold."""
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    return bool(name) and "=" not in name and "\0" not in name + value


# -- callbacks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The run that a callback is called for.

    ::

        def before_run(self, run_context):
            print(run_context.run_id, run_context.get_run_config().name)
    """

    run_id: str
    run_config: RunConfig
    scaling_config: ScalingConfig
    backend_config: BackendConfig
    train_loop_config: Mapping[str, Any]

    def get_run_config(self) -> RunConfig:
        return self.run_config


class UserCallback:
    """Hooks for the stages of a run. Derive from this class, and pass objects to ``RunConfig(callbacks=[...])``.

    Callbacks run in the process that called ``fit()``, one after the other: ``before_run()`` and ``after_run()`` in its
    thread, the others in one of their own, so that training does not wait for them. ``fit()`` returns after the last
    one; Ctrl-C ends the wait for it. An exception in a callback is shown once, and training continues.

    ::

        class Printer(UserCallback):
            def after_report(self, run_context, metrics, checkpoint):
                print(metrics[0])

        run_config = RunConfig(callbacks=[Printer()])
    """

    def before_run(self, run_context: RunContext) -> None:
        """Run before the first worker starts. The run directory exists."""

    def after_run(self, run_context: RunContext, result: Result, error: BaseException | None) -> None:
        """Run after the last worker has ended. ``fit()`` then returns ``result``, or raises ``error``.

        It is not called if ``fit()`` fails before it starts any worker.
        """

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any] | None], checkpoint: Checkpoint | None
    ) -> None:
        """Run after every rank has made its n-th report, or will make none.

        metrics: the reports by rank; None for a rank that makes no n-th report. At least one rank does.
        checkpoint: the checkpoint that was committed with these reports.
        """

    def after_checkpoint(self, run_context: RunContext, checkpoint: Checkpoint, metrics: dict[str, Any]) -> None:
        """Run after a checkpoint was committed.

        metrics: those that it was reported with. ``CheckpointConfig.num_to_keep`` may have deleted it already.
        """

    def after_exception(self, run_context: RunContext, worker_exceptions: dict[int, BaseException]) -> None:
        """Run after an attempt has failed and all its processes have ended.

        worker_exceptions: the exceptions of the failed ranks, by rank.
        """
