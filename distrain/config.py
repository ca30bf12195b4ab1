"""What the user asks for: scaling, run, failure and checkpoint configs. Runs in: anywhere.

Every bad value is a TypeError or ValueError that names the field and what is allowed.
"""

from __future__ import annotations

import enum
import math
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from distrain.hosts.hostfile import parse_hosts, split_ssh_args
from distrain.system.ray_names import explaining, without

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from distrain.backend import BackendConfig
    from distrain.checkpoint import Checkpoint
    from distrain.result import Result

__all__ = [
    "CheckpointConfig",
    "CheckpointUploadMode",
    "FailureConfig",
    "LoggingConfig",
    "RunConfig",
    "RunContext",
    "ScalingConfig",
    "UserCallback",
    "ValidationConfig",
    "ValidationTaskConfig",
]

StartMethod = Literal["forkserver", "spawn"]
RESOURCES = ("CPU", "GPU", "memory")
_ACCELERATOR = "accelerator_type:"
"""Ray's name of the resource that a GPU product is."""
_LONGEST_NAME = 240
"""Bytes: file systems take 255, and the name of a run may get a number or a suffix."""
_OTHER_ENVIRONMENT = frozenset(
    {
        "_validate", "conda", "config", "container", "excludes", "image_uri", "java_jars", "nsight", "pip",
        "py_executable", "py_modules", "uv", "worker_process_setup_hook", "working_dir",
    }
)  # fmt: skip
"""The other keys of Ray's runtime environment."""


