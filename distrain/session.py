"""What train_func calls: report(), get_context(), get_checkpoint(). Runs in: worker.

No thread of ours runs here: what the coordinator has to say is read inside these calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.checkpoint import Checkpoint
from distrain.errors import CheckpointError
from distrain.storage import copy_file, crc32_of, list_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrain.channel import Channel

__all__ = ["Session", "TrainContext", "get_checkpoint", "get_context", "report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainContext:
    """Who this worker is. Ranks count from 0; ``devices`` index the GPUs that this process can see."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    run_name: str
    storage_path: str
    attempt: int
    devices: tuple[int, ...]

    def get_world_rank(self) -> int:
        return self.world_rank

    def get_world_size(self) -> int:
        return self.world_size

    def get_local_rank(self) -> int:
        return self.local_rank

    def get_local_world_size(self) -> int:
        return self.local_world_size

    def get_node_rank(self) -> int:
        return self.node_rank

    def get_experiment_name(self) -> str:
        return self.run_name


class Session:
    """A worker's side of reports and checkpoints. One per process; ``current`` is it."""

    current: Session | None = None

    def __init__(self, channel: Channel, context: TrainContext, checkpoint: Checkpoint | None) -> None:
        self.context = context
        self.checkpoint = checkpoint
        self._channel = channel
        self._reports = 0
        self._checkpoints = 0
        self._grants: dict[int, wire.Grant] = {}
        self.released = False
        self._lock = threading.Lock()
        self._reporting = 0
        self._pid = os.getpid()

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("distrain.report() was called in a child process of the worker; report from the worker")
        body = _encoded(metrics)
        _check_checkpoint(checkpoint, self.context)
        with self._alone(), contextlib.ExitStack() as stack:
            self._listen()
            ordinal, folder, files = None, None, []
            if checkpoint is not None:
                folder = Path(stack.enter_context(checkpoint.numbered(self._checkpoints).as_directory()))
                files = list_files(folder)
                ordinal = self._checkpoints = self._checkpoints + 1
            self._reports += 1
            self._channel.send(
                wire.Reported(
                    attempt=self.context.attempt,
                    rank=self.context.world_rank,
                    index=self._reports,
                    time=time.time(),
                    ordinal=ordinal,
                    files=files,
                    body=body,
                )
            )
            if folder is not None and ordinal is not None:
                self._deliver(ordinal, folder, files)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One report at a time. Raises RuntimeError where waiting for the other one would be for ever."""
        if self._reporting == threading.get_ident():
            raise RuntimeError("distrain.report() was called while it runs in the same thread: from a signal handler?")
        with self._lock:
            self._reporting = threading.get_ident()
            try:
                yield
            finally:
                self._reporting = 0

    def _deliver(self, ordinal: int, folder: Path, files: list[tuple[str, int]]) -> None:
        """Wait for the coordinator's word on who copies what, copy our part, and say so."""
        grant = self._await_grant(ordinal)
        if grant.refused is not None:
            raise CheckpointError(grant.refused)
        granted = set(grant.files)
        target = Path(grant.directory)
        delivered, skipped = [], []
        try:
            for path, _ in files:
                if path in granted:
                    delivered.append((path, *copy_file(folder / path, target / path)))
                else:
                    skipped.append((path, *crc32_of(folder / path)))
        except BaseException as error:
            self._send_delivered(ordinal, [], [], failed=repr(error))
            raise
        self._send_delivered(ordinal, delivered, skipped)

    def _send_delivered(
        self,
        ordinal: int,
        files: list[tuple[str, int, int]],
        skipped: list[tuple[str, int, int]],
        failed: str | None = None,
    ) -> None:
        self._channel.send(
            wire.Delivered(
                attempt=self.context.attempt,
                rank=self.context.world_rank,
                ordinal=ordinal,
                files=files,
                skipped=skipped,
                failed=failed,
            )
        )

    def _await_grant(self, ordinal: int) -> wire.Grant:
        while ordinal not in self._grants:
            self._listen(wait=True)
        return self._grants.pop(ordinal)

    def wait_for_release(self) -> None:
        """Block until every rank has finished."""
        while not self.released:
            self._listen(wait=True)

    def get_checkpoint(self) -> Checkpoint | None:
        if os.getpid() == self._pid and self._reporting != threading.get_ident():
            with self._lock:
                self._listen()
        return self.checkpoint

    def _listen(self, *, wait: bool = False) -> None:
        frames = self._channel.wait() if wait else self._channel.receive()
        for frame in frames:
            match frame.message():
                case wire.Grant() as grant:
                    self._grants[grant.ordinal] = grant
                case wire.Committed(path=path):
                    self.checkpoint = Checkpoint(path)
                case wire.Release():
                    self.released = True
        if wait and self._channel.at_end:
            os._exit(1)  # the agent is gone, and nobody will hear of this process again


