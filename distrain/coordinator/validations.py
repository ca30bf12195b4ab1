"""Checkpoints that wait for the user's validation function, and the process that calls it. Runs in: coordinator.

One at a time, in order. Whatever comes of it, the training goes on.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from distrain import wire
from distrain.context import ReportedCheckpointStatus as Status
from distrain.errors import CheckpointError
from distrain.system import process
from distrain.system.log import say, warn
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from distrain.decisions.events import RunRequest
    from distrain.storage.records import CommittedCheckpoint
    from distrain.storage.run_store import RunStore
    from distrain.system.loop import Loop

WAITING = "waiting for the validation of the last checkpoints"


@dataclass(slots=True)
class _Task:
    """One validation in its process."""

    saved: CommittedCheckpoint
    process: process.Process
    channel: Channel
    log: Path
    deadline: float | None
    answer: wire.ValidationResult | None = None


class Validations:
    """``changed`` is called when one has ended, and with it what is known of the checkpoint."""

    def __init__(self, request: RunRequest, store: RunStore, *, log_dir: Path | None = None) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._request = request
        self._store = store
        self._log_dir = log_dir
        self._loop: Loop | None = None
        self._queue: deque[CommittedCheckpoint] = deque()
        self._task: _Task | None = None
        self._opening: CommittedCheckpoint | None = None
        """The one whose log is being opened."""

    def start(self, loop: Loop | None) -> None:
        """The run begins, with what an earlier part of it left unvalidated. Without a loop, :meth:`pump` does it."""
        self._loop = loop
        for saved in self._store.committed:
            if saved.is_pending and self._request.validator is not None:
                self.add(saved)

    def add(self, saved: CommittedCheckpoint) -> None:
        self._queue.append(saved)
        self._next()

    def awaits(self, saved: CommittedCheckpoint) -> bool:
        """Whether something is still to come of its validation: not if an earlier part of the run asked for it, and
        this one has no function.
        """
        return saved in self._unfinished

    @property
    def busy(self) -> bool:
        return bool(self._unfinished)

    @property
    def _unfinished(self) -> list[CommittedCheckpoint]:
        under_way = self._task.saved if self._task is not None else self._opening
        return [*([] if under_way is None else [under_way]), *self._queue]

    def deadline(self) -> float | None:
        """When :meth:`tick` is due."""
        return self._task.deadline if self._task else None

    def tick(self) -> None:
        task = self._task
        if task is not None and task.deadline is not None and time.monotonic() >= task.deadline:
            self._end(task, Status.VALIDATION_TIMEOUT, {}, "it took longer than its timeout_s")

    def pump(self, timeout_s: float) -> None:
        """Without a loop: wait that long at most for the one that runs."""
        task = self._task
        if task is None:
            return
        left_s = timeout_s if task.deadline is None else min(timeout_s, max(0.0, task.deadline - time.monotonic()))
        task.channel.flush()
        frames = task.channel.wait(left_s)
        if frames or task.channel.at_end:
            self._on_frames(task, frames)
        self.tick()

    def abort(self) -> None:
        """End what runs, and begin nothing more; it is done when the run goes on."""
        self._queue.clear()
        self._opening = None
        if self._task is not None:
            self._close(self._task)

    def give_up(self, why: str) -> None:
        """The same in a run that will not go on: they have failed, for that reason."""
        unfinished = self._unfinished
        self.abort()
        for saved in unfinished:
            self._tell(saved, Status.VALIDATION_FAILED, {}, why)
        self.changed()

    # -- one of them ----------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self._queue and self._task is None and self._opening is None:
            saved = self._opening = self._queue.popleft()
            log = self._store.paths.validation_log(saved.path.name, self._log_dir)

            def opened(file: IO[bytes]) -> None:
                with file:
                    if self._opening is saved:
                        self._opening = None
                        self._try_to_begin(saved, log, file)

            def failed(error: OSError) -> None:
                if self._opening is saved:
                    self._opening = None
                    self._cannot_begin(saved, error)

            self._store.open_log(log, opened, failed)

    def _try_to_begin(self, saved: CommittedCheckpoint, log: Path, file: IO[bytes]) -> None:
        try:
            self._begin(saved, log, file)
        except (OSError, CheckpointError) as error:
            self._cannot_begin(saved, error)

    def _cannot_begin(self, saved: CommittedCheckpoint, error: BaseException) -> None:
        self._note(saved, Status.VALIDATION_FAILED, {}, f"its process cannot be started: {error}")
        self._next()

    def _begin(self, saved: CommittedCheckpoint, log: Path, file: IO[bytes]) -> None:
        request, validator = self._request, self._request.validator
        assert validator is not None
        assert saved.validation is not None
        checkpoint = str(saved.path)
        environment = {**validator.environment, process.RUN_IDS: process.extended_run_ids(request.run_id)}
        argv = process.bootstrap_argv("validator", str(os.getpid()), flags=request.python_flags)
        started = process.spawn(argv, stderr=file.fileno(), environment=environment)
        assert started.stdin is not None
        assert started.stdout is not None
        channel = Channel(os.dup(started.stdout.fileno()), os.dup(started.stdin.fileno()))
        started.stdin.close()
        started.stdout.close()
        limit_s = saved.validation["timeout_s"]
        limit_s = validator.timeout_s if limit_s is None else limit_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        task = self._task = _Task(saved, started, channel, log, deadline)
        if self._loop is not None:
            channel.attach(self._loop, lambda frames: self._on_frames(task, frames))
        channel.queue(
            wire.RunValidation(
                checkpoint=checkpoint,
                filesystem=request.filesystem,
                overrides=saved.validation["overrides"],
                directory=validator.directory,
                sys_path=validator.sys_path,
                body=validator.blob,
            )
        )

    def _on_frames(self, task: _Task, frames: list[wire.Frame]) -> None:
        if task is not self._task:  # it has answered, and now its end comes too
            return
        for frame in frames:
            message = frame.message()
            assert isinstance(message, wire.ValidationResult)
            task.answer = message
        if task.answer is None and not task.channel.at_end:
            return
        if task.answer is None:
            process.kill_group(task.process.pid, signal.SIGKILL)  # it may still be on its way out
            code = task.process.wait()
            self._end(task, Status.VALIDATION_FAILED, {}, f"its process has died (exit code {code})")
        elif task.answer.failed is not None:
            self._end(task, Status.VALIDATION_FAILED, {}, task.answer.failed)
        else:
            self._end(task, Status.VALIDATED, json.loads(task.answer.body), None)

    def _end(self, task: _Task, status: Status, metrics: Mapping[str, Any], why: str | None) -> None:
        self._close(task)
        shown = f"{why} (its output: {self._store.display_path(task.log)})" if why else None
        self._note(task.saved, status, metrics, shown)
        self._next()

    def _close(self, task: _Task) -> None:
        self._task = None
        task.channel.close()
        process.kill_group(task.process.pid, signal.SIGKILL)
        task.process.wait()

    def _note(self, saved: CommittedCheckpoint, status: Status, metrics: Mapping[str, Any], why: str | None) -> None:
        self._tell(saved, status, metrics, why)
        self.changed()

    def _tell(self, saved: CommittedCheckpoint, status: Status, metrics: Mapping[str, Any], why: str | None) -> None:
        self._store.add_validation(saved, status.value, metrics)
        if why is None:
            said = ", ".join(
                f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
                for name, value in metrics.items()
            )
            say(f"validated {saved.path.name}: {said}")
        else:
            warn(f"the validation of {saved.path.name} has failed: {why}")