@without("elastic_resize_monitor_interval_s", "label_selector", "topology", "use_tpu")
@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """How many workers, and what each of them needs.

    num_workers: processes to start. More workers than CPUs is allowed. 0 starts none: train_func runs in this process
        as rank 0 of 1, where a debugger works. ``(min, max)``: as many as the hosts have slots for; every attempt
        counts anew, so that a run goes on without a lost host, and with it when it is back.
    use_gpu: give every worker a GPU (one, unless ``resources_per_worker["GPU"]`` says otherwise).
    resources_per_worker: any of ``CPU`` (cores), ``GPU`` (devices; a fraction shares one) and ``memory`` (bytes).
        What is named here is checked against the hosts before anything starts; it limits nothing afterwards.
    start_method: ``forkserver`` forks the workers from a process that has imported torch already; ``spawn`` starts a
        fresh interpreter for each.
    hosts: the machines to train on, as ``"alpha:4,beta:4"`` or ``["alpha:4", "beta:4"]``, each with the number of ranks
        that it takes at most. They are filled in this order, and reached by ssh, ``localhost`` excepted.
    hostfile: the same as a file, one host a line (``alpha slots=4``), which can say more: see the README. Without
        either of them, DISTRAIN_HOSTFILE may name one; else it is this machine.
    ssh_args: further arguments for ssh, a list or one string.
    accelerator_type: a GPU product such as ``"A100"`` or ``"H100"``, which the GPUs of every host must be.
    trainer_resources, placement_strategy: of Ray; they mean nothing here, which is said once.
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: dict[str, float] | None = None
    start_method: StartMethod = "forkserver"
    accelerator_type: str | None = None
    hosts: str | Sequence[str] | None = None
    hostfile: str | os.PathLike[str] | None = None
    ssh_args: str | Sequence[str] = ()
    trainer_resources: dict[str, float] | None = None
    placement_strategy: str = "PACK"

    def __post_init__(self) -> None:
        self._check_workers()
        _check_type("ScalingConfig.use_gpu", self.use_gpu, bool, "True or False")
        _check_choice("ScalingConfig.start_method", self.start_method, get_args(StartMethod))
        if self.resources_per_worker is not None:
            _check_type("ScalingConfig.resources_per_worker", self.resources_per_worker, dict, "a dict or None")
            self._take_accelerator()
            for name, amount in self.resources_per_worker.items():
                self._check_resource(name, amount)
        if self.use_gpu and self.gpus_per_worker == 0:
            raise ValueError('ScalingConfig: use_gpu=True, but resources_per_worker has "GPU": 0; drop one of the two')
        if not self.use_gpu and self.gpus_per_worker:
            raise ValueError(
                'ScalingConfig: resources_per_worker asks for "GPU", but use_gpu is False; set use_gpu=True'
            )

        if self.accelerator_type is not None:
            _check_type("ScalingConfig.accelerator_type", self.accelerator_type, str, "a str")
            if not self.use_gpu:
                raise ValueError(
                    f"ScalingConfig: accelerator_type={self.accelerator_type!r} names a GPU; set use_gpu=True"
                )
        _check_type("ScalingConfig.placement_strategy", self.placement_strategy, str, "a str")
        if self.trainer_resources is not None:
            _check_type("ScalingConfig.trainer_resources", self.trainer_resources, dict, "a dict or None")
        if self.trainer_resources:
            _warn("ScalingConfig.trainer_resources has no effect: the coordinator takes no slot of a worker")
        if self.placement_strategy != "PACK":
            _warn("ScalingConfig.placement_strategy has no effect: hosts are filled in order, up to their slots")
        self._check_hosts()

    def _check_workers(self) -> None:
        label, value = "ScalingConfig.num_workers", self.num_workers
        if not isinstance(value, (tuple, list)):
            _check_int(label, value, minimum=0)
            return
        if len(value) != 2:
            raise ValueError(f"{label} must be an int or (min, max), got {value!r}")
        for number in value:
            _check_int(f"{label} as (min, max)", number, minimum=1)
        if value[0] > value[1]:
            raise ValueError(f"{label} as (min, max) must not have more for min than for max, got {value!r}")
        object.__setattr__(self, "num_workers", tuple(value))

    def _check_hosts(self) -> None:
        for name in ("hosts", "ssh_args"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                _check_type(f"ScalingConfig.{name}", value, Sequence, "a str or a list of str")
                for part in value:
                    _check_type(f"ScalingConfig.{name}", part, str, "a str or a list of str")
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.ssh_args, str):
            object.__setattr__(self, "ssh_args", split_ssh_args(self.ssh_args, "ScalingConfig.ssh_args"))
        if self.hostfile is not None:
            _check_type("ScalingConfig.hostfile", self.hostfile, (str, os.PathLike), "a str or a Path")
            object.__setattr__(self, "hostfile", os.fspath(self.hostfile))
        if self.hosts is not None:
            parse_hosts(self.hosts, "ScalingConfig.hosts")
        if self.hosts is not None and self.hostfile is not None:
            raise ValueError("ScalingConfig: hosts and hostfile are both given; drop one of the two")
        if self.num_workers == 0 and (self.hosts is not None or self.hostfile is not None):
            raise ValueError("ScalingConfig: num_workers=0 trains in this process; it needs no hosts")

    def _take_accelerator(self) -> None:
        """Understand ``{"accelerator_type:T4": 0.001}``, which is Ray's for ``accelerator_type="T4"``."""
        resources = self.resources_per_worker or {}
        named = [name for name in resources if str(name).startswith(_ACCELERATOR)]
        if not named:
            return
        rest = {name: amount for name, amount in resources.items() if name not in named}
        object.__setattr__(self, "resources_per_worker", rest)
        wanted = sorted({name.removeprefix(_ACCELERATOR) for name in named if resources[name]})
        if not self.use_gpu:
            _warn(f"ScalingConfig.resources_per_worker[{named[0]!r}] has no effect, as use_gpu is False", deeper=1)
        elif len({*wanted, self.accelerator_type} - {None}) > 1:
            given = f"accelerator_type={self.accelerator_type!r} and " if self.accelerator_type else ""
            raise ValueError(f"ScalingConfig: {given}resources_per_worker names {', '.join(wanted)}; name one of them")
        elif wanted:
            object.__setattr__(self, "accelerator_type", wanted[0])

    @staticmethod
    def _check_resource(name: object, amount: object) -> None:
        label = f"ScalingConfig.resources_per_worker[{name!r}]"
        if name not in RESOURCES and amount == 0:
            return
        if name not in RESOURCES:
            raise ValueError(f"{label}: unknown resource; known are {', '.join(RESOURCES)}")
        if isinstance(amount, bool) or not isinstance(amount, (int, float)):
            raise TypeError(f"{label} must be a number, got {amount!r} ({type(amount).__name__})")
        if not (math.isfinite(amount) and amount >= 0):
            raise ValueError(f"{label} must be finite and not negative, got {amount!r}")
        if name == "GPU" and amount > 1 and amount != int(amount):
            raise ValueError(f"{label} must be a fraction of one GPU or a whole number, got {amount!r}")

    @property
    def min_workers(self) -> int:
        """Fewer than these do not train."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        """As many as there are at most."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def gpus_per_worker(self) -> float:
        """GPUs of one worker; below 1 several workers share one."""
        return (self.resources_per_worker or {}).get("GPU", 1 if self.use_gpu else 0)

    @property
    def num_gpus_per_worker(self) -> float:
        """Ray's name for :attr:`gpus_per_worker`."""
        return self.gpus_per_worker

    @property
    def num_cpus_per_worker(self) -> float:
        """CPUs of one worker, as Ray counts them."""
        return self.worker_resources.get("CPU", 0)

    @property
    def total_resources(self) -> dict[str, float]:
        """What all workers take together, as Ray counts it; of ``(min, max)`` the most."""
        return {name: amount * self.max_workers for name, amount in self.worker_resources.items()}

    @property
    def worker_resources(self) -> dict[str, float]:
        """What one worker takes, as Ray counts it: one CPU, or with ``use_gpu`` one GPU, unless said otherwise."""
        named = {name: amount for name, amount in (self.resources_per_worker or {}).items() if amount}
        if self.use_gpu:
            return {**named, "GPU": self.gpus_per_worker}
        return named or {"CPU": 1}


