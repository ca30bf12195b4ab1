"""What train_func calls: report(), get_context(), get_checkpoint(), under these and older names. Runs in: worker.

What the coordinator has to say is read inside these calls, and by no thread.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distrain import wire
from distrain.checkpoint import Checkpoint
from distrain.config import CheckpointUploadMode
from distrain.context import CheckpointConsistencyMode, ReportedCheckpoint, ReportedCheckpointStatus
from distrain.errors import CheckpointError, CollectiveError
from distrain.storage.file_transfer import Leftover, discard, file_copier, unshare
from distrain.storage.files import copy_folders, crc32_of, list_files
from distrain.system.log import warn
from distrain.system.remote_path import RemotePath
from distrain.worker.metrics import encode_metrics
from distrain.worker.report_checks import (
    StoreOptions,
    check_checkpoint,
    check_in_place,
    checked_task,
    folder_in_place,
    is_kept,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distrain.context import TrainContext


MOST_UPLOADS = 2
"""Of one rank at once; report() waits for the first before it leaves a third behind."""
_AS_USUAL = StoreOptions()
SYNC, ASYNC, NO_UPLOAD = CheckpointUploadMode


class WorkerChannel(Protocol):
    """The worker's connection: a ``Channel``, or what stands for one in the same process."""

    at_end: bool
    uploads: bool
    """Whether checkpoints can be stored while the worker goes on."""
    acknowledges: bool
    """True if the coordinator acknowledges reports. If not, it has every report that was sent."""

    def send(self, message: wire.FromWorker) -> None: ...

    def receive(self) -> Sequence[wire.Frame]: ...

    def wait(self, timeout_s: float | None = None) -> Sequence[wire.Frame]: ...