# -- the public functions --------------------------------------------------------------------------------------------


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Report metrics, and optionally a checkpoint, from any rank, any number of times.

    ``metrics`` is copied: numbers, strings, booleans, None, and dicts and lists of them; numpy and torch scalars become
    numbers. Without a checkpoint the call waits for nobody. With one it returns when the checkpoint's files may be
    deleted or overwritten; the checkpoint is committed once every rank has brought its part.

    Raises TypeError or ValueError for metrics that cannot be recorded, CheckpointError for a checkpoint that cannot be
    stored, RuntimeError outside of a worker.
    """
    _session("report").report(metrics, checkpoint)


def get_context() -> TrainContext:
    """Who this worker is. Raises RuntimeError outside of a worker."""
    return _session("get_context").context


def get_checkpoint() -> Checkpoint | None:
    """The checkpoint to resume from: the latest committed one of this run, else ``resume_from_checkpoint``, else None.

    Raises RuntimeError outside of a worker.
    """
    return _session("get_checkpoint").get_checkpoint()


def _session(caller: str) -> Session:
    if Session.current is None:
        raise RuntimeError(
            f"distrain.{caller}() only works inside a worker: call it from the function that you hand to the trainer, "
            "or from a script started by `python -m distrain.launch`"
        )
    return Session.current


# -- checking what users hand in -------------------------------------------------------------------------------------


def _encoded(metrics: Mapping[str, Any]) -> bytes:
    if not isinstance(metrics, Mapping):
        raise TypeError(f"report() takes a dict of metrics, got {metrics!r:.80} ({type(metrics).__name__})")
    return json.dumps(_plain(metrics, "metrics")).encode()


def _plain(value: Any, path: str) -> Any:
    """``value`` as JSON knows it. ``path`` names it in errors."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {_key(key, path): _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (bool, int, float, str)):  # their subclasses: numpy.float64, IntEnum, ...
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if callable(getattr(value, "item", None)) and hasattr(value, "shape"):
        return _scalar(value, path)
    raise TypeError(
        f"report(): {path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be recorded; "
        "metrics are numbers, strings, booleans, None, and dicts and lists of them"
    )


def _scalar(value: Any, path: str) -> Any:
    count = 1
    for size in value.shape:
        count *= size
    if count != 1:
        raise ValueError(
            f"report(): {path} is a {type(value).__name__} of shape {tuple(value.shape)}; a metric is one number: "
            "reduce it first, for example with .mean(), or report .tolist()"
        )
    return _plain(value.item(), path)


def _key(key: Any, path: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, (int, float)):
        return str(key)
    raise TypeError(f"report(): {path} has the key {key!r} ({type(key).__name__}); keys of metrics are strings")


def _check_checkpoint(checkpoint: Checkpoint | None, context: TrainContext) -> None:
    """Refuses what cannot have been meant."""
    if checkpoint is None:
        return
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"report(): checkpoint must be a distrain.Checkpoint, got {checkpoint!r:.80} "
            f"({type(checkpoint).__name__}); use Checkpoint.from_directory(path)"
        )
    if not checkpoint.path:  # made from a dict
        return
    folder = os.path.realpath(checkpoint.path)
    if not os.path.isdir(folder):
        raise CheckpointError(f"report(): the checkpoint directory {checkpoint.path} does not exist")
    shared = (tempfile.gettempdir(), os.path.expanduser("~"), os.sep)
    if folder in map(os.path.realpath, shared):
        raise CheckpointError(
            f"report(): {checkpoint.path} is a shared directory; the checkpoint would take in everything in it. "
            "Write the files into a directory of their own: checkpoint_dir = tempfile.mkdtemp()"
        )
    run = os.path.realpath(os.path.join(context.storage_path, context.run_name))
    if os.path.commonpath([folder, run]) == folder:
        raise CheckpointError(
            f"report(): {checkpoint.path} contains the run directory {run}, and would be copied into itself. "
            "Write the files into a directory of their own: checkpoint_dir = tempfile.mkdtemp()"
        )