@without(
    "controller_failure_limit",
    "fail_fast",
    "max_preemption_failures",
    "preemption_grace_s",
    "relax_collectives_on_preemption",
)
@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """What to do when a rank fails.

    max_failures: how many failures of the worker group may be answered by a restart from the last committed
        checkpoint, counted over the whole run; 0 never restarts, -1 always does. There is no restart if no rank ever
        got into train_func.
    retry_same_failure: whether to restart once more after the same rank has raised exactly the same exception twice in
        a row, after as many reports and without a checkpoint in between: a bug, most likely.
    backoff_s: seconds to wait before a restart, doubled each time there was no new checkpoint, up to 5 minutes.
    hang_report_s: seconds without a sign of progress (no report, no output, of any rank) after which the stacks of all
        ranks are shown, once; None never shows them. After two minutes already, if all ranks wait in collectives of
        torch.distributed that do not match.
    hang_timeout_s: the same, after which the attempt counts as failed; None, the default, waits for ever.
    host_lease_s: seconds of silence after which a host that is reached by ssh counts as lost, and after which its
        workers end by themselves. A lost host is a failure like any other: with restarts left, the run goes on.
    host_wait_s: seconds to wait for a lost host before a restart, if the others have too few slots without it; it is
        tried once in any case.
    """

    max_failures: int = 0
    retry_same_failure: bool = False
    backoff_s: float = 0.0
    hang_report_s: float | None = 600.0
    hang_timeout_s: float | None = None
    host_lease_s: float = 15.0
    host_wait_s: float = 60.0

    def __post_init__(self) -> None:
        _check_int("FailureConfig.max_failures", self.max_failures, minimum=-1)
        _check_type("FailureConfig.retry_same_failure", self.retry_same_failure, bool, "True or False")
        _check_seconds("FailureConfig.backoff_s", self.backoff_s)
        for name in ("hang_report_s", "hang_timeout_s"):
            if getattr(self, name) is not None:
                _check_seconds(f"FailureConfig.{name}", getattr(self, name))
        for name in ("host_lease_s", "host_wait_s"):
            _check_seconds(f"FailureConfig.{name}", getattr(self, name))
        if self.host_lease_s < _SHORTEST_LEASE_S:
            raise ValueError(
                f"FailureConfig.host_lease_s must be at least {_SHORTEST_LEASE_S:g} s, got {self.host_lease_s!r}"
            )


