"""The worker's side of report(), get_checkpoint(), should_stop() and the collectives. Runs in: worker.

Messages of the coordinator are read inside these calls, and not by a thread.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distrain import wire
from distrain.api import current
from distrain.api.backend import BackendConfig
from distrain.api.config import CheckpointUploadMode, StoreOptions
from distrain.api.context import CheckpointConsistencyMode, ReportedCheckpoint, ReportedCheckpointStatus, TrainContext
from distrain.errors import CheckpointError, CollectiveError
from distrain.storage.checkpoint import POSITIONS, Checkpoint
from distrain.storage.file_transfer import Files, LocalFiles, hash_files, states_of, store_files, wait_for_tick
from distrain.storage.files import copy_folders, list_files
from distrain.system.log import say, warn_once
from distrain.system.remote_path import RemotePath
from distrain.system.scratch import memory_directory
from distrain.worker.addresses import ReservedAddresses
from distrain.worker.job.job import ScriptWork, Work
from distrain.worker.reporting.checks import (
    check_checkpoint,
    check_finite,
    check_in_place,
    check_progress,
    check_sees_storage,
    encoded_validation,
    folder_in_place,
    is_kept,
)
from distrain.worker.reporting.memory_part import MemoryParts, Part, is_short
from distrain.worker.reporting.metrics import encode_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from distrain.data.iterator import DataIterator
    from distrain.data.positions import DataLoop
    from distrain.worker.reporting.written_files import WrittenFiles

MOST_UPLOADS = 2
"""Uploads of one rank at the same time; report() with a third checkpoint waits for the first upload."""
_COMMIT_WAIT_S = 5.0
"""Seconds to wait for commits after every rank has finished, before a worker exits and leaves its local files."""
_COPY_S = 10.0
"""Seconds that a failed train_func waits for a checkpoint on its way from a GPU to memory."""
_DEFAULTS = StoreOptions()
SYNC, ASYNC, NO_UPLOAD, MEMORY = CheckpointUploadMode


class WorkerChannel(Protocol):
    """A worker's connection to the coordinator."""

    at_end: bool
    has_uploader: bool
    """True if another process can store the files of a worker while it trains."""

    def send(self, message: wire.FromWorker) -> None: ...

    def receive(self) -> Sequence[wire.Frame]: ...

    def wait(self, timeout_s: float | None = None) -> Sequence[wire.Frame]: ...