class Session:
    """A worker's side of reports, checkpoints and collectives. One per process; ``current`` is it."""

    current: Session | None = None

    def __init__(self, channel: WorkerChannel, context: TrainContext, checkpoint: Checkpoint | None) -> None:
        self.context = context
        self.checkpoint = checkpoint
        self._channel = channel
        self._reports = 0
        self._acknowledged = 0
        self._checkpoints = 0
        self._resumed = int(checkpoint is not None)  # Ray AIR counted it
        self._collectives = 0
        self._stop_calls = 0
        self._stop_asked = False
        self._stop_at: int | None = None
        self._vote_at = 0
        self.stopped = False
        """Whether should_stop() has been true."""
        self._uploading: dict[int, Checkpoint] = {}
        self._in_place: set[int] = set()
        self._said_awaited = False
        self._not_stored: list[str] = []
        self._stored: set[int] = set()
        self._met: wire.CollectiveDone | None = None
        self._asks = 0
        self._listing: wire.CheckpointList | None = None
        self.portable: Callable[[dict[str, Any]], dict[str, Any]] = dict
        """What a dict checkpoint becomes when it is reported; the backend may have a say."""
        self.at_report: Callable[[], None] = lambda: None
        self.runs_script = False
        """Whether this rank runs a script, as under torchrun, and no function."""
        self._grants: dict[int, wire.CopyFiles] = {}
        self._discards: dict[int, wire.Discard] = {}
        self._left: dict[int, Leftover] = {}
        """What is to be deleted when nobody can need it any more, of the checkpoint of that ordinal."""
        self.released = False
        self._lock = threading.RLock()  # not a Lock: a signal handler would wait for its own thread
        self._call = ""
        """The call that holds the lock."""
        self._pid = os.getpid()

    def report(
        self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None, storing: StoreOptions = _AS_USUAL
    ) -> None:
        self.at_report()
        body = encode_metrics(metrics)
        check_checkpoint(checkpoint, self.context)
        task = checked_task(storing, checkpoint, self.context)
        if not self._channel.uploads and storing.mode is ASYNC:
            storing = replace(storing, mode=SYNC, delete=storing.deletes)
        with self._alone("report()"), contextlib.ExitStack() as stack:
            self._listen()
            self._await_acknowledgement()
            self._raise_what_was_not_stored()
            ordinal, folder, files, leftover = None, None, [], None
            if checkpoint is not None:
                checkpoint, storing, leftover = self._to_store(checkpoint, storing)
                if storing.mode is NO_UPLOAD:
                    folder = folder_in_place(checkpoint, self.context)
                else:
                    folder = Path(stack.enter_context(checkpoint.as_directory()))
                    files = list_files(folder)
                ordinal = self._checkpoints + 1
            waits = storing.mode is SYNC or not self._channel.uploads
            said = wire.Reported(
                attempt=self.context.attempt,
                rank=self.context.world_rank,
                index=self._reports + 1,
                time=time.time(),
                ordinal=ordinal,
                files=files,
                body=body,
                folder=str(folder or ""),
                real=leftover.real if leftover else "" if folder is None else os.path.realpath(folder),
                mode=storing.mode.value,
                waits=waits,
                name=storing.name,
                delete=storing.deletes or leftover is not None,
                validation=task,
            )
            # Counted just before it is sent: a number that is missing, as an alarm came in between, is waited for.
            self._reports, self._checkpoints = said.index, ordinal or self._checkpoints
            self._channel.send(said)
            if folder is None or ordinal is None:
                return
            if leftover is not None:
                self._left[ordinal] = leftover
            if storing.mode is ASYNC:
                assert checkpoint is not None
                self._uploading[ordinal] = checkpoint  # whose files may go with the object
                self._await_uploads(MOST_UPLOADS)
            elif not waits:
                self._in_place.add(ordinal)
            else:
                self._deliver(ordinal, folder, files, delete=storing.deletes)

    def _await_acknowledgement(self) -> None:
        """Wait while as many reports are on their way as may be lost."""
        while self._channel.acknowledges and self._reports - self._acknowledged >= wire.MOST_UNACKNOWLEDGED:
            self._listen(wait=True)

    def _to_store(
        self, checkpoint: Checkpoint, storing: StoreOptions
    ) -> tuple[Checkpoint, StoreOptions, Leftover | None]:
        """A directory, what is to be done with it, and what is to be deleted when all ranks are done."""
        leftover = None
        checkpoint = checkpoint.as_reported(self._resumed + self._checkpoints, self.portable)
        if checkpoint.remote_path is not None or (checkpoint.path and is_kept(checkpoint, self.context)):
            storing = replace(storing, delete=False)
        if storing.function is not None:
            name = storing.name or f"checkpoint_{self.context.attempt}-{self._checkpoints + 1:06d}"  # for all ranks
            if storing.mode is ASYNC:
                self._say_that_functions_are_awaited()
            if storing.deletes and checkpoint.path and checkpoint.remote_path is None:
                leftover = Leftover(Path(checkpoint.path))
            checkpoint = storing.function(checkpoint, name)
            if not isinstance(checkpoint, Checkpoint) or not checkpoint.path:
                raise TypeError(
                    f"report(): checkpoint_upload_fn must return the Checkpoint that it has stored, got {checkpoint!r}"
                )
            storing = replace(storing, mode=NO_UPLOAD, function=None)
        if storing.mode is NO_UPLOAD:
            check_in_place(checkpoint, self.context)
            return checkpoint, replace(storing, delete=False), leftover
        if storing.mode is ASYNC and (not checkpoint.path or checkpoint.remote_path is not None):
            return Checkpoint(checkpoint.to_directory()), replace(storing, delete=True), None
        return checkpoint, storing, None

    def _say_that_functions_are_awaited(self) -> None:
        if self.context.world_rank == 0 and not self._said_awaited:
            self._said_awaited = True
            warn("report() waits for checkpoint_upload_fn, also with ASYNC, as it runs in the worker's own thread")

    def _await_uploads(self, most: int) -> None:
        while len(self._uploading) > most:
            self._listen(wait=True)

    def _raise_what_was_not_stored(self) -> None:
        if self._not_stored:
            raise CheckpointError(self._not_stored.pop(0))

    def finish_uploads(self) -> None:
        """Wait until all checkpoints are stored. Raises CheckpointError if one cannot be."""
        with self._alone("finish_uploads()"):
            self._await_uploads(0)
            self._raise_what_was_not_stored()

    def all_checkpoints(self, mode: CheckpointConsistencyMode, timeout_s: float | None) -> list[ReportedCheckpoint]:
        deadline = None if timeout_s is None or timeout_s == math.inf else time.monotonic() + timeout_s
        with self._alone("get_all_reported_checkpoints()"):
            self._asks += 1
            self._ask(mode, at_once=False)
            while self._listing is None or self._listing.index != self._asks:
                if deadline is not None and time.monotonic() >= deadline:
                    deadline = None
                    self._asks += 1
                    self._ask(mode, at_once=True)
                self._listen(wait=True, until=deadline)
            known = json.loads(self._listing.body)
        storage = self.context.get_storage()
        return [
            ReportedCheckpoint(storage.checkpoint(c["path"]), c["metrics"], ReportedCheckpointStatus(c["status"]))
            for c in known
        ]

    def _ask(self, mode: CheckpointConsistencyMode, *, at_once: bool) -> None:
        self._channel.send(
            wire.AskCheckpointList(
                attempt=self.context.attempt,
                rank=self.context.world_rank,
                index=self._asks,
                validated=mode is CheckpointConsistencyMode.VALIDATED,
                at_once=at_once,
            )
        )

    def should_stop(self) -> bool:
        with self._alone("should_stop()"):
            self._listen()
            self._stop_calls += 1
            if self._stop_calls == 1:
                self._channel.send(wire.UsesShouldStop(attempt=self.context.attempt, rank=self.context.world_rank))
            if self._stop_asked and self._stop_at is None and self._stop_calls >= self._vote_at:
                self._agree()
            self.stopped = self.stopped or (self._stop_at is not None and self._stop_calls >= self._stop_at)
            return self.stopped

    def _agree(self) -> None:
        """Wait until it is clear at which of its calls every rank stops, or where that is to be found out (see
        :mod:`distrain.decisions.stop_consensus`).
        """
        self._channel.send(
            wire.StopVote(attempt=self.context.attempt, rank=self.context.world_rank, call=self._stop_calls)
        )
        while self._stop_at is None and self._vote_at <= self._stop_calls:
            self._listen(wait=True)

    @contextlib.contextmanager
    def _alone(self, caller: str) -> Iterator[None]:
        """Let one call run at a time. Raises RuntimeError in a signal handler that interrupts another call."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"{caller} was called in a child process of the worker; call it in the worker itself")
        with self._lock:
            if self._call:
                raise RuntimeError(
                    f"{caller} was called while {self._call} runs in the same thread: from a signal handler?"
                )
            self._call = caller
            try:
                yield
            finally:
                self._call = ""

    def meet(self, operation: str, data: bytes, timeout_s: float | None = None) -> bytes:
        """Wait until every rank is in its n-th collective, which must be the same operation; returns rank 0's data.

        Raises CollectiveError if that cannot happen any more, or has not happened within ``timeout_s``.
        """
        with self._alone(operation):
            self._collectives += 1
            self._channel.send(
                wire.CollectiveEntered(
                    attempt=self.context.attempt,
                    rank=self.context.world_rank,
                    index=self._collectives,
                    operation=operation,
                    body=data,
                    timeout_s=timeout_s,
                )
            )
            met = self._await_met()
            if met.refused is not None:
                raise CollectiveError(met.refused)
            return met.body

    def _await_met(self) -> wire.CollectiveDone:
        while self._met is None or self._met.index != self._collectives:
            self._listen(wait=True)
        return self._met

    def _deliver(self, ordinal: int, folder: Path, files: list[tuple[str, int]], *, delete: bool) -> None:
        """Wait for the coordinator's word on who copies what, copy our part, and say so; or until an uploader has done
        it.
        """
        try:
            grant = self._await_grant(ordinal)
        except BaseException as error:  # an alarm of the user's: nobody else can bring these files
            if not isinstance(self.context.get_storage().run, RemotePath):
                self._send_delivered(ordinal, [], [], failed=repr(error))
            raise
        if grant is None:
            self._raise_what_was_not_stored()
            if delete:
                self._discard(ordinal, folder, None, [path for path, _ in files])
            return
        if grant.refused is not None:
            raise CheckpointError(grant.refused)
        target = Path(grant.directory)
        files = list_files(folder) if folder == target else files  # what others have put there meanwhile
        granted = {path for path, _ in files} if folder == target else set(grant.files)
        delivered, skipped = [], []
        take = file_copier(folder, target, delete=delete)
        try:
            if grant.directory and folder != target:
                copy_folders(folder, target)
            for path, _ in files if grant.directory else ():  # else nobody stores any
                if path in granted:
                    delivered.append((path, *take(path)))
                else:
                    skipped.append((path, *crc32_of(folder / path)))
        except BaseException as error:
            self._send_delivered(ordinal, [], [], failed=repr(error))
            raise
        self._send_delivered(ordinal, delivered, skipped)
        if delete:
            self._discard(ordinal, folder, target, [path for path, *_ in delivered])

    def _discard(self, ordinal: int, folder: Path, target: Path | None, files: Sequence[str]) -> None:
        """Delete the local files as soon as no other rank can need them; if that takes too long, later."""
        failed = None
        try:
            while ordinal not in self._discards:
                self._listen(wait=True)
            if self._discards.pop(ordinal).at_once:
                discard(folder, target, files)
            else:
                unshare(target, files)
                self._left[ordinal] = Leftover(folder)
        except OSError as error:
            failed = str(error)
        except BaseException as error:
            self._send_discarded(ordinal, repr(error))
            raise
        self._send_discarded(ordinal, failed)

    def _send_discarded(self, ordinal: int, failed: str | None) -> None:
        self._channel.send(
            wire.Discarded(attempt=self.context.attempt, rank=self.context.world_rank, ordinal=ordinal, failed=failed)
        )

    def _send_delivered(
        self,
        ordinal: int,
        files: list[tuple[str, int, int]],
        skipped: list[tuple[str, int, int]],
        failed: str | None = None,
    ) -> None:
        self._channel.send(
            wire.FilesCopied(
                attempt=self.context.attempt,
                rank=self.context.world_rank,
                ordinal=ordinal,
                files=files,
                skipped=skipped,
                failed=failed,
            )
        )

    def _await_grant(self, ordinal: int) -> wire.CopyFiles | None:
        """None if an uploader has stored the files."""
        while ordinal not in self._grants:
            if ordinal in self._stored:
                self._stored.remove(ordinal)
                return None
            self._listen(wait=True)
        return self._grants.pop(ordinal)

    @property
    def has_leftovers(self) -> bool:
        """Whether there are local files that are to be deleted when all ranks have had their say."""
        return bool(self._left)

    def wait_for_release(self) -> None:
        """Block until every rank has finished."""
        while not self.released:
            self._listen(wait=True)

    def get_checkpoint(self) -> Checkpoint | None:
        if os.getpid() == self._pid:
            with self._lock:
                if not self._call:  # else this is a signal handler, which gets what is known
                    with self._alone("get_checkpoint()"):
                        self._listen()
        return self.checkpoint

    def _listen(self, *, wait: bool = False, until: float | None = None) -> None:
        """Take in what there is; ``wait`` for something, but not longer than ``until`` (time.monotonic)."""
        left_s = None if until is None else max(0.0, until - time.monotonic())
        frames = self._channel.wait(left_s) if wait else self._channel.receive()
        for frame in frames:
            match frame.message():
                case wire.CopyFiles() as grant:
                    self._grants[grant.ordinal] = grant
                case wire.Acknowledged(index=index):
                    self._acknowledged = index
                case wire.UploadDone(ordinal=ordinal, failed=failed):
                    if ordinal in self._in_place:
                        self._in_place.remove(ordinal)
                    elif self._uploading.pop(ordinal, None) is None:
                        self._stored.add(ordinal)
                    if failed is not None:
                        self._not_stored.append(f"the {ordinal}. checkpoint of this rank could not be stored: {failed}")
                case wire.Discard(ordinal=ordinal, at_once=True) if ordinal in self._left:
                    with contextlib.suppress(OSError):  # of files that are none of the run's any more
                        self._left.pop(ordinal).discard()
                case wire.Discard() as word:
                    self._discards[word.ordinal] = word
                case wire.CheckpointCommitted(path=path):
                    self.checkpoint = self.context.get_storage().checkpoint(path)
                case wire.CheckpointList() as listing:
                    self._listing = listing
                case wire.CollectiveDone() as met:
                    self._met = met
                case wire.AnnounceStop():
                    self._stop_asked = True
                case wire.StopAtReport(call=call, final=True):
                    self._stop_at = call
                case wire.StopAtReport(call=call):
                    self._vote_at = call
                case wire.Release():
                    self.released = True
        if wait and self._channel.at_end:
            os._exit(1)  # the agent is gone, and nobody will hear of this process again


# -- the public functions --------------------------------------------------------------------------------------------


def session_of(caller: str) -> Session:
    """The session of this worker, for the public functions. Raises RuntimeError elsewhere."""
    if Session.current is None:
        raise RuntimeError(
            f"distrain.{caller}() only works inside a worker: call it from the function that you hand to the trainer, "
            "or from a script started by `python -m distrain.launch`"
        )
    return Session.current