_SHORTEST_LEASE_S = 1.0


@without("checkpoint_at_end", "checkpoint_frequency")
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Which checkpoints to keep, and how long to wait for ranks that do not report.

    num_to_keep: keep this many (None: all): the best by score, or the newest without a score attribute. The latest
        checkpoint is never deleted.
    checkpoint_score_attribute: metric to rank by; ``"eval/loss"`` reads ``metrics["eval"]["loss"]``. Missing and NaN
        scores rank worst, whatever the order.
    checkpoint_score_order: ``"max"`` or ``"min"``.
    missing_rank_s: seconds after which a checkpoint no longer waits for a rank that has never called report(), and a
        rank that is ahead no longer waits in report() for the others.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"
    missing_rank_s: float = 60.0

    def __post_init__(self) -> None:
        if self.num_to_keep is not None:
            _check_int("CheckpointConfig.num_to_keep", self.num_to_keep, minimum=1, none_allowed=True)
        if self.checkpoint_score_attribute is not None:
            _check_type("CheckpointConfig.checkpoint_score_attribute", self.checkpoint_score_attribute, str, "a str")
        _check_choice("CheckpointConfig.checkpoint_score_order", self.checkpoint_score_order, ("max", "min"))
        _check_seconds("CheckpointConfig.missing_rank_s", self.missing_rank_s)


