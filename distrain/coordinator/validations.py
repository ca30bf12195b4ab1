"""Validation of checkpoints by the user's function, one after the other, in a process. Runs in: coordinator.

The training continues whatever a validation finds.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain.api.context import ReportedCheckpointStatus as Status
from distrain.decisions.checkpoints.actions import Validate, Validated
from distrain.decisions.hearing import does
from distrain.system import process
from distrain.system.log import say, warn
from distrain.transfer.order_link import OrderLink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distrain import wire
    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.events import RunRequest
    from distrain.storage.commit import CommittedCheckpoint
    from distrain.system.loop import Loop


@dataclass(slots=True)
class _Task:
    """The validation under way, and its process."""

    saved: CommittedCheckpoint
    link: OrderLink


class Validations:
    """The queue of checkpoints to validate. tell: tells how each validation has ended."""

    def __init__(
        self,
        loop: Loop,
        request: RunRequest,
        store: RunStore,
        tell: Callable[[str, Validated], None],
    ) -> None:
        self._loop = loop
        self._request = request
        self._store = store
        self._tell = tell
        self._queue: deque[CommittedCheckpoint] = deque()
        self._task: _Task | None = None

    @does(Validate)
    def add(self, asked: Validate) -> None:
        """Queue a checkpoint."""
        self._queue.append(asked.saved)
        self._next()

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being validated or waits for that."""
        return bool(self._unfinished)

    @property
    def _unfinished(self) -> list[CommittedCheckpoint]:
        return [*([] if self._task is None else [self._task.saved]), *self._queue]

    def abort(self) -> None:
        """Kill the validation under way and empty the queue. A run that continues this one validates the rest."""
        self._queue.clear()
        if self._task is not None:
            self._close(self._task)

    def give_up(self, why: str) -> None:
        """Do the same at the end of a run that nothing continues, and record the rest as failed for this reason."""
        unfinished = self._unfinished
        self.abort()
        for saved in unfinished:
            self._record(saved, Status.VALIDATION_FAILED, {}, why)

    # -- one validation -------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self._queue and self._task is None:
            self._begin(self._queue.popleft())

    def _begin(self, saved: CommittedCheckpoint) -> None:
        request, validator = self._request, self._request.validator
        assert validator is not None
        assert saved.validation is not None
        paths = self._store.paths
        log = paths.validation_log(saved.path.name)
        environment = {**validator.environment, process.RUN_IDS: process.extended_run_ids(request.run_id)}
        link = OrderLink(
            self._loop,
            lambda message: None,  # it says nothing unasked
            "validator",
            *(str(paths.root), str(log)),
            flags=request.python_flags,
            environment=environment,
        )
        limit_s = saved.validation["timeout_s"]
        limit_s = validator.timeout_s if limit_s is None else limit_s
        task = self._task = _Task(saved, link)
        if limit_s is not None:
            why = "it took longer than its timeout_s"
            self._loop.call_in("validation", limit_s, partial(self._end, task, Status.VALIDATION_TIMEOUT, {}, why))
        overrides, path = saved.validation["overrides"], str(saved.path)
        order = replace(validator.order, checkpoint=path, filesystem=request.filesystem, overrides=overrides)
        link.order(order, partial(self._on_answer, task))

    def _on_answer(self, task: _Task, answer: wire.OrderDone) -> None:
        if answer.failed is not None:
            self._end(task, Status.VALIDATION_FAILED, {}, answer.failed)
        else:
            self._end(task, Status.VALIDATED, json.loads(answer.body), None)

    def _end(self, task: _Task, status: Status, metrics: Mapping[str, Any], why: str | None) -> None:
        self._close(task)
        output = self._store.display_path(self._store.paths.validation_log(task.saved.path.name))
        self._record(task.saved, status, metrics, why and f"{why} (its output: {output})")
        self._next()

    def _close(self, task: _Task) -> None:
        self._task = None
        self._loop.cancel("validation")
        task.link.close()

    def _record(self, saved: CommittedCheckpoint, status: Status, metrics: Mapping[str, Any], why: str | None) -> None:
        self._tell("", Validated(saved, status.value, metrics))
        if why is None:
            values = (f"{name}={v:g}" if isinstance(v, float) else f"{name}={v}" for name, v in metrics.items())
            say(f"validated {saved.path.name}: {', '.join(values)}")
        else:
            warn(f"the validation of {saved.path.name} has failed: {why}")