class Session:
    """A worker's side of reports, checkpoints and collectives. Each rank has one."""

    @classmethod
    def of(cls, channel: WorkerChannel, spec: wire.WorkerSpec) -> Session:
        """Return the session of the rank that ``spec`` describes."""
        context = TrainContext(**{**spec.context, "devices": tuple(spec.context["devices"])})  # JSON has made it a list
        session = cls(channel, context, context.get_storage().checkpoint(spec.checkpoint) if spec.checkpoint else None)
        session._nan_metric, session._skip_to = spec.nan_metric, spec.skip_to
        session._prefers_memory, session.divergence = spec.memory_every is not None, spec.divergence
        if channel.has_uploader and (home := memory_directory()) is not None:
            session._memory = MemoryParts(home / f"rank_{context.world_rank}")
        return session

    def __init__(self, channel: WorkerChannel, context: TrainContext, checkpoint: Checkpoint | None) -> None:
        self.context = context
        self.checkpoint = checkpoint
        self.started_from = checkpoint
        """The checkpoint that this attempt has started from."""
        self.positions: dict[str, Callable[[], dict[str, Any]]] = {}
        """By the name of a dataset or loader: returns the rank's position in it, as JSON."""
        self._skip_to: dict[str, dict[str, Any]] = {}
        self.temporary: WrittenFiles | None = None
        """The files that this rank has written to the temporary directory, while its code runs."""
        self._nan_metric: str | None = None
        """See :class:`~distrain.wire.WorkerSpec`."""
        self.divergence: Sequence[Any] | None = None
        """See :class:`~distrain.wire.WorkerSpec`."""
        self.check_replicas: Callable[[], None] = lambda: None
        """Called at the beginning of every report(); set by the backend of the framework."""
        self.loaders: list[Any] = []
        """The progress of each prepared loader. The place in the list names the loader."""
        self.released = False
        """True once every rank has finished."""
        self.work = Work(backend=BackendConfig())
        """The work of this rank, once it is loaded."""
        self.stage = "import"
        """The phase of this rank: then come ``setup`` and ``run``."""
        self._shards: dict[str, DataIterator] = {}
        self.loader_wait_s = 0.0
        """Seconds for which train_func has waited for prepared loaders."""
        self._waits = {"data": 0.0, "checkpoint": 0.0}
        """Seconds for which this rank has waited so far. The next report has those since the last one."""
        self._reported_waits = dict(self._waits)
        self._channel = channel
        self._reports = 0
        self._has_resumed = False
        """True once train_func has asked for the checkpoint to start from."""
        self._reports_settled = 0
        """The reports whose checkpoints get_checkpoint() knows."""
        self._acknowledged = 0
        self._checkpoints = int(checkpoint is not None)  # as in Ray AIR
        self._uploading: dict[int, Checkpoint] = {}
        """By number of the report: checkpoints whose files are not stored yet."""
        self._copy_orders: dict[int, wire.CopyFiles] = {}
        self._memory: MemoryParts | None = None
        """Writes checkpoints into the memory of this host; None if no agent keeps them."""
        self._prefers_memory = False
        """True if checkpoints that SYNC would store go to memory."""
        self._in_memory: int | None = None
        """The number of the report with a checkpoint in memory that the next one waits for."""
        self._memory_is_short = False
        self._storing_errors: list[str] = []
        self._local_files: dict[int, LocalFiles] = {}
        """By number of the report: files to delete once its checkpoint is committed."""
        self._deletable: list[LocalFiles] = []
        """Files of committed checkpoints, to delete in report() or at the end: train_func may reuse their directory."""
        self.collectives = 0
        self.has_prepared_model = False
        self.addresses = ReservedAddresses(context, self.collective)
        self._questions = 0
        self._answers: dict[int, wire.Answer | None] = {}
        """By number: the answers to the questions that this rank waits for."""
        self._stop_calls = 0
        self._stop_at = self._vote_at = math.inf
        self.after_call: Callable[[], None] = lambda: None
        """Called after every call that may have kept the debugger from opening; set by it."""
        self.hooks: dict[str, Callable[[wire.Ask], object]] = {}
        """By what a wire.Ask asks for: the function of the sampler, the profiler or the debugger that answers."""
        self._lock = threading.RLock()  # not a Lock: a signal handler would wait for its own thread
        self._call = ""
        """The call that holds the lock."""
        self._pid = os.getpid()

    # -- report() -------------------------------------------------------------------------------------------------

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        options: StoreOptions = _DEFAULTS,
        progress: Sequence[float] | None = None,
    ) -> None:
        """Do what :func:`distrain.report` does."""
        began = time.monotonic()
        with self._exclusive("report()"), contextlib.ExitStack() as stack:
            options = self._choose_memory(options) if checkpoint else options
            stack.enter_context(self._counted(has_checkpoint=checkpoint is not None))
            self.work.backend.at_report()
            body = encode_metrics(metrics)
            check_finite(body, self._nan_metric)
            steps = check_progress(progress)
            check_checkpoint(checkpoint, self.context)
            validation = encoded_validation(options, checkpoint, self.context)
            if not (checkpoint or self._reports):
                with contextlib.suppress(CheckpointError):  # that matters only if a checkpoint follows
                    self._positions_now()  # reads that of the start, which may be deleted after the first report
            positions = self._positions_now() if checkpoint else {}
            if options.mode is ASYNC and not self._channel.has_uploader:
                options = replace(options, mode=SYNC, delete=options.deletes)
            self._listen()
            self.wait_until(lambda: self._reports - self._acknowledged < wire.MOST_UNACKNOWLEDGED)  # they may be lost
            self._raise_storing_error()
            if checkpoint is None:
                self._send_report(body, steps)
                return
            stack.callback(self._note_blocked, began)
            given = checkpoint, options
            checkpoint, options, local_files = self._prepare(*given)
            part = self._write_to_memory(checkpoint) if options.mode is MEMORY else None
            if options.mode is MEMORY and part is None:  # the next best mode
                checkpoint, options, local_files = self._prepare(*given)
            self._delete_committed()
            send = partial(self._send_report, body, steps, local_files, name=options.name, positions=positions or None)
            if part is not None:
                self._report_part(part, send)
                return
            waits, is_in_place = options.mode is SYNC or not self._channel.has_uploader, options.mode is NO_UPLOAD
            folder, files = self._folder_and_files(checkpoint, options, stack)
            facts = states_of(folder, files)
            if not waits:
                wait_for_tick(facts)
            send = partial(send, folder=str(folder), files=files, facts=facts, validation=validation)
            ordinal = send(in_place=is_in_place, waits=waits)
            if waits or options.mode is ASYNC:
                self._uploading[ordinal] = checkpoint  # which may delete its files with itself
            if waits:
                self._store(ordinal, folder, files)
            else:
                self.wait_until(lambda: len(self._uploading) <= MOST_UPLOADS)
            self._listen()

    @contextlib.contextmanager
    def _counted(self, *, has_checkpoint: bool) -> Iterator[None]:
        """Count a call that fails, too, so that the n-th reports of all ranks still belong together."""
        before = self._reports
        try:
            yield
        except BaseException as error:
            if self._reports == before:
                self._reports, self._checkpoints = before + 1, self._checkpoints + has_checkpoint
                with contextlib.suppress(Exception):  # of __str__, of a signal handler, or the coordinator is gone
                    failed = f"{type(error).__name__}: {error}"
                    self.send(wire.Reported, index=self._reports, has_checkpoint=has_checkpoint, failed=failed)
            raise

    def _note_blocked(self, since: float) -> None:
        self._waits["checkpoint"] += time.monotonic() - since

    def _new_waits(self) -> dict[str, float] | None:
        """Return how long this rank has waited since its last report, None if it did not."""
        self._waits["data"] = self.loader_wait_s + sum(shard.waited_s for shard in self._shards.values())
        new = {name: round(s - self._reported_waits[name], 6) for name, s in self._waits.items()}
        self._reported_waits = dict(self._waits)
        return {name: s for name, s in new.items() if s > 0} or None

    def _send_report(
        self, body: bytes, progress: list[float] | None, local_files: LocalFiles | None = None, **checkpoint: Any
    ) -> int:
        """Send a report, with the fields of a checkpoint if it has one. Return its number."""
        now, waited = time.time(), self._new_waits()
        fields = {"time": now, "body": body, "progress": progress, "waited": waited, **checkpoint}
        index = self._reports + 1
        # Counted just before it is sent: the coordinator waits for a number that an alarm kept from being sent.
        self._reports, self._checkpoints = index, self._checkpoints + bool(checkpoint)
        if local_files is not None:
            self._local_files[index] = local_files
        self.send(wire.Reported, index=index, has_checkpoint=bool(checkpoint), **fields)
        return index

    def _prepare(
        self, checkpoint: Checkpoint, options: StoreOptions
    ) -> tuple[Checkpoint, StoreOptions, LocalFiles | None]:
        """Return the checkpoint to store, how to store it, and the local files to delete once it is committed."""
        if self.temporary is not None and (part := self.temporary.own_part(checkpoint)) is not None:
            checkpoint, options = part, replace(options, delete=True)
        checkpoint = checkpoint.as_reported(self._checkpoints, self.work.backend.portable)
        is_local = bool(checkpoint.path) and checkpoint.remote_path is None
        local_files = None
        copies_first = False
        if options.mode is MEMORY and self._memory_is_short:  # files that the user may change after the call
            copies_first = not options.deletes
            mode = SYNC if self._prefers_memory else ASYNC
            options = replace(options, mode=mode, delete=options.deletes)
        if is_local:
            folder = Path(checkpoint.path)
            self._local_files = {n: files for n, files in self._local_files.items() if not files.overlaps(folder)}
            self._deletable = [files for files in self._deletable if not files.overlaps(folder)]
            in_place = options.mode is NO_UPLOAD and options.function is None
            if options.deletes and not in_place and not is_kept(checkpoint, self.context):
                local_files = LocalFiles(folder)
        if options.function is not None:
            checkpoint = self._call_upload_function(checkpoint, options.function, options)
            options = replace(options, mode=NO_UPLOAD, function=None)
        if options.mode is NO_UPLOAD:
            check_in_place(checkpoint, self.context)
        elif options.mode is ASYNC and (copies_first or not is_local):
            checkpoint = Checkpoint(checkpoint.to_directory())
            local_files = LocalFiles(Path(checkpoint.path))
        return checkpoint, options, local_files

    def _call_upload_function(
        self, checkpoint: Checkpoint, function: Callable[[Checkpoint, str], Checkpoint], options: StoreOptions
    ) -> Checkpoint:
        check_sees_storage(self.context, "checkpoint_upload_fn")
        name = options.name or f"checkpoint_{self.context.attempt}-{self._reports + 1:06d}"  # for all ranks
        stored = function(checkpoint, name)
        if not isinstance(stored, Checkpoint) or not stored.path:
            raise TypeError(
                f"report(): checkpoint_upload_fn must return the Checkpoint that it has stored, got {stored!r}"
            )
        return stored

    def _folder_and_files(
        self, checkpoint: Checkpoint, options: StoreOptions, stack: contextlib.ExitStack
    ) -> tuple[Path, list[str]]:
        """Return the directory of a checkpoint and its files; no files if other ranks may still write into it."""
        if options.mode is NO_UPLOAD:
            return folder_in_place(checkpoint, self.context), []
        folder = Path(stack.enter_context(checkpoint.as_directory()))
        return folder, list_files(folder)

    def _choose_memory(self, options: StoreOptions) -> StoreOptions:
        """Return how to store a checkpoint, given what the user asked for and whether memory can keep it."""
        if self._prefers_memory and options == replace(_DEFAULTS, name=options.name, delete=options.delete):
            options = replace(options, mode=MEMORY)
        if options.mode is MEMORY and self._memory is None:
            warn_once("nothing keeps checkpoints in memory here, so they are stored with CheckpointUploadMode.SYNC")
            options = replace(options, mode=SYNC)
        return options

    def _write_to_memory(self, checkpoint: Checkpoint) -> Part | None:
        """Write a checkpoint into the memory of this host. If that is full, tell the coordinator and return None."""
        assert self._memory is not None
        self.wait_until(lambda: self._in_memory is None)
        try:
            return self._memory.write(f"{self.context.attempt}-{self._reports + 1}", checkpoint)
        except Exception as error:
            if not is_short(error):
                raise
            self._memory_is_short = True
            self._send_written(0, Part(Path(), []), error)
            return None

    def _report_part(self, part: Part, send: Callable[..., int]) -> None:
        """Report what is in memory with ``send``, which returns its number."""
        assert self._memory is not None
        is_written = part.copy_from_gpu is None
        send = partial(send, folder=str(part.folder), files=part.files, facts=part.facts)
        ordinal = self._in_memory = send(in_memory=True, is_written=is_written, waits=False)
        if not is_written:
            self._memory.finish(part, partial(self._send_written, ordinal, part))

    def _end_in_memory(self, ordinal: int, *, is_dropped: bool) -> None:
        if self._in_memory is not None and self._in_memory <= ordinal:
            self._in_memory = None
        if is_dropped and self._memory is not None:
            self._memory.drop(f"{self.context.attempt}-{ordinal}")

    def _send_written(self, ordinal: int, part: Part, failed: Exception | None) -> None:
        """Send that a part is written, that there is no room for it, or that this checkpoint cannot be stored."""
        if failed is None or is_short(failed):
            why = failed and str([repr(failed), *failed.args][-1])
            self.send(wire.PartWritten, ordinal=ordinal, failed=why, facts=part.facts)
        else:
            self.send(wire.FilesCopied, ordinal=ordinal, failed=f"{type(failed).__name__}: {failed}")

    def _raise_storing_error(self) -> None:
        if self._storing_errors:
            raise CheckpointError(self._storing_errors.pop(0))

    def finish_uploads(self) -> None:
        """Wait until all checkpoints are stored. Raises CheckpointError if one cannot be."""
        with self._exclusive("finish_uploads()"):
            self.wait_until(lambda: not self._uploading)
            if self._memory is not None:
                self._memory.wait()
            self._listen()
            self._delete_committed()
            self._raise_storing_error()

    def finish_copy_from_gpu(self) -> None:
        """Let the last checkpoint be written to memory, although train_func has failed: it takes only moments."""
        if self._memory is not None:
            self._memory.wait(_COPY_S)

    # -- positions in the data ------------------------------------------------------------------------------------

    @cached_property
    def _positions_at_start(self) -> dict[str, dict[int, dict[str, Any]]]:
        start, datasets = self.started_from, self.work.run_datasets
        stored = start.get_metadata().get(POSITIONS, {}) if start is not None else {}
        ignored = datasets.by_name if datasets and not datasets.resume and not self._goes_on else {}
        positions = {
            name: {int(rank): position for rank, position in of.items()}
            for name, of in stored.items()
            if name not in ignored
        }
        for name, end in self._skip_to.items():
            epochs = [before.get("since", before.get("epoch", 0)) for before in positions.get(name, {}).values()]
            since = min(epochs, default=0)
            positions[name] = {0: {**end, "since": since} if end.get("epoch", 0) > since else end}
        return positions

    @property
    def _goes_on(self) -> bool:
        """True if this attempt has started from a checkpoint of its own run, and not from one of another run."""
        start, run = self.started_from, self.context.get_storage().run
        if start is None:
            return False
        place = start.remote_path or Path(os.path.realpath(start.path))
        return str(place.parent) == (str(run) if isinstance(run, RemotePath) else os.path.realpath(run))

    def positions_at_start(self, name: str) -> dict[int, dict[str, Any]]:
        """Return the positions in a dataset or loader that the checkpoint has from which this attempt has started.

        They are by rank. A rank without an entry has the position of the next lower rank that has one. After a
        rollback, all ranks have the position at which it happened. If that is in a later epoch, ``since`` is the epoch
        of the checkpoint, from which on epochs have no rows. Raises CheckpointError if the checkpoint cannot be read.
        """
        return self._positions_at_start.get(name, {})

    def _positions_now(self) -> dict[str, dict[str, Any]]:
        """Return this rank's positions; those of the start for what it has not opened yet."""
        rank = self.context.world_rank
        before = {
            name: of[max(r for r in of if r <= rank or r == min(of))] for name, of in self._positions_at_start.items()
        }
        return before | {name: position() for name, position in self.positions.items()}

    def positions_to_skip_to(self) -> dict[str, dict[str, Any]]:
        """Return the positions that all ranks have when they have got as many batches as this one.

        These are the positions of the loops that a Rollback has ended. Other data, such as that of validations in
        between, goes back to the checkpoint, unless there is no such loop.
        """
        loops = self._data_loops()
        newest = max((loop.newest for loop in loops.values()), default=0)
        ended = {name for name, loop in loops.items() if loop.interrupt(newest)}
        positions = {name: at for name, at in self._positions_now().items() if name in ended or not ended}
        own = [name for name, position in positions.items() if "rank" in position and position["ranks"] > 1]
        if own:
            say(f"no rows of {', '.join(own)} are left out: only the loader of each rank knows where that rank is")
        return {name: position for name, position in positions.items() if name not in own}

    # -- storing files --------------------------------------------------------------------------------------------

    def _store(self, ordinal: int, folder: Path, files: list[str]) -> None:
        """Copy this rank's part of the files when the coordinator orders it, or wait until an uploader has done it."""
        try:
            self.wait_until(lambda: ordinal in self._copy_orders or ordinal not in self._uploading)
            order = self._copy_orders.pop(ordinal, None)
            copied, skipped = self._copy(order, folder, files) if order is not None else ([], [])
        except BaseException as error:  # such as an alarm of the user's: no other process can store these files
            self._local_files.pop(ordinal, None)
            if not isinstance(self.context.get_storage().run, RemotePath) and self.context.sees_storage:
                failed = str(error) if isinstance(error, OSError) else repr(error)
                self.send(wire.FilesCopied, ordinal=ordinal, failed=failed)
            raise
        finally:
            self._uploading.pop(ordinal, None)
        if order is not None:
            self.send(wire.FilesCopied, ordinal=ordinal, files=copied, skipped=skipped)
        else:
            self._raise_storing_error()

    def _copy(self, order: wire.CopyFiles, folder: Path, files: list[str]) -> tuple[Files, Files]:
        """Copy the files as ordered. Return facts about these files, and about those that a lower rank reports."""
        target = Path(order.directory)
        if folder == target:  # all ranks have written into it
            return store_files(folder, target, list_files(folder)), []
        copy_folders(folder, target)
        ordered = set(order.files)
        copied = store_files(folder, target, [path for path in files if path in ordered])
        return copied, hash_files(folder, [path for path in files if path not in ordered])

    # -- deleting local files -------------------------------------------------------------------------------------

    def _note_deletable(self, ordinal: int, *, has_files: bool) -> None:
        """Note that local files of this checkpoint are no longer needed. Those of dropped checkpoints stay."""
        local_files = self._local_files.pop(ordinal, None)  # an earlier checkpoint may be committed later
        if local_files is not None and has_files:
            self._deletable.append(local_files)

    def _delete_committed(self) -> None:
        """Delete the local files of committed checkpoints."""
        while self._deletable:
            self._deletable.pop().delete()

    def wait_for_commits(self) -> None:
        """Wait for the commits after which local files can be deleted; not long after every rank has finished."""
        deadline = math.inf
        while self._local_files and time.monotonic() < deadline:
            if self.released and deadline == math.inf:
                deadline = time.monotonic() + _COMMIT_WAIT_S
            self._listen(wait=True, until=deadline)
        self._delete_committed()

    def wait_for_release(self) -> None:
        """Block until every rank has finished."""
        self.wait_until(lambda: self.released)
        self._delete_committed()

    # -- datasets -------------------------------------------------------------------------------------------------

    def dataset_shard(self, name: str | None) -> DataIterator:
        """Do what :func:`distrain.get_dataset_shard` does."""
        datasets = self.work.run_datasets
        known = list(datasets.by_name) if datasets else []
        if name is None:
            name = known[0] if len(known) == 1 else "train"
        if datasets is None or name not in known:
            names = f"has {', '.join(map(repr, known))}" if known else "was not given"
            raise KeyError(f"there is no dataset {name!r}: the trainer's datasets= {names}")
        if name not in self._shards:
            self._shards[name] = datasets.shard(
                name,
                self.context.world_rank,
                self.context.world_size,
                start=self.positions_at_start(name),
                is_stopping=lambda: self.stopped,
                others=lambda: self._data_loops().values(),
            )
            self.positions[name] = self._shards[name].position
        return self._shards[name]

    def _data_loops(self) -> dict[str, DataLoop]:
        """Return the newest loop over each dataset and each prepared loader."""
        loaders = {f"loader {number}": each for number, each in enumerate(self.loaders, 1) if each.has_position}
        return {name: each.loop for name, each in (self._shards | loaders).items() if each.loop}

    # -- other calls ----------------------------------------------------------------------------------------------

    def all_checkpoints(self, mode: CheckpointConsistencyMode, timeout_s: float | None) -> list[ReportedCheckpoint]:
        """Do what :func:`distrain.get_all_reported_checkpoints` does."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        validated = mode is CheckpointConsistencyMode.VALIDATED
        with self._exclusive("get_all_reported_checkpoints()"):
            answer = self._ask(wire.AskCheckpointList, deadline, validated=validated)
            if answer is None:
                answer = self._ask(wire.AskCheckpointList, validated=validated, at_once=True)
            known = json.loads(_body(answer))
        storage = self.context.get_storage()
        return [
            ReportedCheckpoint(storage.checkpoint(c["path"]), c["metrics"], ReportedCheckpointStatus(c["status"]))
            for c in known
        ]

    def should_stop(self) -> bool:
        """Do what :func:`distrain.should_stop` does."""
        with self._exclusive("should_stop()"):
            self._listen()
            self._stop_calls += 1
            if self._stop_calls == 1:
                self.send(wire.StopVote)
            if self._stop_at == math.inf and self._stop_calls >= self._vote_at:
                # Until the ranks agree at which call they stop, or vote again: see decisions.run.stop_consensus.
                self.send(wire.StopVote, call=self._stop_calls)
                self.wait_until(lambda: self._stop_at < math.inf or self._vote_at > self._stop_calls)
            return self.stopped

    @property
    def stopped(self) -> bool:
        """True once should_stop() has been true."""
        return self._stop_calls >= self._stop_at

    @property
    def runs_script(self) -> bool:
        """True if this rank runs a script, as under torchrun, and no function."""
        return isinstance(self.work, ScriptWork)

    @contextlib.contextmanager
    def _exclusive(self, caller: str) -> Iterator[None]:
        """Let one call run at a time. Raises RuntimeError in a signal handler that interrupts another call."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"{caller} was called in a child process of the worker; call it in the worker itself")
        try:
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
        finally:  # also after an exception, which train_func may catch
            self.after_call()

    def collective(self, name: str, data: bytes, timeout_s: float | None = None, *, gathers: bool = False) -> bytes:
        """Wait until every rank is in its n-th collective, and return rank 0's data.

        gathers: return every rank's data, a line for each.

        Raises CollectiveError if the ranks call different operations, if one has finished, or after ``timeout_s``.
        """
        with self._exclusive(name):
            self.collectives += 1
            call = partial(
                wire.CollectiveEntered,
                index=self.collectives,
                operation=name,
                body=data,
                gathers=gathers,
                timeout_s=timeout_s,
            )
            return _body(self._ask(call), CollectiveError)

    def get_checkpoint(self) -> Checkpoint | None:
        """Do what :func:`distrain.get_checkpoint` does."""
        is_start, self._has_resumed = not (self._has_resumed or self._reports), True
        if is_start:  # others may have reported a newer one while this rank was starting
            return self.started_from
        if os.getpid() == self._pid:
            with self._lock:
                if not self._call:  # else this is a signal handler, which gets what is known
                    with self._exclusive("get_checkpoint()"):
                        self._listen()
                        self._await_reported_checkpoints()
        return self.checkpoint

    def _await_reported_checkpoints(self) -> None:
        """Wait until the checkpoints of all reports that this rank has made are committed or dropped."""
        if self._reports == self._reports_settled:
            return
        self._ask(wire.AskCheckpointList, synced=True)
        self._reports_settled = self._reports

    def fetch_checkpoint(self, path: str, files: Collection[str] | None) -> str:
        """Have files of a checkpoint copied to this host, which does not see it. Return where, once they are there.

        files: None for all. Raises CheckpointError if that is not possible.
        """
        if os.getpid() != self._pid:
            raise CheckpointError(f"{path} is not on this host: call as_directory() in the worker, not in its child")
        try:
            with self._lock:
                answer = self._ask(wire.FetchCheckpoint, path=path, files=None if files is None else list(files))
        finally:
            self.after_call()
        return os.fsdecode(_body(answer, CheckpointError))

    @property
    def is_in_call(self) -> bool:
        """True if the calling thread is in a call that uses the channel. It must not read messages."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def send(self, message: Callable[..., wire.FromWorker], **fields: Any) -> None:
        """Send a message of this rank in this attempt."""
        self._channel.send(message(attempt=self.context.attempt, rank=self.context.world_rank, **fields))

    def _ask(
        self, question: Callable[..., wire.Question], until: float = math.inf, **fields: Any
    ) -> wire.Answer | None:
        """Ask the coordinator, and return its answer; None if there is none until then (time.monotonic)."""
        self._questions += 1
        number = self._questions
        self._answers[number] = None
        try:
            self.send(question, question=number, **fields)
            while self._answers[number] is None and time.monotonic() < until:
                self._listen(wait=True, until=until)
            return self._answers[number]
        finally:
            del self._answers[number]

    def wait_until(self, is_due: Callable[[], object]) -> None:
        """Handle messages until that is true."""
        with self._lock:
            while not is_due():
                self._listen(wait=True)

    def _listen(self, *, wait: bool = False, until: float = math.inf) -> None:
        """Handle the messages that have arrived.

        wait: for at least one message, but not longer than ``until`` (time.monotonic).
        """
        left_s = None if until == math.inf else max(0.0, until - time.monotonic())
        with self._lock:
            self.handle(self._channel.wait(left_s) if wait else self._channel.receive())
        if wait and self._channel.at_end:
            os._exit(1)  # the agent is gone, and with it the connection to the coordinator

    def poll(self) -> bool:
        """Handle the messages that have arrived, unless a call of distrain is doing that. A thread calls this.

        Return False in that case.
        """
        if is_free := self._lock.acquire(blocking=False):
            try:
                self._listen()
            finally:
                self._lock.release()
        return is_free

    def handle(self, frames: Sequence[wire.Frame]) -> None:
        """Handle messages that were received."""
        for frame in frames:
            self._on_message(frame.message())

    def _on_message(self, message: wire.Message) -> None:
        match message:
            case wire.CopyFiles(ordinal=ordinal):
                self._copy_orders[ordinal] = message
            case wire.FilesStored(ordinal=ordinal, failed=failed):
                self._uploading.pop(ordinal, None)
                was_short = self._memory_is_short and ordinal == self._in_memory  # nothing is wrong with the next one
                if ordinal == self._in_memory:
                    self._end_in_memory(ordinal, is_dropped=failed is not None)
                if failed is not None and not was_short:
                    self._local_files.pop(ordinal, None)
                    self._storing_errors.append(f"a checkpoint of this rank could not be stored: {failed}")
            case wire.CommitDone(ordinal=ordinal, path=path, has_files=has_files):
                self._end_in_memory(ordinal, is_dropped=not path)
                self._uploading.pop(ordinal, None)  # if it was dropped, nothing stores it
                if path:
                    self.checkpoint = self.context.get_storage().checkpoint(path)
                self._note_deletable(ordinal, has_files=has_files)
            case wire.StoreInstead():
                self._memory_is_short = True
            case wire.Acknowledged(index=index):
                self._acknowledged = index
            case wire.Answer(question=number) if number in self._answers:
                self._answers[number] = message
            case wire.StopDecision(call=call, final=True):
                self._stop_at = call
            case wire.StopDecision(call=call):
                self._vote_at = call
            case wire.Ask(what=what) if what in self.hooks:
                self.hooks[what](message)
            case wire.Release():
                self.released = True


def _body(answer: wire.Answer | None, kind: type[Exception] = RuntimeError) -> bytes:
    """Return what was asked for. Raise an exception of this kind if that is impossible."""
    assert answer is not None
    if answer.failed is not None:
        raise kind(answer.failed)
    return answer.body


def session_of(caller: str) -> Session:
    """Return the session of this rank, for frameworks. Raise RuntimeError outside of a rank."""
    session: Session = current.session_of(caller)
    return session