@without()
@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is shown on the console.

    log_level: of distrain's own lines, a level of ``logging``: INFO tells how the run goes, WARNING only what should be
        read, ERROR nothing.
    ranks: whose output is shown; None, the default: everybody's. The log files have it all.
    """

    log_level: str = "INFO"
    ranks: Collection[int] | None = None

    def __post_init__(self) -> None:
        _check_type("LoggingConfig.log_level", self.log_level, str, "a str")
        if self.log_level.upper() not in _LOG_LEVELS:
            _check_choice("LoggingConfig.log_level", self.log_level, _LOG_LEVELS)
        object.__setattr__(self, "log_level", self.log_level.upper())
        if self.ranks is not None:
            _check_type("LoggingConfig.ranks", self.ranks, Collection, "a list of ranks or None")
            for rank in self.ranks:
                _check_int("LoggingConfig.ranks", rank, minimum=0)


_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@without()
@dataclass(frozen=True)
class ValidationTaskConfig:
    """How one checkpoint is validated.

    fn_kwargs: keyword arguments of the validation function, beside the checkpoint.
    timeout_s: seconds after which it is ended; None, the default, waits for ever.
    """

    fn_kwargs: Mapping[str, Any] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.fn_kwargs is not None:
            _check_type("ValidationTaskConfig.fn_kwargs", self.fn_kwargs, Mapping, "a dict")
        if self.timeout_s is not None:
            _check_seconds("ValidationTaskConfig.timeout_s", self.timeout_s)
            if not self.timeout_s:
                raise ValueError("ValidationTaskConfig.timeout_s must be more than 0 seconds, or None")


@without("ray_remote_kwargs")
@dataclass(frozen=True)
class ValidationConfig:
    """What ``report(..., validation=True)`` does with the checkpoint.

    fn: ``fn(checkpoint, **fn_kwargs) -> dict`` of metrics, which are added to those of the checkpoint. It is called in
        a process of its own on the machine of ``fit()``, for one checkpoint after the other, while the training goes
        on. That it fails or takes too long does not end the run.
    task_config: what holds unless ``report(validation=ValidationTaskConfig(...))`` says otherwise.
    """

    fn: Callable[..., Mapping[str, Any]]
    task_config: ValidationTaskConfig | None = None

    def __post_init__(self) -> None:
        _check_type("ValidationConfig.fn", self.fn, Callable, "a function")
        if self.task_config is None:
            object.__setattr__(self, "task_config", ValidationTaskConfig())
        _check_type("ValidationConfig.task_config", self.task_config, ValidationTaskConfig, "a ValidationTaskConfig")


@without("local_dir", "log_to_file", "progress_reporter", "stop", "sync_config")
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name, place and policies of a run; its directory is ``{storage_path}/{name}``.

    name: a file name; default: time and a random suffix, unique.
    storage_path: local or shared directory, ``~`` and relative paths allowed; default ``~/distrain_results``. Or a URL
        that fsspec knows, such as ``s3://bucket/runs``.
    storage_filesystem: what ``storage_path`` is on, one of fsspec's or pyarrow's, instead of a URL.
    log_dir: directory for the logs, in a directory named like the run; default ``logs`` in the run directory.
    stop_grace_s: seconds that workers have to stop when the user stops the run. If any of them calls should_stop(),
        that becomes true, and when the time is over SIGTERM follows for whoever is left, and two seconds later SIGKILL;
        otherwise SIGTERM comes at once, and SIGKILL when the time is over.
    worker_runtime_env: ``{"env_vars": {...}}``, environment variables of the workers, set before they import anything.
        What else Ray's can say has no effect, which is said once.
    callbacks: objects of :class:`~distrain.UserCallback`, called in this process.
    logging_config: what is shown. verbose: Ray Tune's number for it; 0 means log level WARNING.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: AbstractFileSystem | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    log_dir: str | os.PathLike[str] | None = None
    stop_grace_s: float = 10.0
    worker_runtime_env: dict[str, Any] | None = None
    logging_config: LoggingConfig = field(default_factory=LoggingConfig)
    verbose: int | None = None
    callbacks: Sequence[UserCallback] | None = ()

    def __post_init__(self) -> None:
        for name, kind in (
            ("failure_config", FailureConfig),
            ("checkpoint_config", CheckpointConfig),
            ("logging_config", LoggingConfig),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, kind())
            _check_type(f"RunConfig.{name}", getattr(self, name), kind, f"a distrain.{kind.__name__}")
        if self.name is not None:
            _check_type("RunConfig.name", self.name, str, "a str")
            if not self.name or self.name in (".", "..") or "/" in self.name or "\0" in self.name:
                raise ValueError(f"RunConfig.name must be a plain file name without '/', got {self.name!r}")
            if (size := len(self.name.encode(errors="surrogateescape"))) > _LONGEST_NAME:
                raise ValueError(f"RunConfig.name must not be longer than {_LONGEST_NAME} bytes, got {size}")
        for name in ("storage_path", "log_dir"):
            self._check_path(name)
        if self.storage_filesystem is not None and not _is_filesystem(self.storage_filesystem):
            _check_type("RunConfig.storage_filesystem", self.storage_filesystem, (), "fsspec's or pyarrow's filesystem")
        _check_seconds("RunConfig.stop_grace_s", self.stop_grace_s)
        self._check_runtime_env()
        if self.callbacks is None:
            object.__setattr__(self, "callbacks", ())
        _check_type("RunConfig.callbacks", self.callbacks, Sequence, "a list of distrain.UserCallback objects")
        for callback in self.callbacks or ():
            _check_type("RunConfig.callbacks", callback, UserCallback, "a list of distrain.UserCallback objects")
        if self.verbose is not None:
            _check_int("RunConfig.verbose", self.verbose, minimum=0)

    def _check_runtime_env(self) -> None:
        runtime_env = self.worker_runtime_env
        if runtime_env is None:
            return
        _check_type("RunConfig.worker_runtime_env", runtime_env, dict, "a dict or None")
        if unknown := sorted(map(str, runtime_env.keys() - _OTHER_ENVIRONMENT - {"env_vars"})):
            raise ValueError(f"RunConfig.worker_runtime_env: there is no {', '.join(unknown)}; use 'env_vars'")
        if others := sorted(name for name in runtime_env if name != "env_vars" and runtime_env[name]):
            _warn(
                f"RunConfig.worker_runtime_env: {', '.join(others)} without effect: workers have the interpreter, the "
                "packages, the directory and the files of this process, or of their host",
                deeper=1,
            )
        _check_type("RunConfig.worker_runtime_env['env_vars']", self.env_vars, dict, "a dict")
        for name, value in self.env_vars.items():
            if (
                not isinstance(name, str)
                or not isinstance(value, str)
                or not name
                or "=" in name
                or "\0" in name + value
            ):
                raise TypeError(
                    f"RunConfig.worker_runtime_env['env_vars'][{name!r}] must be a str with a plain name, got {value!r}"
                )

    @property
    def env_vars(self) -> dict[str, str]:
        """Environment variables for the workers."""
        variables: dict[str, str] = (self.worker_runtime_env or {}).get("env_vars") or {}
        return variables

    @property
    def log_level(self) -> str:
        """From which level on distrain's own lines are shown."""
        return (
            "WARNING"
            if self.verbose == 0 and self.logging_config.log_level == "INFO"
            else self.logging_config.log_level
        )

    def _check_path(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        _check_type(f"RunConfig.{name}", value, (str, os.PathLike), "a str or a Path")
        if not os.fspath(value):
            raise ValueError(f"RunConfig.{name} must not be empty; leave it out for the default")
        if name == "log_dir" and "://" in os.fspath(value):
            raise ValueError(f"RunConfig.log_dir={os.fspath(value)!r}: logs are written to a local or shared directory")


def _is_filesystem(value: object) -> bool:
    """Without importing either."""
    return any(kind.__module__.partition(".")[0] in ("fsspec", "pyarrow") for kind in type(value).__mro__)


def _warn(text: str, *, deeper: int = 0) -> None:
    """Warn at the user's line that made the config. ``deeper``: how many calls are between this and __post_init__."""
    warnings.warn(text, UserWarning, stacklevel=5 + deeper)


def _check_type(label: str, value: object, kind: Any, allowed: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{label} must be {allowed}, got {value!r} ({type(value).__name__})")


def _check_int(label: str, value: object, *, minimum: int, none_allowed: bool = False) -> None:
    allowed = f"an int of at least {minimum}" + (" or None" if none_allowed else "")
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{label} must be {allowed}, got {value!r} ({type(value).__name__})")
    if value < minimum:
        raise ValueError(f"{label} must be {allowed}, got {value}")


def _check_seconds(label: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{label} must be a number of seconds, got {value!r} ({type(value).__name__})")
    if not value >= 0:
        raise ValueError(f"{label} must be 0 or more seconds, got {value!r}")


def _check_choice(label: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{label} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


@explaining("RunContext")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The run that a callback is called for."""

    run_id: str
    run_config: RunConfig
    scaling_config: ScalingConfig
    backend_config: BackendConfig
    train_loop_config: Mapping[str, Any]

    def get_run_config(self) -> RunConfig:
        return self.run_config


class UserCallback:
    """Derive from it, and hand objects to ``RunConfig(callbacks=[...])``.

    Callbacks run in the process that called ``fit()``, one after the other. With workers, all but ``before_run()`` and
    ``after_run()`` run in a thread of their own, and training does not wait for them. ``fit()`` returns after the last
    one; Ctrl-C ends the wait for it. An exception in one is shown, and training continues.
    """

    def before_run(self, run_context: RunContext) -> None:
        """The run directory is there, and no worker yet."""

    def after_run(self, run_context: RunContext, result: Result, error: BaseException | None) -> None:
        """No worker is left. ``fit()`` returns ``result`` next, or raises ``error``. Not called if ``fit()`` fails
        before it starts any worker.
        """

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any] | None], checkpoint: Checkpoint | None
    ) -> None:
        """Every rank has made its n-th report, or will make none. ``metrics``: by rank, None for those; ``checkpoint``:
        what was committed with it.
        """

    def after_exception(self, run_context: RunContext, worker_exceptions: dict[int, BaseException]) -> None:
        """An attempt has failed, and whatever was left of it is gone. ``worker_exceptions``: by rank."""


class CheckpointUploadMode(enum.Enum):
    """When ``distrain.report()`` returns, and who stores the files.

    SYNC: when this rank's files are in the run directory. ASYNC: at once; a process of its own stores them, and by
    default deletes the local ones then. NO_UPLOAD: the files are in a directory of the run directory already, and stay
    there.
    """

    SYNC = "SYNC"
    ASYNC = "ASYNC"
    NO_UPLOAD = "NO_UPLOAD"
